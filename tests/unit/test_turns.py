"""Whose turn it is: who was passed too often, and for how long that is remembered."""

from __future__ import annotations

from itertools import pairwise

from adaptercache import Request
from adaptercache.turns import MAX_BYPASSES, Turns

ONE, TWO, THREE = (Request(f"r{n}", "a") for n in (1, 2, 3))
ALL = {"r1", "r2", "r3"}


def test_who_is_passed_too_often_is_overdue() -> None:
    turns = Turns()
    for _ in range(MAX_BYPASSES):
        assert not turns.overdue
        turns.note({"cap": ONE}, ALL, False)  # nobody else was admitted: not passed over
        turns.note({"cap": ONE}, ALL, True)
    assert turns.overdue == {"r1": ONE}
    turns.note({}, ALL, True)
    assert turns.overdue == {"r1": ONE}, "until it is in"
    turns.note({}, {"r2", "r3"}, True)
    assert not turns.overdue


def test_passing_one_doesnt_count_for_who_comes_after_it() -> None:
    turns = Turns()
    for _ in range(MAX_BYPASSES):
        turns.note({"cap": ONE}, ALL, True)
    turns.note({"cap": TWO}, {"r2"}, True)
    assert not turns.overdue


def test_passing_one_counts_on_when_it_waits_for_something_else_in_between() -> None:
    """Its adapter comes, goes again, and comes anew: not from nothing each time."""
    turns = Turns()
    for step in range(MAX_BYPASSES):
        assert not turns.overdue
        turns.note({"room": ONE} if step % 3 else {}, ALL, True)
    turns.note({}, ALL, True)
    assert turns.overdue == {"r1": ONE}


def test_the_lines_are_counted_apart_and_one_first_in_both_counts_once() -> None:
    turns = Turns()
    for _ in range(MAX_BYPASSES - 1):
        turns.note({"cap": ONE, "room": ONE}, ALL, True)
    assert not turns.overdue
    turns.note({"cap": ONE, "room": TWO}, ALL, True)
    assert turns.overdue == {"r1": ONE}
    for _ in range(MAX_BYPASSES - 1):
        turns.note({"room": TWO}, ALL, True)
    assert turns.overdue == {"r1": ONE, "r2": TWO}


def test_one_ahead_takes_over_and_what_was_counted_stays() -> None:
    turns = Turns()
    for _ in range(MAX_BYPASSES - 1):
        turns.note({"room": TWO}, ALL, True)
    turns.note({"room": ONE}, ALL, True)  # it is ahead, and has come to wait for room too
    assert not turns.overdue
    turns.note({"room": TWO}, ALL - {"r1"}, True)
    assert turns.overdue == {"r2": TWO}


def test_a_turn_lasts_as_long_as_it_took_to_come_and_the_next_one_twice_that() -> None:
    """What it needs is kept for it, in vain: others have half the time."""
    turns, kept = Turns(), list[bool]()
    for _ in range(10 * MAX_BYPASSES):
        is_its_turn = "r1" in turns.overdue
        kept.append(is_its_turn)
        turns.note({"room": ONE}, ALL, True, "r1" if is_its_turn else None)
    changes = [n for n, (a, b) in enumerate(pairwise(kept), 1) if a != b]
    assert changes == [step * MAX_BYPASSES for step in (1, 2, 3, 5, 7)]
    turns.note({}, {"r2"}, True, None)
    turns.note({"room": ONE}, ALL, True, None)
    assert not turns.overdue, "who comes anew begins anew"
