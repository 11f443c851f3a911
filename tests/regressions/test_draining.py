"""Adapters that are kept from new leases for the sake of who is first in line: what became of the
leases that met this, when he gave up or was only a hint."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import AdapterCache, Request, Tier
from adaptercache.turns import MAX_BYPASSES


@pytest.fixture
def cache(tiny: Any) -> Any:
    with tiny.cache(tiny.source("hot", "rare"), gpu_slots=1) as cache:
        tiny.load(cache, "rare", "hot")
        yield cache


def hit_often(cache: AdapterCache) -> None:
    for _ in range(MAX_BYPASSES + 1):
        cache.acquire("hot").release()


def test_a_lease_is_served_when_the_one_it_made_way_for_gives_up(
    tiny: Any, cache: AdapterCache
) -> None:
    with cache.acquire("hot"):
        rare = cache.acquire("rare")
        hit_often(cache)
        cache.prefetch([])  # so that somebody looks
        late = cache.acquire("hot")
        assert not late.ready
        rare.release()
        assert tiny.wait_until(lambda: late.ready, 2)
        late.release()


def test_a_lease_asked_for_after_the_first_in_line_gave_up_is_served(
    tiny: Any, cache: AdapterCache
) -> None:
    with cache.acquire("hot"):
        rare = cache.acquire("rare")
        hit_often(cache)
        cache.prefetch([])
        rare.release()
        late = cache.acquire("hot")
        assert tiny.wait_until(lambda: late.ready, 2)
        late.release()


def test_a_hint_keeps_nobody_from_a_hit(tiny: Any, cache: AdapterCache) -> None:
    with cache.acquire("hot"):
        cache.prefetch(["rare"], to=Tier.GPU)
        hit_often(cache)
        cache.prefetch(["rare"], to=Tier.GPU)
        late = cache.acquire("hot")
        assert late.ready
        late.release()


def test_one_who_asked_twice_keeps_nobody_ahead_of_his_second_lease_waiting(
    tiny: Any, cache: AdapterCache
) -> None:
    held, rare = cache.acquire("hot"), cache.acquire("rare")
    hit_often(cache)
    cache.prefetch([])
    late, again = cache.acquire("hot"), cache.acquire("rare")
    rare.release()  # now he is behind the one that waits for him
    held.release()
    assert tiny.wait_until(lambda: late.ready, 2)
    late.release()
    assert tiny.wait_until(lambda: again.ready, 2)
    again.release()


def test_a_request_ahead_that_waits_for_pages_keeps_its_adapter(tiny: Any) -> None:
    with tiny.cache(tiny.source("hot", "rare"), gpu_slots=1, pages=20) as cache:
        tiny.load(cache, "rare", "hot")
        kv = cache.pages.allocate(1)
        waiting = [Request("h", "hot", kv_pages=cache.pages.num_available + 1)]
        held = cache.acquire("hot")
        assert cache.admit(waiting).reasons == {"h": "kv_pages"}
        rare = cache.acquire("rare")
        hit_often(cache)
        cache.prefetch([])
        held.release()
        cache.pages.free(kv)
        ((_, lease),) = cache.admit(waiting).admitted
        lease.release()
        assert tiny.wait_until(lambda: rare.ready, 2)
        rare.release()
