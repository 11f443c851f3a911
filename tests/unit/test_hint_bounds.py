"""What hints may take of a tier: on its way at one time, and by eviction."""

from __future__ import annotations

import pytest

from adaptercache.placement import HintBounds, Want, place
from adaptercache.policy import LRU
from adaptercache.residency import Residency

A, B, C, D, E = (bytes([n]) for n in range(5))


def hints(*names: bytes, size: int = 2) -> list[Want]:
    return [Want(name, size, True, True) for name in names]


def loads(tier: Residency[None], wants: list[Want], free: int, bounds: HintBounds) -> list[bytes]:
    return [want.digest for want in place(wants, tier, free=free, hints=bounds).loads]


@pytest.fixture
def tier() -> Residency[None]:
    """With A idle, in 4 units."""
    tier: Residency[None] = Residency(LRU)
    tier.loaded(tier.reserve(A, 4, None))
    return tier


def test_no_more_than_the_bound_is_on_its_way(tier: Residency[None]) -> None:
    assert loads(tier, hints(B, C, D), 100, HintBounds(coming=4)) == [B, C]


def test_what_is_on_its_way_already_counts_until_it_is_there(tier: Residency[None]) -> None:
    copy = tier.reserve(E, 3, None, prefetched=True)
    assert loads(tier, hints(B, C), 100, HintBounds(coming=4)) == []
    tier.loaded(copy)
    assert loads(tier, hints(B, C), 100, HintBounds(coming=4)) == [B, C]


def test_one_that_is_larger_than_the_bound_is_let_through_alone(tier: Residency[None]) -> None:
    assert loads(tier, hints(B, C, size=9), 100, HintBounds(coming=4)) == [B]


def test_what_was_hinted_and_not_used_bounds_what_hints_evict(tier: Residency[None]) -> None:
    tier.loaded(tier.reserve(E, 3, None, prefetched=True))
    assert place(hints(B), tier, free=0, hints=HintBounds(unused=5)).evictions == (A,)
    assert loads(tier, hints(B), 0, HintBounds(unused=4)) == []
    assert loads(tier, hints(B), 2, HintBounds(unused=4)) == [B], "what is free may be taken"
    tier.lease(tier[E])  # used
    assert loads(tier, hints(B), 0, HintBounds(unused=4)) == [B]


def test_demands_are_not_bounded(tier: Residency[None]) -> None:
    wants = [Want(name, 2, True) for name in (B, C, D)]
    assert loads(tier, wants, 100, HintBounds(coming=1, unused=0)) == [B, C, D]
