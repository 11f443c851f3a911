"""Floors: what can never fit, and what freed KV pages would bring."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import CapacityError, KVLayout, Request


def floored(floor_pages: int) -> KVLayout:
    return KVLayout(
        block_size=16, kv_heads=1, head_dim=16, dtype="float32", floor_pages=floor_pages
    )


def test_an_adapter_fits_within_its_own_floor_however_large_that_of_kv(tiny: Any) -> None:
    with tiny.cache(tiny.source("a"), pages=20, kv=floored(18)) as cache:  # adapters' floor: 17
        tiny.load(cache, "a")  # 4 pages


def test_pages_wanted_is_zero_where_freeing_kv_pages_brings_nothing(tiny: Any) -> None:
    source = tiny.source("a", "b", "c", "d", "e")
    with tiny.cache(source, pages=30, gpu_slots=8, kv=floored(12)) as cache:
        # Adapters may have 18 pages: four of 4 pages are leased. 2 of KV are used, 12 are free.
        leases = [cache.acquire(adapter_id).result(10) for adapter_id in "abcd"]
        kv = cache.pages.allocate(2)
        assert kv is not None
        tiny.wait_until(lambda: not cache.admit([Request("r", "e")]).failed)
        tiny.wait_until(lambda: cache.admit([Request("r", "e")]).reasons == {"r": "room"})
        wanted = cache.admit([Request("r", "e")]).pages_wanted
        for lease in leases:
            lease.release()
        assert wanted == 0


def test_kv_pages_without_a_kv_layout_are_refused_with_the_cause(tiny: Any) -> None:
    with tiny.cache(tiny.source(), kv=None) as cache:
        ((_, error),) = cache.admit([Request("r", None, kv_pages=1)]).failed
        assert "no KVLayout" in str(error)
        with pytest.raises(CapacityError, match="no KVLayout"):
            cache.pages.allocate(1)
