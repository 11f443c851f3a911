"""Iterables that a caller gives are the caller's code: read before the lock is taken."""

from __future__ import annotations

from typing import Any

from adaptercache import AdapterCache, Tier


def ends_unlocked(tiny: Any, cache: AdapterCache, act: Any) -> bool:
    ended = tiny.ends(act)
    if not ended:
        cache._deciding.lock.release()  # so that this test can end
    return bool(ended)


def test_prefetch_of_a_generator_that_asks_the_cache_ends(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b")) as cache:
        upcoming = (i for i in ("a", "b") if i not in cache.resident(Tier.GPU))
        assert ends_unlocked(tiny, cache, lambda: cache.prefetch(upcoming))


def test_a_batch_of_a_generator_that_asks_the_cache_ends(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache, cache.acquire("a") as lease:
        pairs = ((lease, cache.stats().leases) for _ in range(2))

        def step() -> None:
            with cache.lora_batch(pairs):
                pass

        assert ends_unlocked(tiny, cache, step)
