"""Whose turn it is: who was passed too often, and for how long that is remembered."""

from __future__ import annotations

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
