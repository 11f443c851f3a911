"""Leases that waited for ever: what they waited for had come, or could not come, and nothing that
was still to happen would have had anybody look."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from adaptercache import AdapterCacheError, Request, Tier
from adaptercache.disk import transfer as disk_transfer
from adaptercache.testing import FaultySource


def is_served(tiny: Any, lease: Any) -> bool:
    return bool(tiny.wait_until(lambda: lease.ready, 5))


@pytest.fixture
def source(tiny: Any) -> FaultySource:
    return FaultySource(tiny.source(*"abcdef"))


def test_pages_are_promised_after_it_was_asked_for_and_not_taken(
    tiny: Any, source: FaultySource
) -> None:
    with tiny.cache(source, pages=20, gpu_slots=5) as cache:
        held = [cache.acquire(each).result(10) for each in "bcde"]
        source.gate.clear()
        lease = cache.acquire("a")
        assert cache.admit([Request("r", None, kv_pages=3)]).admitted
        source.gate.set()
        assert is_served(tiny, lease)
        for each in (lease, *held):
            each.release()


def test_the_request_that_its_room_was_kept_for_has_gone(tiny: Any, source: FaultySource) -> None:
    with tiny.cache(source, pages=20, gpu_slots=5) as cache:
        held = [cache.acquire(each).result(10) for each in "bcde"]
        source.gate.clear()
        lease = cache.acquire("a")
        assert cache.admit([Request("r", "f", kv_pages=3)]).deferred
        source.gate.set()
        assert tiny.wait_until(lambda: tiny.idle(cache))
        assert not lease.ready, "the floor"
        cache.admit([])
        assert is_served(tiny, lease)
        for each in (lease, *held):
            each.release()


def test_a_failed_copy_that_another_still_held_has_gone(
    tiny: Any, source: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    with tiny.cache(source, clock=lambda: now[0]) as cache:
        cache.prefetch(["a"], Tier.HOST)
        assert tiny.wait_until(lambda: "a" in cache.resident(Tier.HOST))
        admitted = threading.Event()

        def fail(slot: int, transfer: Any) -> None:
            admitted.wait(10)
            raise OSError("injected")

        with monkeypatch.context() as patched:
            patched.setattr(cache._gpu, "write", fail)
            ((_, holder),) = cache.admit([Request("r", "a", pipelined=True)]).admitted
            admitted.set()
            assert tiny.wait_until(lambda: tiny.idle(cache))
        with pytest.raises(AdapterCacheError, match="injected"):
            cache.acquire("a").result(1)
        now[0] += 100
        lease = cache.acquire("a")
        holder.release()
        assert is_served(tiny, lease)
        lease.release()


def test_its_id_had_failed_and_the_load_that_another_id_began_failed_too(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joined a load whose first failure tells nobody; then its back-off kept it from another."""
    same = tiny.source("a")
    same.put("b", *tiny.tensors(0))
    source, now = FaultySource(same), [0.0]
    with tiny.cache(source, clock=lambda: now[0]) as cache:
        tiny.load(cache, "a", "b")
        forget_all(cache)
        source.failing.add("a")
        with pytest.raises(AdapterCacheError):
            cache.acquire("a").result(10)
        source.failing.clear()
        started, joined = threading.Event(), threading.Event()
        read_and_sum = disk_transfer._read_and_sum

        def wrong_once(file: int, offset: int, into: memoryview) -> int:
            is_first = not started.is_set()
            started.set()
            joined.wait(10)
            return read_and_sum(file, offset, into) ^ is_first

        monkeypatch.setattr(disk_transfer, "_read_and_sum", wrong_once)
        another = cache.acquire("b")
        assert started.wait(10)
        assert tiny.wait_until(lambda: len(cache._ledger.gpu) == 1), "it flows"
        lease = cache.acquire("a")
        another.release()
        joined.set()
        assert tiny.wait_until(lambda: tiny.idle(cache))
        now[0] += 100
        assert is_served(tiny, lease)
        with pytest.raises(AdapterCacheError):
            lease.result()


def forget_all(cache: Any) -> None:
    with cache._deciding.lock:
        digest = cache._ledger.catalog.get("a").digest
        for tier in (Tier.GPU, Tier.HOST, Tier.DISK):
            cache._ledger.evict(tier, digest, "test")
    cache._parts.disk._transfer._verified.clear()  # as in a new process
