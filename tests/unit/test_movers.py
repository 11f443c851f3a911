"""Threads and queues: single flight, demand before hint, and an end that leaves nobody waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adaptercache import CacheClosed
from adaptercache.movers import Hop, Job, Movers

FETCH = Hop.FETCH


class Bench:
    """Movers with one thread a hop, and what became of each job."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended: list[Any] = []
        self.go_on = threading.Event()
        self.standing = threading.Event()
        self.tell: Callable[[], None] = lambda: None
        self.movers = Movers(
            self.lock, dict.fromkeys(Hop, 1), ended=lambda: None, tell=lambda: self.tell()
        )

    def submit(
        self, key: str, work: Callable[[], Any] | None = None, *, demand: bool = True
    ) -> None:
        done = lambda result, seconds: self.ended.append(key)  # noqa: E731
        failed = lambda error, seconds: self.ended.append((key, type(error)))  # noqa: E731
        with self.lock:
            self.movers.submit(Job(FETCH, key, work or (lambda: None), done, failed, demand))

    def stand_still(self) -> None:
        """Keep the thread busy until told to go on."""

        def work() -> None:
            self.standing.set()
            self.go_on.wait(10)

        self.submit("first", work)
        assert self.standing.wait(10)

    def join(self, key: str, *, demand: bool = False) -> bool:
        with self.lock:
            return self.movers.join(FETCH, key, demand=demand)

    def wait(self, count: int) -> list[Any]:
        self.go_on.set()
        for _ in range(5000):
            with self.lock:
                if len(self.ended) >= count:
                    break
            threading.Event().wait(0.001)
        return self.ended


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.go_on.set()
    bench.movers.close()


def test_a_job_that_is_queued_or_runs_is_joined(bench: Bench) -> None:
    bench.stand_still()
    bench.submit("second")
    assert bench.join("first")
    assert bench.join("second")
    assert not bench.join("third")


def test_a_job_that_has_ended_is_not_joined(bench: Bench) -> None:
    bench.submit("first")
    bench.wait(1)
    assert not bench.join("first")


def test_demands_go_before_hints(bench: Bench) -> None:
    bench.stand_still()
    bench.submit("hint", demand=False)
    bench.submit("demand")
    assert bench.wait(3) == ["first", "demand", "hint"]


def test_a_hint_that_becomes_a_demand_goes_before_other_hints(bench: Bench) -> None:
    bench.stand_still()
    bench.submit("hint", demand=False)
    bench.submit("raised", demand=False)
    assert bench.join("raised", demand=True)
    assert bench.wait(3) == ["first", "raised", "hint"]


def test_a_raised_hint_runs_once(bench: Bench) -> None:
    runs: list[int] = []
    bench.stand_still()
    bench.submit("raised", lambda: runs.append(1), demand=False)
    bench.join("raised", demand=True)
    bench.submit("last", demand=False)
    bench.wait(3)
    assert runs == [1]


@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_job_raises_is_its_own_failure(bench: Bench, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    bench.submit("fails", fail)
    bench.submit("next")
    assert bench.wait(2) == [("fails", error), "next"]


def test_a_decision_that_raises_stops_no_other_job(bench: Bench) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a defect")

    with bench.lock:
        bench.movers.submit(Job(FETCH, "defect", lambda: None, fail, fail))
    bench.submit("next")
    assert bench.wait(1) == ["next"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_hook_that_interrupts_is_logged_and_ends_no_thread_and_no_job(
    bench: Bench, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt() -> None:
        raise error("of a hook")

    bench.tell = interrupt
    bench.submit("first", lambda: bench.movers.report(FETCH, lambda: None))
    bench.submit("second")
    assert bench.wait(2) == ["first", "second"]
    bench.movers.close()
    logged = [record for record in caplog.records if record.name == "adaptercache.movers"]
    assert len(logged) == 3  # as the first reports, and as each ends
    for record in logged:
        assert (record.levelname, record.hop) == ("ERROR", FETCH.label)  # type: ignore[attr-defined]
        assert record.exc_info is not None
        assert record.exc_info[0] is error


def test_a_handler_of_logging_that_exits_ends_no_thread(bench: Bench) -> None:
    class Exits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit

    def interrupt() -> None:
        raise KeyboardInterrupt

    handler, log = Exits(), logging.getLogger("adaptercache.movers")
    bench.tell = interrupt
    log.addHandler(handler)
    try:
        bench.submit("first")
        bench.submit("second")
        assert bench.wait(2) == ["first", "second"]
        bench.movers.close()
    finally:
        log.removeHandler(handler)


def test_closing_fails_what_is_queued_and_lets_what_runs_end(bench: Bench) -> None:
    bench.stand_still()
    bench.submit("second")
    closing = threading.Thread(target=bench.movers.close)
    closing.start()
    while not bench.ended:
        threading.Event().wait(0.001)
    assert bench.ended == [("second", CacheClosed)]
    bench.go_on.set()
    closing.join(10)
    assert bench.ended == [("second", CacheClosed), "first"]


def test_a_job_given_to_closed_movers_fails(bench: Bench) -> None:
    bench.movers.close()
    bench.submit("late")
    assert bench.ended == [("late", CacheClosed)]


def test_the_gauges_tell_what_is_queued_and_what_runs(bench: Bench) -> None:
    bench.stand_still()
    bench.submit("second")
    bench.submit("third", demand=False)
    with bench.lock:
        assert (bench.movers.queued(FETCH), bench.movers.running) == (2, 1)
    bench.wait(3)
    with bench.lock:
        assert (bench.movers.queued(FETCH), bench.movers.running) == (0, 0)
