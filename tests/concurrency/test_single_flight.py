"""However many ask for one adapter at once, it is read once, packed once and copied once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from adaptercache import AdapterCache, AdapterCacheError, LoadFailed, Tier
from adaptercache.testing import FakeSource, FaultySource
from adaptercache.tiers.remote import CONFIG, WEIGHTS

CROWD = 64
FILES = 2  # config and weights: each is one read


def ask_in_threads(cache: AdapterCache) -> list[Any]:
    """What each of the crowd got: a digest, or an error."""
    together, answers = threading.Barrier(CROWD), []

    def ask() -> None:
        together.wait()
        try:
            with cache.acquire("a") as lease:
                answers.append(lease.digest)
        except AdapterCacheError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(CROWD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return answers


def ask_in_tasks(cache: AdapterCache) -> list[Any]:
    async def ask() -> Any:
        async with cache.acquire("a") as lease:
            return lease.digest

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(ask() for _ in range(CROWD)), return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.fixture(params=[ask_in_threads, ask_in_tasks], ids=["threads", "tasks"])
def ask(request: pytest.FixtureRequest) -> Callable[[AdapterCache], list[Any]]:
    return request.param


@pytest.fixture
def source(tiny: Any) -> FakeSource:
    return tiny.source("a")


def test_a_crowd_causes_one_read_of_each_file(tiny: Any, source: FakeSource, ask: Any) -> None:
    with tiny.cache(source) as cache:
        ask(cache)
    assert source.calls["read", "a"] == FILES


def test_a_crowd_causes_one_load_a_hop(tiny: Any, source: FakeSource, ask: Any) -> None:
    with tiny.cache(source) as cache:
        ask(cache)
        loads = cache.stats().loads
    assert loads == {
        (Tier.REMOTE, Tier.DISK, "ok"): 1,
        (Tier.DISK, Tier.HOST, "ok"): 1,
        (Tier.HOST, Tier.GPU, "ok"): 1,
    }


def test_all_of_a_crowd_are_served_the_same(tiny: Any, source: FakeSource, ask: Any) -> None:
    with tiny.cache(source) as cache:
        answers = ask(cache)
    assert len(answers) == CROWD
    assert len(set(answers)) == 1


def test_a_failure_reaches_all_of_a_crowd_as_the_same_type(
    tiny: Any, source: FakeSource, ask: Any
) -> None:
    faulty = FaultySource(source)
    faulty.failing.add("a")
    faulty.delay_s = 0.05
    with tiny.cache(faulty) as cache:
        answers = ask(cache)
    assert [type(answer) for answer in answers] == [LoadFailed] * CROWD


def test_each_of_a_crowd_gets_an_error_object_of_its_own(
    tiny: Any, source: FakeSource, ask: Any
) -> None:
    faulty = FaultySource(source)
    faulty.failing.add("a")
    faulty.delay_s = 0.05
    with tiny.cache(faulty) as cache:
        answers = ask(cache)
    assert len({id(answer) for answer in answers}) == CROWD


@pytest.fixture
def failed(tiny: Any, source: FakeSource) -> Any:
    """A cache that has just failed to load an adapter, its source, and its clock."""
    now, faulty = [0.0], FaultySource(source)
    faulty.failing.add("a")
    with tiny.cache(faulty, clock=lambda: now[0]) as cache:
        with pytest.raises(LoadFailed):
            cache.acquire("a").result(10)
        faulty.failing.clear()
        yield cache, source, now


def test_a_failure_is_remembered_for_a_while_without_asking_the_source(failed: Any) -> None:
    cache, source, _ = failed
    asked = sum(source.calls.values())
    with pytest.raises(LoadFailed):
        cache.acquire("a").result(10)
    assert sum(source.calls.values()) == asked


def test_the_next_ask_after_the_back_off_tries_again(failed: Any) -> None:
    cache, _, now = failed
    now[0] += 1.5
    cache.acquire("a").result(10).release()


def test_the_back_off_grows_with_each_failure(tiny: Any) -> None:
    now, source = [0.0], FaultySource(tiny.source("a"))
    source.failing.add("a")
    with tiny.cache(source, clock=lambda: now[0]) as cache:
        for _ in range(2):
            with pytest.raises(LoadFailed):
                cache.acquire("a").result(10)
            now[0] += 1.5
        source.failing.clear()
        with pytest.raises(LoadFailed):  # the second failure lasts longer than that
            cache.acquire("a").result(10)


def test_ids_that_share_content_are_read_each_but_copied_once(tiny: Any) -> None:
    source = tiny.source()
    for adapter_id in ("a", "b"):
        source.put(adapter_id, *tiny.tensors(7))
    with tiny.cache(source) as cache, cache.acquire("a") as one, cache.acquire("b") as other:
        assert one.slot == other.slot
        assert cache.stats().loads[Tier.HOST, Tier.GPU, "ok"] == 1
        assert cache.stats().slots["used"] == 1


def test_broken_files_fail_a_crowd_after_one_read(tiny: Any, ask: Any) -> None:
    source = tiny.source()
    source.put_files("a", {CONFIG: b"{}", WEIGHTS: b"nonsense"})
    with tiny.cache(source) as cache:
        ask(cache)
    assert source.calls["read", "a"] <= FILES
