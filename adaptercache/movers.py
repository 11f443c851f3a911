"""The threads that move bytes, and their queues: single flight, demand before hint.

A job is named by its hop and a key. While a job of that name is queued or running, a second one
is not started; whoever wants the same waits for the first. A hint that turns into a demand moves
to the front queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from adaptercache.errors import CacheClosed, forget_locals
from adaptercache.stats import Tier

BUSY = 16  # fetches queued: while there are more, one that failed makes nothing possible

__all__ = ["Hop", "Job", "Movers"]

log = logging.getLogger(__name__)

DECIDING = "deciding after a load failed"  # a defect of ours
TELLING = "a hook, or a handler of logging, failed"  # by what `tell` lets through: an interrupt


class Hop(Enum):
    """One step up."""

    FETCH = (Tier.REMOTE, Tier.DISK)
    READ = (Tier.DISK, Tier.HOST)
    COPY = (Tier.HOST, Tier.GPU)

    @property
    def label(self) -> str:
        """``"disk->host"``: for metrics."""
        return f"{self.value[0].value}->{self.value[1].value}"


@dataclass(eq=False)
class Job:
    """Something to move.

    ``work`` runs on a mover, without the lock. Then one of ``done(result, seconds)`` and
    ``failed(error, seconds)`` runs with the lock held; they decide, and don't block.
    """

    hop: Hop
    key: Hashable
    work: Callable[[], Any]
    done: Callable[[Any, float], None]
    failed: Callable[[BaseException, float], None]
    demand: bool = True
    is_load: bool = True  # else it only tidies up
    started: bool = False
    started_as_hint: bool = False


class Movers:
    """Threads for each hop. Takes and frees nothing itself: jobs do.

    Args:
        lock: the cache's. `submit` and the gauges are called with it held.
        threads: how many for each hop.
        ended: called after each job, and when one reports, with the lock held, to decide what comes
            next.
        tell: called after that, without the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        threads: Mapping[Hop, int],
        *,
        ended: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        self._wake = {hop: threading.Condition(lock) for hop in Hop}
        self._ended, self._tell = ended, tell
        self._jobs: dict[tuple[Hop, Hashable], Job] = {}
        self._demands: dict[Hop, deque[Job]] = {hop: deque() for hop in Hop}
        self._hints: dict[Hop, deque[Job]] = {hop: deque() for hop in Hop}
        self._num_queued = dict.fromkeys(Hop, 0)
        self._hints_running = dict.fromkeys(Hop, 0)
        self._most_hints = {hop: max(1, count - 1) for hop, count in threads.items()}
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(hop,), name=f"adaptercache-{hop.label}-{n}", daemon=True
            )
            for hop, count in threads.items()
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. None of its name may be under way (see `join`)."""
        assert (job.hop, job.key) not in self._jobs, "single flight"
        if self._closing:
            job.failed(CacheClosed(), 0.0)
            return
        self._jobs[job.hop, job.key] = job
        self._num_queued[job.hop] += job.is_load
        (self._demands if job.demand else self._hints)[job.hop].append(job)
        self._wake[job.hop].notify()

    def join(self, hop: Hop, key: Hashable, *, demand: bool) -> bool:
        """Whether a job of that name is queued or runs; with ``demand``, it isn't a hint now."""
        job = self._jobs.get((hop, key))
        if job is not None and demand and not job.demand:
            job.demand = True
            if not job.started:
                self._demands[hop].append(job)
                self._wake[hop].notify()  # a thread may be idle: one is kept free of hints
        return job is not None

    def has(self, hop: Hop, key: Hashable) -> bool:
        """Whether a job of that name is queued or runs."""
        return (hop, key) in self._jobs

    def has_hints(self, hop: Hop) -> bool:
        """Whether hints, perhaps, wait for a thread."""
        return bool(self._hints[hop])

    def report(self, hop: Hop, news: Callable[[], None]) -> None:
        """A running job has come so far that others may go on: ``news`` takes note of it, with the
        lock held, and what can start is started. Called without the lock."""
        with self._wake[hop], _surviving(hop, DECIDING):
            news()
            self._ended()
        with _surviving(hop, TELLING):
            self._tell()

    def queued(self, hop: Hop) -> int:
        """Loads that wait for a thread."""
        return self._num_queued[hop]

    @property
    def are_idle(self) -> bool:
        """Whether nothing is queued and nothing runs."""
        return not self._jobs

    @property
    def running(self) -> int:
        """Loads that a thread is on."""
        return sum(job.started and job.is_load for job in self._jobs.values())

    def close(self) -> None:
        """Fail what is queued, let running jobs end, and stop the threads. Without the lock."""
        with self._wake[Hop.FETCH]:
            self._closing = True
            for job in [job for job in self._jobs.values() if not job.started]:
                self._begin(job)
                del self._jobs[job.hop, job.key]
                job.failed(CacheClosed(), 0.0)
            for wake in self._wake.values():
                wake.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a hook may close the cache
                thread.join()

    def _begin(self, job: Job) -> None:
        job.started = True
        job.started_as_hint = job.is_load and not job.demand
        self._num_queued[job.hop] -= job.is_load
        self._hints_running[job.hop] += job.started_as_hint

    def _run(self, hop: Hop) -> None:
        wake = self._wake[hop]
        while True:
            with wake:
                while (job := self._next(hop)) is None:
                    if self._closing:
                        return
                    wake.wait()
                self._begin(job)
            self._do(job)
            del job
            with _surviving(hop, TELLING):
                self._tell()

    def _next(self, hop: Hop) -> Job | None:
        """The next job. Hints leave one thread of several to those who come and wait."""
        for queue in (self._demands[hop], self._hints[hop]):
            if queue is self._hints[hop] and self._hints_running[hop] >= self._most_hints[hop]:
                break
            while queue:
                job = queue.popleft()
                # One that was raised stands in both queues; one that was dropped in none's name.
                if not job.started and self._jobs.get((hop, job.key)) is job:
                    return job
        return None

    def _do(self, job: Job) -> None:
        start = time.monotonic()
        result, error = None, None
        try:
            result = job.work()
        except BaseException as caught:  # whatever it is, those who wait must be told
            error = caught
            forget_locals(caught)
        seconds = time.monotonic() - start
        with self._wake[job.hop]:
            del self._jobs[job.hop, job.key]
            self._hints_running[job.hop] -= job.started_as_hint
            with _surviving(job.hop, DECIDING):
                if error is None:
                    job.done(result, seconds)
                else:
                    job.failed(error, seconds)
                if error is None or self._num_queued[job.hop] < BUSY or job.hop is not Hop.FETCH:
                    self._ended()


@contextmanager
def _surviving(hop: Hop, failed: str) -> Iterator[None]:
    """Log what is raised, whatever the handlers of `logging` do; the thread must live on."""
    try:
        yield
    except BaseException:
        with suppress(BaseException):
            log.exception(failed, extra={"hop": hop.label})
