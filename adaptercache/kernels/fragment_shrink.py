"""A part of an entry's ``x Aᵀ``, by fragments (see `fragments`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from adaptercache.kernels.fragment_layouts import mma_layout, operand_layout, parts_layout
from adaptercache.kernels.fragment_reads import load_steps, pages_of, sixteens, token_of, wait

__all__ = ["part_pages", "shrink_part"]


@gluon.jit
def shrink_part(
    x,
    x_stride,
    of_entry,  # see below
    of_part,
    parts,  # pointer to float32 [tokens, RANK / 16, SPLITS, 16] of the module
    K: gl.constexpr,
    RANK: gl.constexpr,
    BK: gl.constexpr,
    MOST: gl.constexpr,  # tokens
    WARPS: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """16 rows of A and BK columns of each warp, for an entry's tokens, added up in shared memory.

    A narrow entry, of up to 8 rows and 4 tokens, has two parts done at once: rows 8 to 15 are its
    rows in the part that follows, tokens 4 to 7 its tokens there. What is of two different parts
    is multiplied for nothing.
    """
    work, which, tokens, arena, page, num_pages = of_entry  # page: as `part_pages` has found them
    _, _, first_row, split, is_narrow = of_part
    PARTS: gl.constexpr = parts_layout(16 * MOST, WARPS)
    W: gl.constexpr = operand_layout(0, WARPS, 8)  # [warp, row, k]
    X: gl.constexpr = operand_layout(1, WARPS, 8)  # [warp, k, token]
    STEPS: gl.constexpr = BK // 64
    SPLITS: gl.constexpr = (K + BK * WARPS - 1) // (BK * WARPS)
    wk = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
    xk = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, X)))[:, None]
    i = gl.arange(0, MOST, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, :]
    element, there = _part(of_part, K, BK, WARPS)
    unit = sixteens(page, num_pages, element, PAGE_ELEMS, ROWS)
    a_at = gl.expand_dims(gl.multiple_of(unit.to(gl.int64) * 16, (16, 16)), 2)
    a = load_steps(arena + (a_at + wk), gl.expand_dims(there, 2), STEPS, 64)
    half = gl.where(is_narrow, i // 4, 0)
    column = ((split + half) * WARPS + warp) * BK  # [warp, token]
    token = token_of(work, which, tokens, i - half * 4)
    live = gl.expand_dims((token >= 0) & (column < K), 1)
    x_at = x + gl.expand_dims(token.to(gl.int64) * x_stride + column, 1) + xk
    if PDL:
        wait()
    xs = load_steps(x_at, live, STEPS, 64)
    h = gl.full([WARPS, 16, MOST], 0.0, gl.float32, mma_layout(WARPS))
    for step in gl.static_range(STEPS):
        h = mma_v2(a[step], xs[step], h)
    h = gl.sum(gl.convert_layout(h.permute([0, 2, 1]).reshape([WARPS, 16 * MOST]), PARTS), 0)
    at = gl.arange(0, 16 * MOST, layout=gl.SliceLayout(0, PARTS))
    row, j = at % 16, at // 16
    row_half = gl.where(is_narrow, row // 8, 0)
    to_token = token_of(work, which, tokens, j - row_half * 4)
    is_ours = (to_token >= 0) & (split + row_half < SPLITS)
    is_ours &= row_half == gl.where(is_narrow, j // 4, 0)
    to = (to_token * (RANK // 16) + first_row // 16) * SPLITS + split + row_half
    gl.store(parts + to * 16 + row - row_half * 8, h, mask=is_ours)


@gluon.jit
def part_pages(
    slot_pages, of_part, K: gl.constexpr, BK: gl.constexpr, WARPS: gl.constexpr,
    PAGE_ELEMS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Of A's rows, in a part [warp, row]."""
    element, there = _part(of_part, K, BK, WARPS)
    return pages_of(slot_pages, element, there, PAGE_ELEMS, ROWS)


@gluon.jit
def _part(of_part, K: gl.constexpr, BK: gl.constexpr, WARPS: gl.constexpr):
    """Where each warp's columns of each row begin in the slot's vector [warp, row], and whether
    there are any: the last part may have fewer. None crosses a cell, since BK divides K and 512."""
    begin, r, first_row, split, is_narrow = of_part  # begin: of the module's A in the vector
    W: gl.constexpr = operand_layout(0, WARPS, 8)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, W)))[:, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, W)))[None, :]
    half = gl.where(is_narrow, i // 8, 0)
    row = first_row + i - half * 8
    column = ((split + half) * WARPS + warp) * BK
    return (begin + row * K + column).to(gl.uint32), (row < r) & (column < K)
