"""An id in use whose source was last asked long ago: it is asked again, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adaptercache import AdapterNotFound, Request, Tier
from adaptercache.testing import FakeSource, FaultySource


@pytest.fixture
def world(tiny: Any) -> Iterator[tuple[Any, FakeSource, list[float]]]:
    """A cache whose revisions last ten seconds, its source, and its clock; ``a`` is on the GPU."""
    now, source = [0.0], tiny.source("a")
    with tiny.cache(source, clock=lambda: now[0], revision_ttl_s=10) as cache:
        tiny.load(cache, "a")
        yield cache, source, now


def looks(source: FakeSource) -> int:
    return source.calls["revision", "a"]


def test_within_its_time_a_revision_is_not_asked_for(world: Any, tiny: Any) -> None:
    cache, source, now = world
    before = looks(source)
    now[0] += 9
    tiny.load(cache, "a", "a")
    assert looks(source) == before


def test_after_it_one_lease_asks_and_is_served_at_once(world: Any, tiny: Any) -> None:
    cache, source, now = world
    before, reads = looks(source), source.calls["read", "a"]
    now[0] += 11
    for _ in range(50):
        lease = cache.acquire("a")
        assert lease.ready
        lease.release()
    assert tiny.wait_until(lambda: tiny.idle(cache))
    assert looks(source) == before + 1
    assert source.calls["read", "a"] == reads, "it hasn't changed"


def test_an_admitted_request_asks_too(world: Any, tiny: Any) -> None:
    cache, source, now = world
    before = looks(source)
    now[0] += 11
    ((_, lease),) = cache.admit([Request("r", "a")]).admitted
    assert tiny.wait_until(lambda: looks(source) == before + 1)
    lease.release()


def test_what_has_changed_comes_without_a_refresh(world: Any, tiny: Any) -> None:
    cache, source, now = world
    with cache.acquire("a") as old:
        source.put("a", *tiny.tensors(99))
        now[0] += 11
        cache.acquire("a").release()
        assert tiny.wait_until(lambda: tiny.idle(cache))
        with cache.acquire("a").result(10) as new:
            assert new.digest != old.digest


@pytest.mark.parametrize("trouble", ["gone", "failing"])
def test_what_can_not_be_asked_goes_on_serving(tiny: Any, trouble: str) -> None:
    now, inner = [0.0], tiny.source("a")
    source = FaultySource(inner)
    with tiny.cache(source, clock=lambda: now[0], revision_ttl_s=10) as cache:
        tiny.load(cache, "a")
        if trouble == "gone":
            inner.remove("a")
        else:
            source.failing.add("a")
        for _ in range(3):
            now[0] += 11
            tiny.load(cache, "a")
            assert tiny.wait_until(lambda: tiny.idle(cache))
        assert cache.acquire("a").ready is True


def test_the_recheck_of_what_the_disk_has_evicted_reads_nothing(tiny: Any) -> None:
    now, source = [0.0], tiny.source("a")
    with (
        tiny.cache(source, clock=lambda: now[0], revision_ttl_s=10) as cache,
        cache.acquire("a").result(10) as lease,
    ):
        cache._parts.lifter._room.make_free(1)
        assert cache.resident(Tier.DISK) == frozenset()
        reads = source.calls["read", "a"]
        now[0] += 11
        cache.acquire("a").release()
        assert tiny.wait_until(lambda: tiny.idle(cache))
        assert source.calls["read", "a"] == reads
        assert cache.resident(Tier.GPU) == {"a"}
        assert lease.ready


# An adapter that isn't there


def test_a_missing_adapter_is_not_asked_for_a_thousand_times(tiny: Any) -> None:
    now, source = [0.0], tiny.source()
    with tiny.cache(source, clock=lambda: now[0]) as cache:
        for _ in range(1000):
            now[0] += 0.009
            with pytest.raises(AdapterNotFound):
                cache.acquire("a").result(10)
        assert looks(source) == 1


def test_a_missing_adapter_that_comes_is_found_after_a_while_or_by_a_refresh(tiny: Any) -> None:
    now, source = [0.0], tiny.source()
    with tiny.cache(source, clock=lambda: now[0]) as cache:
        for adapter_id in ("a", "b"):
            with pytest.raises(AdapterNotFound):
                cache.acquire(adapter_id).result(10)
            source.put(adapter_id, *tiny.tensors(1))
        cache.refresh("a").result(10)
        cache.acquire("a").result(10).release()
        now[0] += 11
        cache.acquire("b").result(10).release()
