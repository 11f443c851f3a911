"""Which thread holds what in `fragments`, so that tensor cores find it in registers.

An operand of ``mma.m16n8k16`` has a fixed place for each of its numbers. But k, which is summed
over, may come in any order that both operands have, and so in one that is read 16 bytes at a time;
and the columns of a product may be any. Weights are the left operand, 16 rows of A or columns of
Bᵀ, and tokens the right one, 8 of them: in decode most adapters have few.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

__all__ = [
    "b_layout",
    "mma_layout",
    "operand_layout",
    "parts_layout",
    "sums_layout",
    "y_layout",
]


@constexpr_function
def mma_layout(warps):
    """Of products [warp, row or column, token]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def operand_layout(index, warps, side_by_side):
    """Of a product's left (0) or right (1) operand: how many k a thread holds side by side."""
    product = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    return gl.DotOperandLayout(index, product, side_by_side)


@constexpr_function
def parts_layout(numbers, warps):
    """Of what warps have summed [warp, number]: a thread has its numbers of all warps."""
    held, lanes, its_warps = _spread(numbers, warps)
    return gl.DistributedLinearLayout(
        [[0, at] for at in held] + [[at, 0] for at in (1, 2, 4, 8) if at < warps],
        [[0, at] for at in lanes], [[0, at] for at in its_warps], [], [warps, numbers],
    )  # fmt: skip


@constexpr_function
def sums_layout(numbers, warps):
    """Of a part of all rows and tokens: each warp has other numbers."""
    held, lanes, its_warps = _spread(numbers, warps)
    return gl.DistributedLinearLayout(
        [[at] for at in held], [[at] for at in lanes], [[at] for at in its_warps], [], [numbers]
    )


@constexpr_function
def _spread(numbers, warps):
    """Over registers, lanes and warps: four side by side of a thread, where there are as many."""
    bits = [1 << bit for bit in range(numbers.bit_length() - 1)]
    side = 2 if numbers >= 128 * warps else 1 if numbers >= 64 * warps else 0
    of_warps = warps.bit_length() - 1
    lanes, rest = bits[side : side + 5], bits[side + 5 :]
    its_warps = rest[:of_warps] + [0] * (of_warps - len(rest))
    return bits[:side] + rest[of_warps:], lanes, its_warps


@constexpr_function
def b_layout(warps):
    """Of 64 columns of 16 rows of Bᵀ, two columns a number [warp, 16, 32]: a thread has 8 columns
    side by side, of the rows that the mma wants of it."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 8, 0]],
        [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        [[at, 0, 0] for at in (1, 2, 4) if at < warps], [], [warps, 16, 32],
    )  # fmt: skip


@constexpr_function
def y_layout(tokens, warps):
    """Of 64 columns of y, two a number [warp, token, 32]: a thread has 8 columns side by side, of
    two tokens of each 8."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0]] + [[0, at, 0] for at in (8,) if at < tokens],
        [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        [[at, 0, 0] for at in (1, 2, 4) if at < warps], [], [warps, tokens, 32],
    )  # fmt: skip
