"""Which thread holds what: layouts of `fragments`, and what its kernels share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

__all__ = [
    "b_layout",
    "by_twos",
    "group_of",
    "launch_dependents",
    "load_steps",
    "mma_layout",
    "number_of",
    "operand_layout",
    "pages_of",
    "parts_layout",
    "pick",
    "pointers_to",
    "sums_layout",
    "tokens_of_operand",
    "tokens_of_y",
    "two",
    "wait",
    "y_layout",
]


@constexpr_function
def mma_layout(warps):
    """Of products [warp, token, row or column]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def operand_layout(index, warps, k_width):
    """k is permuted, in both operands alike: a thread holds ``k_width`` that lie side by side."""
    return gl.DotOperandLayout(
        index, gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8]), k_width
    )


@constexpr_function
def parts_layout(slices, chunks, warps):
    """Of the shrink's parts [slice, 256 · chunk]: a thread has its numbers of all slices."""
    registers, lanes, its_warps = _spread(256 * chunks, warps)
    return gl.DistributedLinearLayout(
        [[0, at] for at in registers] + [[at, 0] for at in (1, 2, 4, 8) if at < slices],
        [[0, at] for at in lanes], [[0, at] for at in its_warps], [], [slices, 256 * chunks],
    )  # fmt: skip


@constexpr_function
def sums_layout(rank, warps):
    """Of a part of all chunks [16 · rank]: each warp has other numbers."""
    registers, lanes, its_warps = _spread(16 * rank, warps)
    return gl.DistributedLinearLayout(
        [[at] for at in registers], [[at] for at in lanes], [[at] for at in its_warps], [],
        [16 * rank],
    )  # fmt: skip


@constexpr_function
def _spread(numbers, warps):
    """Over registers, lanes and warps: four side by side of a thread, where there are as many."""
    bits = [1 << bit for bit in range(numbers.bit_length() - 1)]
    side = 2 if numbers >= 128 * warps else 1 if numbers >= 64 * warps else 0
    of_warps = warps.bit_length() - 1
    lanes, rest = bits[side : side + 5], bits[side + 5 :]
    return bits[:side] + rest[of_warps:], lanes, rest[:of_warps]


@constexpr_function
def b_layout(rank, warps):
    """Of Bᵀ by twos [warp, rank, 32]: a thread has 8 columns side by side, of rows that the mma wants
    of it."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 8, 0]]
        + [[0, at, 0] for at in (16, 32, 64, 128, 256) if at < rank],
        [[0, 2, 0], [0, 4, 0], [0, 0, 16], [0, 0, 4], [0, 0, 8]],
        [[at, 0, 0] for at in (1, 2, 4) if at < warps], [], [warps, rank, 32],
    )  # fmt: skip


@constexpr_function
def y_layout(warps):
    """Of y by twos [warp, token, 32]: a thread has 8 columns side by side, twice, of two tokens."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0], [0, 0, 16]],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[at, 0, 0] for at in (1, 2, 4) if at < warps], [], [warps, 16, 32],
    )  # fmt: skip


@constexpr_function
def tokens_of_operand(warps):
    """Of a group's 16 tokens, as `fragment_units.shrink_unit` takes them."""
    return gl.SliceLayout(0, gl.SliceLayout(2, operand_layout(0, warps, 8)))


@constexpr_function
def tokens_of_y(warps):
    """As `fragment_units.expand_run` takes them."""
    return gl.SliceLayout(0, gl.SliceLayout(2, y_layout(warps)))


@gluon.jit
def wait():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pick(m, v0, v1, v2, M: gl.constexpr):
    v = v0
    if M > 1:
        v = gl.where(m == 1, v1, v)
    if M > 2:
        v = gl.where(m == 2, v2, v)
    return v


@gluon.jit
def group_of(work, group, max_groups, TOKENS: gl.constexpr):
    """Its slot and its tokens; may be asked for before it is known whether there is such a group."""
    t = gl.arange(0, 16, layout=TOKENS)
    tokens = max_groups
    max_groups = tokens // 2
    there = group < tokens
    units = work + 8 + max_groups * 17 + tokens * 2
    slot = gl.load(units + group, mask=there, other=0)
    first = gl.load(units + tokens + group, mask=there, other=-1)
    at = work + 8 + max_groups + group * 16 + t
    others = gl.load(at, mask=(group < max_groups) & (t > 0), other=-1)
    return slot, gl.where(t == 0, first, others)


@gluon.jit
def number_of(work):
    """Groups, and all units."""
    groups = gl.load(work)
    return groups, groups + gl.load(work + 1) + gl.load(work + 2) + gl.load(work + 3)


@gluon.jit
def pages_of(slot_pages, element, mask, PAGE_ELEMS: gl.constexpr, ROWS: gl.constexpr):
    """Pages of elements of a slot's vector, as in `paging.load_tile`."""
    return gl.load(slot_pages + element // PAGE_ELEMS // ROWS, mask=mask, other=0)


@gluon.jit
def pointers_to(
    arena, page, num_pages, element, MULTIPLE: gl.constexpr, PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """To these elements, multiples of 16."""
    row = (element // PAGE_ELEMS % ROWS).to(gl.int32)
    at = (row * num_pages + page).to(gl.int64) * PAGE_ELEMS
    return arena + gl.multiple_of(at + (element % PAGE_ELEMS).to(gl.int64), MULTIPLE)


@gluon.jit
def by_twos(pointers):
    """Numbers of 32 bits, since of tensors that a loop carries each number takes a register."""
    return pointers.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def two(even, odd):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [odd, even],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_steps(pointers, mask, STEPS: gl.constexpr, APART: gl.constexpr):
    """What lies there, and STEPS - 1 times APART elements further."""
    tiles = ()
    for step in gl.static_range(STEPS):
        tiles = tiles + (gl.load(pointers + step * APART, mask=mask, other=0),)
    return tiles
