"""A table full of hints that had lapsed swallowed the next ones."""

from __future__ import annotations

from typing import Any

from adaptercache import Tier
from adaptercache.waiting import HINT_LASTS_S, MAX_HINTS


def test_hints_that_lapsed_make_room_for_new_ones(tiny: Any) -> None:
    now = [0.0]
    with tiny.cache(tiny.source("a"), clock=lambda: now[0]) as cache:
        cache.prefetch(f"nobody{n}" for n in range(MAX_HINTS))
        assert tiny.wait_until(lambda: tiny.idle(cache))
        now[0] += HINT_LASTS_S + 1
        cache.prefetch(["a"])
        assert tiny.wait_until(lambda: "a" in cache.resident(Tier.GPU), 3)
