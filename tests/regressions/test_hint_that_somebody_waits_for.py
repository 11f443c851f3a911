"""A load that had begun as a hint stood behind other hints though somebody waited for it by now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from adaptercache import AdapterCache, Request, Tier

Want = Callable[[AdapterCache], Callable[[], bool]]


def by_a_lease(cache: AdapterCache) -> Callable[[], bool]:
    lease = cache.acquire("b")
    return lambda: lease.ready


def by_a_request(cache: AdapterCache) -> Callable[[], bool]:
    return lambda: bool(cache.admit([Request("r", "b")]).admitted)


@pytest.mark.parametrize("want", [by_a_lease, by_a_request])
def test_it_is_read_beside_a_hint_that_takes_long(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, want: Want
) -> None:
    with tiny.cache(tiny.source("a", "b")) as cache:
        on_disk(tiny, cache)
        read, goes_on = cache._parts.disk.read_into, threading.Event()

        def read_slowly(packed: Any, *where: Any) -> None:
            if packed.content == digest_of(cache, "a"):
                goes_on.wait(10)
            read(packed, *where)

        monkeypatch.setattr(cache._parts.disk, "read_into", read_slowly)
        cache.prefetch(["a", "b"], Tier.HOST)
        try:
            assert tiny.wait_until(want(cache), 3)
        finally:
            goes_on.set()


@pytest.mark.parametrize("want", [by_a_lease, by_a_request])
def test_it_is_copied_beside_hints_that_take_long(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, want: Want
) -> None:
    with tiny.cache(tiny.source("a", "b", "c")) as cache:
        on_disk(tiny, cache)
        cache.prefetch(["a", "b", "c"], Tier.HOST)
        assert tiny.wait_until(lambda: len(cache.resident(Tier.HOST)) == 3)
        write, goes_on, begun = cache._gpu.write, threading.Event(), []

        def write_slowly(slot: int, transfer: Any) -> None:
            begun.append(slot)
            if len(begun) <= 2:
                goes_on.wait(10)
            write(slot, transfer)

        monkeypatch.setattr(cache._gpu, "write", write_slowly)
        cache.prefetch(["a", "c"])
        assert tiny.wait_until(lambda: len(begun) == 2)
        cache.prefetch(["b"])
        try:
            assert tiny.wait_until(want(cache), 3)
        finally:
            goes_on.set()


def on_disk(tiny: Any, cache: AdapterCache) -> None:
    """And nowhere above."""
    cache.prefetch(["a", "b", "c"], Tier.DISK)
    assert tiny.wait_until(lambda: {"a", "b"} <= cache.resident(Tier.DISK) and tiny.idle(cache))


def digest_of(cache: AdapterCache, adapter_id: str) -> bytes:
    known = cache._ledger.catalog.get(adapter_id)
    assert known is not None
    return known.digest
