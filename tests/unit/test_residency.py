"""The life of a copy in a tier, as its table says."""

from __future__ import annotations

import pytest

from adaptercache.policy import LRU
from adaptercache.residency import Copy, Residency, State

A, B = b"a", b"b"


@pytest.fixture
def tier() -> Residency[None]:
    return Residency(LRU)


def loaded(tier: Residency[None], digest: bytes, size: int = 1) -> Copy[None]:
    copy = tier.reserve(digest, size, None)
    tier.loaded(copy)
    return copy


def coldest(tier: Residency[None]) -> list[bytes]:
    return [copy.digest for copy in tier.coldest()]


def test_a_copy_that_loads_is_there_but_not_whole(tier: Residency[None]) -> None:
    copy = tier.reserve(A, 3, None)
    assert tier.get(A) is copy
    assert tier.resident(A) is None
    assert (tier.used, tier.idle_size, coldest(tier)) == (3, 0, [])


def test_a_copy_that_is_whole_can_be_evicted(tier: Residency[None]) -> None:
    loaded(tier, A, 3)
    assert (tier.used, tier.idle_size, coldest(tier)) == (3, 3, [A])


def test_a_leased_copy_stands_in_no_order(tier: Residency[None]) -> None:
    tier.lease(loaded(tier, A, 3))
    assert (tier.used, tier.idle_size, coldest(tier)) == (3, 0, [])


def test_a_copy_is_idle_again_after_its_last_release(tier: Residency[None]) -> None:
    copy = loaded(tier, A)
    tier.lease(copy)
    tier.lease(copy)
    tier.release(copy)
    assert not copy.idle
    tier.release(copy)
    assert coldest(tier) == [A]


def test_a_copy_leased_while_it_loads_is_not_idle_once_it_is_whole(tier: Residency[None]) -> None:
    copy = tier.reserve(A, 1, None)
    tier.lease(copy)
    tier.loaded(copy)
    assert coldest(tier) == []
    tier.release(copy)
    assert coldest(tier) == [A]


def test_a_leased_copy_is_never_dropped(tier: Residency[None]) -> None:
    copy = loaded(tier, A)
    tier.lease(copy)
    with pytest.raises(AssertionError):
        tier.drop(copy)


def test_a_load_that_failed_is_dropped_though_it_is_leased(tier: Residency[None]) -> None:
    copy = tier.reserve(A, 2, None)
    tier.lease(copy)
    tier.drop(copy)
    assert (tier.get(A), tier.used) == (None, 0)


def test_releasing_more_often_than_leasing_is_our_own_defect(tier: Residency[None]) -> None:
    with pytest.raises(AssertionError):
        tier.release(loaded(tier, A))


def test_a_release_is_a_use(tier: Residency[None]) -> None:
    first, _ = loaded(tier, A), loaded(tier, B)
    tier.lease(first)
    tier.release(first)
    assert coldest(tier) == [B, A]


def test_shielded_copies_are_given_up_last(tier: Residency[None]) -> None:
    loaded(tier, A)
    loaded(tier, B)
    tier.shield(A, True)
    assert coldest(tier) == [B, A]
    tier.shield(A, False)
    assert coldest(tier) == [B, A]


@pytest.mark.parametrize("shielded_first", [True, False])
def test_a_shield_outlives_a_lease(tier: Residency[None], shielded_first: bool) -> None:
    copy = loaded(tier, A)
    if shielded_first:
        tier.shield(A, True)
    tier.lease(copy)
    tier.shield(A, True)
    tier.release(copy)
    loaded(tier, B)
    assert coldest(tier) == [B, A]


def test_a_shield_does_not_outlive_the_copy(tier: Residency[None]) -> None:
    copy = loaded(tier, A)
    tier.shield(A, True)
    tier.drop(copy)
    loaded(tier, A)
    loaded(tier, B)
    assert coldest(tier) == [A, B]


def test_shielding_what_is_not_there_is_fine(tier: Residency[None]) -> None:
    tier.shield(A, True)
    assert coldest(tier) == []


def test_a_prefetched_copy_is_so_until_its_first_use(tier: Residency[None]) -> None:
    copy = tier.reserve(A, 1, None, prefetched=True)
    tier.loaded(copy)
    assert copy.prefetched
    tier.lease(copy)
    assert not copy.prefetched


def test_a_copy_is_reserved_once(tier: Residency[None]) -> None:
    tier.reserve(A, 1, None)
    with pytest.raises(AssertionError):
        tier.reserve(A, 1, None)


def test_a_new_copy_is_loading(tier: Residency[None]) -> None:
    assert tier.reserve(A, 1, None).state is State.LOADING
