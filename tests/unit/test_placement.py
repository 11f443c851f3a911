"""`place` against what its words promise, over random tables and queues."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptercache.placement import Placement, Want, place
from adaptercache.policy import LRU
from adaptercache.residency import Residency

NAMES = [bytes([n]) for n in range(8)]


@dataclass(frozen=True)
class Case:
    """A tier: for each copy its size and state, coldest first; and a queue."""

    copies: dict[bytes, tuple[int, str]]
    wants: list[Want]
    free: int
    free_slots: int

    def tier(self) -> Residency[None]:
        tier: Residency[None] = Residency(LRU)
        for name, (size, state) in self.copies.items():
            copy = tier.reserve(name, size, None)
            if state != "loading":
                tier.loaded(copy)
            if state == "leased":
                tier.lease(copy)
        return tier

    def place(self) -> Placement:
        return place(self.wants, self.tier(), free=self.free, free_slots=self.free_slots)

    def idle(self) -> list[bytes]:
        return [name for name, (_, state) in self.copies.items() if state == "idle"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = st.integers(1, 4)
    states = st.sampled_from(["idle", "idle", "leased", "loading"])
    copies = draw(st.dictionaries(st.sampled_from(NAMES), st.tuples(sizes, states), max_size=6))
    queue = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    hints_from = draw(st.integers(0, len(queue)))
    wants = [
        Want(
            name,
            copies[name][0] if name in copies else draw(sizes),
            draw(st.booleans()),
            i >= hints_from,
        )
        for i, name in enumerate(queue)
    ]
    return Case(copies, wants, draw(st.integers(-2, 5)), draw(st.integers(0, 3)))


@given(cases())
def test_only_idle_copies_are_evicted(case: Case) -> None:
    assert set(case.place().evictions) <= set(case.idle())


@given(cases())
def test_what_is_loaded_fits_in_what_is_free_and_evicted(case: Case) -> None:
    placement = case.place()
    if placement.loads:
        freed = sum(case.copies[name][0] for name in placement.evictions)
        assert sum(want.size for want in placement.loads) <= case.free + freed
        assert len(placement.loads) <= case.free_slots + len(placement.evictions)


@given(cases())
def test_only_what_is_ready_and_wanted_and_absent_is_loaded(case: Case) -> None:
    placement = case.place()
    for want in placement.loads:
        assert want in case.wants
        assert want.ready
        assert want.digest not in case.copies or want.digest in placement.evictions


@given(cases())
def test_nothing_is_evicted_for_who_is_behind_its_own_want(case: Case) -> None:
    """If a wanted copy goes, somebody ahead of it is loaded."""
    placement = case.place()
    order = [want.digest for want in case.wants]
    loaded = [order.index(want.digest) for want in placement.loads]
    for name in placement.evictions:
        if name in order:
            assert any(index < order.index(name) for index in loaded)


@given(cases())
def test_after_one_that_finds_no_room_no_demand_behind_it_is_loaded(case: Case) -> None:
    placement = case.place()
    if placement.no_room:
        order = [want.digest for want in case.wants]
        first = order.index(placement.no_room[0])
        assert all(order.index(want.digest) < first for want in placement.loads)


@given(cases())
def test_a_wanted_copy_goes_only_after_all_that_nobody_wants(case: Case) -> None:
    placement = case.place()
    wanted = {want.digest for want in case.wants}
    if wanted & set(placement.evictions):
        assert {name for name in case.idle() if name not in wanted} <= set(placement.evictions)


@given(cases())
def test_without_room_for_the_first_demand_there_really_was_none(case: Case) -> None:
    """All that is idle, but for what those ahead want, would not have been enough."""
    placement = case.place()
    if not placement.no_room or case.wants[0].digest != placement.no_room[0]:
        return
    room = case.free + sum(case.copies[name][0] for name in case.idle())
    assert case.wants[0].size > room or case.free_slots + len(case.idle()) < 1


@given(cases())
def test_hints_evict_nothing_that_anybody_waits_for_or_hints_at(case: Case) -> None:
    hints = [want for want in case.wants if want.hint]
    only_hints = Case(case.copies, hints, case.free, case.free_slots)
    assert not {want.digest for want in hints} & set(only_hints.place().evictions)


@given(cases())
def test_hints_find_no_room_silently(case: Case) -> None:
    hints = {want.digest for want in case.wants if want.hint}
    assert not hints & set(case.place().no_room)


def case_of(copies: dict[bytes, tuple[int, str]], wants: list[Want], free: int = 0) -> Case:
    return Case(copies, wants, free, 8)


A, B, C = NAMES[:3]


def test_the_coldest_goes_first() -> None:
    case = case_of({A: (2, "idle"), B: (2, "idle")}, [Want(C, 2, True)])
    assert case.place().evictions == (A,)


def test_room_is_kept_for_one_ahead_that_is_not_ready_yet() -> None:
    case = case_of({}, [Want(A, 3, False), Want(B, 2, True)], free=4)
    assert case.place() == Placement((), (), (B,), 1)


def test_what_is_short_is_told() -> None:
    case = case_of({A: (2, "leased"), B: (1, "idle")}, [Want(C, 4, True)], free=1)
    assert case.place() == Placement((), (), (C,), 2)


def test_what_those_behind_take_is_told() -> None:
    d, e = NAMES[3:5]
    wants = [Want(C, 4, True), Want(B, 1, True), Want(d, 3, False), Want(e, 2, True, hint=True)]
    case = case_of({A: (2, "leased")}, wants, free=1)
    assert case.place() == Placement((), (), (C, B, d), 3, (1, 3))


@pytest.mark.parametrize("state", ["idle", "leased", "loading"])
def test_what_is_there_needs_nothing(state: str) -> None:
    case = case_of({A: (2, state)}, [Want(A, 2, True)])
    assert case.place() == Placement((), (), (), 0)


def test_places_change_nothing() -> None:
    case = case_of({A: (2, "idle")}, [Want(B, 2, True)])
    tier = case.tier()
    place(case.wants, tier, free=0)
    assert [copy.digest for copy in tier] == [A]
    assert tier.idle_size == 2
