"""The kernels' work: a step's tokens by adapter, as one vector of numbers on the GPU.

``int32``, in this order, each part with room for the most that there can be:

- the number of groups, and the number of singles;
- of each group its slot;
- of each group its tokens, −1 after the last;
- of each single its slot;
- of each single its token.

A group is up to 16 tokens of one slot (BGMV) or 64 (SGMV). A single is a token with its slot: SGMV
has no path of its own for it, and no singles.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass

__all__ = ["LARGE_TILE", "SMALL", "SMALL_TILE", "WorkShape", "rows_by_slot"]

SMALL = 512
"""Rows: up to here the kernels for few tokens are the faster ones."""
FEW = 3
"""Tokens of a slot: fewer are singles, that the L2 serves with what they share."""

SMALL_TILE, LARGE_TILE = 16, 64  # tokens a group; the kernels' own


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
        singles = self.num_rows if self.is_small else 0
        return 2 + (1 + self.tile) * self.max_groups + 2 * singles

    def lay_out(self, segments: Sequence[tuple[int, int]]) -> array[int]:
        """The numbers. O(tokens)."""
        tile, few = self.tile, FEW if self.is_small else 1
        rows_of = rows_by_slot(segments)
        singles, alone = array("i"), array("i")
        groups, tokens = array("i"), array("i")
        for slot, rows in rows_of.items():
            left = len(rows)
            if left % tile < few:
                left -= left % tile
                for row in rows[left:] if left else rows:
                    singles.append(slot)
                    alone.append(row)
                if not left:
                    continue
            for first in range(0, left, tile):
                groups.append(slot)
                tokens.extend(rows[first : first + tile])
                tokens.extend(_NONE[left - first : tile])
        numbers = array("i", (len(groups), len(singles)))
        parts = [(groups, self.max_groups), (tokens, self.max_groups * tile)]
        if self.is_small:
            parts += [(singles, self.num_rows), (alone, self.num_rows)]
        for part, room in parts:
            numbers.extend(part)
            numbers.frombytes(bytes(4 * (room - len(part))))
        return numbers


_NONE = array("i", [-1] * LARGE_TILE)
