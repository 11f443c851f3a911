"""The kernels' work: a step's tokens by adapter, as one vector of numbers on the GPU.

``int32``, in this order, each part with room for the most that there can be:

- the number of groups;
- three numbers of singles: with adapters of ranks over 32, of 17 to 32, and the others;
- three numbers of tokens, likewise;
- the sum of the tokens' ranks (each 16 at least, as tiles have), which tells how much the L2 would
  serve if none were in groups;
- of each group its slot, those of the highest ranks first;
- of each group its tokens, −1 after the last;
- of each token its slot, and
- its row: those with adapters of ranks over 32, of 17 to 32, and the others, and of each of these
  the singles first;
- four numbers of entries: with adapters of ranks over 32, of 17 to 32, the others, and those of up
  to 4 tokens whose adapters are of ranks up to 8;
- of each entry its slot, in this order;
- of an entry of one token its row; of another, −1 less its tokens but one, and less 16 times its
  first place in the last part; and
- the rows of entries of more tokens, an entry's side by side.

A group is up to 16 tokens of one slot (BGMV) or 64 (SGMV). A single is a token of no group. BGMV
takes groups and singles, or all tokens as if they were singles; by fragments, it takes entries: up
to 8 tokens of one slot, or 16 where its rank is over 16 and many tokens are in groups. SGMV has no
path for singles: all its tokens are in groups, and the parts after the groups' tokens are not
there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain

__all__ = ["LARGE_TILE", "LONG", "SHORT", "SMALL", "SMALL_TILE", "WorkShape", "rows_by_slot"]

SMALL = 512
"""Rows: up to here the kernels for few tokens are the faster ones."""
LONG = 2048
"""Rows: over them, tiles alone keep a GPU busy."""
FEW = 2
"""Tokens of a slot: fewer are singles, that the L2 serves with what they share."""
SHORT = 16
"""Rows: up to here, more and smaller programs are done sooner."""

HEADER = 8  # numbers before the groups' slots; the kernels' own
SMALL_TILE, LARGE_TILE = 16, 64  # tokens a group; the kernels' own
ENTRY, LARGE_ENTRY = 8, 16  # tokens an entry; the kernels' own
MANY = 96  # tokens in groups: over them, entries are large where ranks are over 16
NARROW, NARROW_TOKENS = 8, 4  # ranks and tokens of an entry that is done two parts at a time


def rows_by_slot(segments: Iterable[tuple[int, int]]) -> dict[int, MutableSequence[int]]:
    """The rows of each slot, in the order of the slots' first tokens; the base model's are left
    out."""
    rows: dict[int, MutableSequence[int]] = {}
    row = 0
    for slot, tokens in segments:
        if slot < 0 or not tokens:
            row += tokens
        elif tokens == 1:  # decode, and so the most of them
            if slot in rows:
                rows[slot].append(row)
            else:
                rows[slot] = [row]
            row += 1
        else:
            if slot in rows:
                rows[slot].extend(_rows(row, row + tokens))
            else:
                rows[slot] = _rows(row, row + tokens)
            row += tokens
    return rows


def _rows(first: int, end: int) -> array[int]:
    """Cut from a list of all numbers: much faster than counting."""
    global _all
    if end > len(_all):
        _all = array("i", range(2 * end))
    return _all[first:end]


_all = array("i", range(1024))


@dataclass(frozen=True, slots=True)
class WorkShape:
    """Room for the work of any batch of ``num_rows`` rows over ``num_slots`` slots.

    ``is_small`` says that it is for BGMV, which knows singles, else for SGMV.
    """

    num_rows: int
    num_slots: int

    @property
    def is_small(self) -> bool:
        return self.num_rows <= SMALL

    @property
    def max_groups(self) -> int:
        if self.is_small:
            return self.num_rows // 2
        return self.num_rows // LARGE_TILE + min(self.num_slots, self.num_rows)

    @property
    def tile(self) -> int:
        """Tokens a group at most."""
        return SMALL_TILE if self.is_small else LARGE_TILE

    @property
    def numel(self) -> int:
        of_all = 4 + 5 * self.num_rows if self.is_small else 0
        return HEADER + (1 + self.tile) * self.max_groups + of_all

    def lay_out(
        self, segments: Sequence[tuple[int, int]], rank_class: int, ranks: Mapping[int, int]
    ) -> array[int]:
        """The numbers. O(tokens).

        Args:
            rank_class: an upper bound of all ranks.
            ranks: of slots, a lower one of their own.
        """
        tile, few = self.tile, FEW if self.is_small else 1
        by_rank = (_Tokens(), _Tokens(), _Tokens())
        sum_of_ranks = 0
        over32, over16, up_to16 = by_rank
        its = up_to16
        by_slot = rows_by_slot(segments)
        for slot, rows in by_slot.items():
            rank, count = ranks.get(slot, rank_class), len(rows)
            sum_of_ranks += (rank if rank > 16 else 16) * count
            if rank_class > 16:
                its = over32 if rank > 32 else over16 if rank > 16 else up_to16
            if count == 1 < few:  # the most of them in decode
                its.slots.append(slot)
                its.rows.append(rows[0])
                continue
            alone = count % tile
            if alone >= few:
                alone = 0
            grouped = count - alone
            its.slots += [slot] * alone
            its.rows += rows[grouped:]
            if self.is_small:
                its.grouped_slots += [slot] * grouped
                its.grouped_rows += rows[:grouped]
            its.groups += [slot] * -(-grouped // tile)
            its.tokens.extend(array("i", rows[:grouped]))
            its.tokens.extend(_NONE[: -grouped % tile])
        singles = [len(each.slots) for each in by_rank]
        all_tokens = [len(each.slots) + len(each.grouped_slots) for each in by_rank]
        groups = [slot for each in by_rank for slot in each.groups]
        tokens = over32.tokens + over16.tokens + up_to16.tokens
        numbers = array("i", (len(groups), *singles, *all_tokens, sum_of_ranks))
        _extend(numbers, groups, self.max_groups)
        _extend(numbers, tokens, self.max_groups * tile, b"\xff")
        if self.is_small:
            of_all = (slots for each in by_rank for slots in (each.slots, each.grouped_slots))
            _extend(numbers, list(chain.from_iterable(of_all)), self.num_rows)
            of_all = (rows for each in by_rank for rows in (each.rows, each.grouped_rows))
            _extend(numbers, list(chain.from_iterable(of_all)), self.num_rows)
            counts, *parts = _entries(by_slot, rank_class, ranks)
            numbers.extend(counts)
            for part in parts:
                _extend(numbers, part, self.num_rows)
        return numbers


def _entries(
    by_slot: Mapping[int, Sequence[int]], rank_class: int, ranks: Mapping[int, int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """How many there are by rank; their slots; what tells their tokens; the rows of those of more
    than one."""
    slots: tuple[list[int], ...] = ([], [], [], [])
    which: tuple[list[int], ...] = ([], [], [], [])
    tokens: list[int] = []
    grouped = sum(len(rows) for rows in by_slot.values() if len(rows) > ENTRY)
    high = LARGE_ENTRY if grouped > MANY else ENTRY  # what is read from the L2, or programs
    for slot, rows in by_slot.items():
        rank = ranks.get(slot, rank_class)
        kind = 2 if rank_class <= 16 or rank <= 16 else 1 if rank <= 32 else 0
        if len(rows) == 1:  # the most of them in decode
            its_kind = 3 if rank <= NARROW else kind
            slots[its_kind].append(slot)
            which[its_kind].append(rows[0])
            continue
        most = high if kind < 2 else ENTRY
        for first in range(0, len(rows), most):
            its = rows[first : first + most]
            its_kind = 3 if rank <= NARROW and len(its) <= NARROW_TOKENS else kind
            slots[its_kind].append(slot)
            if len(its) == 1:
                which[its_kind].append(its[0])
            else:
                which[its_kind].append(-len(its) - LARGE_ENTRY * len(tokens))
                tokens += its
    return (
        [len(each) for each in slots],
        list(chain.from_iterable(slots)),
        list(chain.from_iterable(which)),
        tokens,
    )


def _extend(numbers: array[int], part: Sequence[int], room: int, rest: bytes = b"\0") -> None:
    """Add it, and ``rest``, a byte, up to its room."""
    numbers.extend(part if isinstance(part, array) else array("i", part))
    numbers.frombytes(rest * (4 * (room - len(part))))


class _Tokens:
    """Of adapters of like rank: singles, and tokens of groups."""

    __slots__ = ("grouped_rows", "grouped_slots", "groups", "rows", "slots", "tokens")

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.tokens = array("i")
        self.slots: list[int] = []
        self.rows: list[int] = []
        self.grouped_slots: list[int] = []
        self.grouped_rows: list[int] = []


_NONE = array("i", [-1] * LARGE_TILE)
