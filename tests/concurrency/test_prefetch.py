"""Hints through the whole cache: how far they bring, what they leave alone, and what they waste."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from adaptercache import Request, Tier, lifts
from adaptercache.tiers.gpu import GpuTier


@pytest.mark.parametrize("to", [Tier.DISK, Tier.HOST, Tier.GPU])
def test_a_hint_brings_it_as_far_as_it_says(tiny: Any, to: Tier) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        cache.prefetch(["a"], to=to)
        assert tiny.wait_until(lambda: cache.resident(to) == {"a"})
        assert tiny.wait_until(lambda: tiny.idle(cache))
        there = [tier for tier in (Tier.DISK, Tier.HOST, Tier.GPU) if cache.resident(tier)]
        assert there[-1] is to


def test_hints_evict_nothing_that_runs_or_waits(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b", "c", "d"), gpu_slots=3) as cache:
        tiny.load(cache, "a", "b", "c")
        with cache.acquire("a"):
            waiting = [Request("r", "b"), Request("s", "c")]
            cache.admit(waiting, max_adapters=0)
            cache.prefetch(["d"])
            assert tiny.wait_until(lambda: "d" in cache.resident(Tier.HOST))
            assert tiny.wait_until(lambda: tiny.idle(cache))
            assert cache.resident(Tier.GPU) == {"a", "b", "c"}
        cache.admit([])
        cache.prefetch(["d"])
        assert tiny.wait_until(lambda: "d" in cache.resident(Tier.GPU))


def test_a_wasted_prefetch_is_counted_where_it_was_evicted_unused(tiny: Any) -> None:
    now = [0.0]
    source = tiny.source("a", "b", "c", "d", "e")
    with tiny.cache(source, gpu_slots=3, clock=lambda: now[0]) as cache:
        cache.prefetch(["a"])
        assert tiny.wait_until(lambda: cache.resident(Tier.GPU) == {"a"})
        tiny.load(cache, "a")  # used
        cache.prefetch(["b"])
        assert tiny.wait_until(lambda: cache.resident(Tier.GPU) == {"a", "b"})
        tiny.load(cache, "c", "d")
        assert cache.resident(Tier.GPU) == {"b", "c", "d"}, "the colder goes first"
        assert cache.stats().prefetch_wasted == 0
        now[0] += 60.0  # the hint has lapsed
        tiny.load(cache, "e")
        assert cache.resident(Tier.GPU) == {"c", "d", "e"}
        assert cache.stats().prefetch_wasted == 1


def test_bytes_on_their_way_for_hints_are_bounded(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), GpuTier.write

    def stand_then_write(*args: Any) -> None:
        go_on.wait(20)
        write(*args)

    monkeypatch.setattr(GpuTier, "write", stand_then_write)
    monkeypatch.setattr(lifts, "HINTED_BYTES", 8 * 4096)  # two adapters
    with tiny.cache(tiny.source("a", "b", "c", "d"), gpu_slots=4) as cache:
        cache.prefetch(list("abcd"), to=Tier.HOST)
        assert tiny.wait_until(lambda: cache.resident(Tier.HOST) == set("abcd"))
        cache.prefetch(list("abcd"))
        assert cache.stats().pages["adapter"] == 8
        pending = cache.acquire("d")  # who waits is not bounded, and finds a thread
        assert cache.stats().pages["adapter"] == 12
        go_on.set()
        pending.result(10).release()
        assert tiny.wait_until(lambda: cache.resident(Tier.GPU) == set("abcd"))


def test_a_demand_is_copied_while_hints_stand(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write, stood = threading.Event(), GpuTier.write, []

    def stand_if_hinted(tier: GpuTier, slot: int, transfer: Any) -> None:
        if len(stood) < 2:
            stood.append(slot)
            go_on.wait(20)
        write(tier, slot, transfer)

    monkeypatch.setattr(GpuTier, "write", stand_if_hinted)
    with tiny.cache(tiny.source("a", "b", "c", "d"), gpu_slots=4) as cache:
        cache.prefetch(list("abcd"), to=Tier.HOST)
        assert tiny.wait_until(lambda: cache.resident(Tier.HOST) == set("abcd"))
        cache.prefetch(["a", "b", "c"])
        assert tiny.wait_until(lambda: len(stood) == 2)
        with cache.acquire("d").result(10):
            assert cache.resident(Tier.GPU) == {"d"}
        go_on.set()
        assert tiny.wait_until(lambda: cache.resident(Tier.GPU) == set("abcd"))
