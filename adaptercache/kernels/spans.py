"""Where the rows of a tensor lie, and whether two tensors have memory in common.

Column slices of one buffer interleave without sharing anything, so addresses of the first and the
last byte don't tell.
"""

from __future__ import annotations

__all__ = ["Span", "share"]

Span = tuple[int, int, int]
"""The address of the first row, the step from a row to the next, and a row's width, in bytes."""


def share(a: Span, b: Span, rows: int) -> bool:
    """Whether they have a byte in common, of ``rows`` rows each; those of ``a`` don't overlap.

    O(1), or O(rows) where memory interleaves in different steps.
    """
    (a_at, a_step, a_width), (b_at, b_step, b_width) = a, b
    apart, last = b_at - a_at, rows - 1
    if apart >= last * a_step + a_width or -apart >= last * b_step + b_width:
        return False
    if not last:
        return True
    if a_step == b_step:
        return _meet(a, apart, b_width, -last, last)
    return any(_meet(a, apart + row * b_step, b_width, -last, 0) for row in range(rows))


def _meet(a: Span, apart: int, width: int, least: int, most: int) -> bool:
    """Whether ``width`` bytes meet a row of ``a``, at ``apart`` bytes from its first and moved by
    some number of steps between ``least`` and ``most``."""
    _, step, a_width = a
    steps = max(least, (-width - apart) // step + 1)  # the fewest that leave no gap before it
    return steps <= most and apart + steps * step < a_width
