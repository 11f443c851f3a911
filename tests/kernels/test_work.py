"""A step's work, against a plain statement of what each of its parts is."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from adaptercache.kernels.work import SMALL, WorkShape

SLOTS = 7


@dataclass(frozen=True)
class Step:
    segments: list[tuple[int, int]]
    rank_class: int
    ranks: dict[int, int]
    """Some slots may be missing: of the highest rank that there can be."""
    padding: int

    @property
    def num_rows(self) -> int:
        return sum(tokens for _, tokens in self.segments) + self.padding

    def part_of(self, slot: int) -> int:
        """0: of ranks over 32; 1: of 17 to 32; 2: others, and all where no rank is over 16."""
        rank = self.ranks.get(slot, self.rank_class)
        return 2 if self.rank_class <= 16 or rank <= 16 else 1 if rank <= 32 else 0

    def rows(self) -> dict[int, list[int]]:
        slots = [slot for slot, tokens in self.segments for _ in range(tokens)]
        its: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot >= 0:
                its.setdefault(slot, []).append(row)
        return its

    def numbers(self) -> list[int]:
        numbers = WorkShape(self.num_rows, SLOTS).lay_out(
            self.segments, self.rank_class, self.ranks
        )
        assert len(numbers) == WorkShape(self.num_rows, SLOTS).numel
        return list(numbers)


@st.composite
def steps(draw: st.DrawFn, rows_more: int = 0) -> Step:
    rank_class = draw(st.sampled_from([16, 64, 128]))
    tokens = st.one_of(st.integers(0, 3), st.sampled_from([15, 16, 17, 18, 32, 33, 64, 65]))
    segments = draw(st.lists(st.tuples(st.integers(-1, SLOTS - 1), tokens), max_size=7))
    ranks = draw(st.dictionaries(st.integers(0, SLOTS - 1), st.integers(1, rank_class)))
    return Step(segments, rank_class, ranks, rows_more + draw(st.integers(0, 3)))


def cut(numbers: list[int], *sizes: int) -> list[list[int]]:
    parts = []
    for size in sizes:
        parts.append(numbers[:size])
        numbers = numbers[size:]
    assert not numbers
    return parts


def in_order(step: Step, tile: int, few: int) -> tuple[list[list[tuple[int, list[int]]]], ...]:
    """Groups and singles, of each of the three parts: a slot and its rows."""
    groups: list[list[tuple[int, list[int]]]] = [[], [], []]
    singles: list[list[tuple[int, list[int]]]] = [[], [], []]
    for slot, rows in step.rows().items():
        for first in range(0, len(rows), tile):
            its = rows[first : first + tile]
            to = groups if len(its) >= few else singles
            to[step.part_of(slot)].append((slot, its))
    return groups, singles


@given(steps())
@example(Step([], 16, {}, 0))
@example(Step([(0, 17), (1, 1), (2, 1), (3, 16), (0, 1)], 64, {0: 33, 1: 17, 2: 32, 3: 16}, 2))
@example(Step([(0, 33), (1, 36), (2, 5), (3, 4), (4, 1)], 16, {0: 8, 1: 7, 2: 8, 3: 1, 4: 9}, 0))
def test_every_token_is_in_one_entry_in_the_order_of_ranks(step: Step) -> None:
    rows, room = step.num_rows, step.num_rows // 2
    *_, counts, slots, which, tokens = cut(
        step.numbers(), 8, room, 16 * room, rows, rows, 4, rows, rows, rows
    )
    of_token: dict[int, int] = {}
    parts = [part for part in range(4) for _ in range(counts[part])]
    assert slots[len(parts) :] == which[len(parts) :] == [0] * (rows - len(parts))
    used = 0
    for part, slot, its in zip(parts, slots, which, strict=False):
        its_tokens = [its]
        if its < 0:
            first, more = divmod(-1 - its, 16)
            its_tokens = tokens[first : first + more + 1]
            assert len(its_tokens) == more + 1 >= 2
            used += more + 1
        is_narrow = step.ranks.get(slot, step.rank_class) <= 8 and len(its_tokens) <= 4
        assert len(its_tokens) <= (8 if step.part_of(slot) == 2 else 16)
        assert part == (3 if is_narrow else step.part_of(slot))
        assert not of_token.keys() & its_tokens
        of_token.update(dict.fromkeys(its_tokens, slot))
    assert of_token == {row: slot for slot, its in step.rows().items() for row in its}
    assert tokens[used:] == [0] * (rows - used)


@given(steps())
def test_what_bgmv_takes_is_as_it_was(step: Step) -> None:
    rows, room = step.num_rows, step.num_rows // 2
    header, slots, tokens, row_slots, row_order, *_ = cut(
        step.numbers(), 8, room, 16 * room, rows, rows, 4, rows, rows, rows
    )
    groups, singles = in_order(step, tile=16, few=2)
    count = [
        sum(len(rows) for slot, rows in step.rows().items() if step.part_of(slot) == part)
        for part in range(3)
    ]
    ranks = sum(
        max(16, step.ranks.get(slot, step.rank_class)) * len(rows)
        for slot, rows in step.rows().items()
    )
    assert header == [sum(map(len, groups)), *map(len, singles), *count, ranks]
    flat = [group for part in groups for group in part]
    assert slots == [slot for slot, _ in flat] + [0] * (room - len(flat))
    wanted = [row for _, its in flat for row in its + [-1] * (16 - len(its))]
    assert tokens == wanted + [-1] * (16 * room - len(wanted))
    each = [
        (slot, row)
        for part in range(3)
        for slot, its in singles[part] + groups[part]
        for row in its
    ]
    empty = [0] * (rows - len(each))
    assert row_slots == [slot for slot, _ in each] + empty
    assert row_order == [row for _, row in each] + empty


@given(steps(rows_more=SMALL + 1))
def test_sgmv_has_groups_of_64_and_nothing_else(step: Step) -> None:
    room = WorkShape(step.num_rows, SLOTS).max_groups
    header, slots, tokens = cut(step.numbers(), 8, room, 64 * room)
    groups, _ = in_order(step, tile=64, few=1)
    flat = [group for part in groups for group in part]
    assert header[:4] == [len(flat), 0, 0, 0]
    assert slots[: len(flat)] == [slot for slot, _ in flat]
    wanted = [row for _, its in flat for row in its + [-1] * (64 - len(its))]
    assert tokens == wanted + [-1] * (64 * room - len(wanted))
