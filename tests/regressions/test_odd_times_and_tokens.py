"""Times that are none, and token ids in odd containers, ended in errors of Python's own, some of
them for good; hints beyond those that are kept were looked at all over again, each."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from adaptercache import Tier, prefix_keys
from adaptercache.routing import AffinityRouter


@pytest.mark.parametrize("moment", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_refused_and_leaves_nothing(moment: float) -> None:
    router = AffinityRouter(["a", "b", "c"])
    for _ in range(150):
        router.route("x", 0.0)
    with pytest.raises(ValueError, match="give seconds"):
        router.route("x", moment)
    assert router.route("x", 1.0) in router.homes("x")


def test_a_clock_set_back_by_years_is_survived() -> None:
    router = AffinityRouter(["a", "b", "c"])
    for _ in range(150):
        router.route("x", 1e8)
    for _ in range(150):
        assert router.route("x", 0.0) in router.homes("x")


IDS = list(range(48))


@pytest.mark.parametrize(
    "token_ids",
    [np.arange(48, dtype=">u4"), np.arange(48, dtype=object), (each for each in IDS), iter(IDS)],
    ids=["big-endian", "objects", "generator", "iterator"],
)
def test_ids_are_ids_in_whatever_holds_them(token_ids: Any) -> None:
    assert prefix_keys(token_ids, block_size=16) == prefix_keys(IDS, block_size=16)


def test_numpys_integers_are_integers() -> None:
    odd = {"block_size": np.int64(16), "adapter_from_token": np.int64(20), "adapter": b"a" * 32}
    plain = {"block_size": 16, "adapter_from_token": 20, "adapter": b"a" * 32}
    assert prefix_keys(IDS, **odd) == prefix_keys(IDS, **plain)


@pytest.mark.parametrize("parent", [np.zeros(32), "x" * 32, 32])
def test_a_parent_is_32_bytes(parent: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        prefix_keys(IDS, block_size=16, parent=parent)
    with pytest.raises(ValueError, match="id 4294967296 at position 0"):
        prefix_keys(iter([1 << 32]), block_size=1)


def test_hints_beyond_those_that_are_kept_take_no_time(tiny: Any) -> None:
    """Counted, not timed: how often all hints are looked at."""
    with tiny.cache(tiny.source("a")) as cache:
        waiting = cache._ledger.waiting
        looked, hints = [0], waiting.hints

        def counted(now: float) -> Any:
            looked[0] += 1
            return hints(now)

        waiting.hints = counted
        start = time.monotonic()
        cache.prefetch([f"x{n}" for n in range(10_000)], to=Tier.DISK)
        assert looked[0] < 10, time.monotonic() - start
