"""A run of columns of y of a group, by fragments (see `fragments`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from adaptercache.kernels.fragment_layouts import (
    b_layout,
    mma_layout,
    operand_layout,
    sums_layout,
    y_layout,
)
from adaptercache.kernels.fragment_reads import pages_of, sixteens, wait

__all__ = ["expand_run"]


@gluon.jit
def expand_run(
    y,  # the module's
    y_stride,
    token,  # [16], of layout `tokens_of_y`
    is_single,
    arena,
    slot_pages,
    num_pages,
    begin,  # of the module's B in the slot's vector
    r,  # at most RANK
    scale,
    column,  # the first
    width,
    blocks,  # how many, of 64 · WARPS columns each, which divide 512 and width
    parts,  # pointer to float32 [RANK / 16, SPLITS, 256], as `shrink_part` stores them
    SPLITS: gl.constexpr,
    RANK: gl.constexpr,
    STRIPS: gl.constexpr,  # blocks at once
    TOGETHER: gl.constexpr,  # blocks that begin at a multiple of as many: no cell ends in between
    WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,  # parts of K that are read at once
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """``y += scaling · (sum of the parts) · Bᵀ`` for 16 tokens and blocks of columns side by side.

    A block's B and y are asked for as soon as registers of another are free. The last blocks are
    code of their own, since they are often the only ones, and done sooner where nothing follows.
    """
    B: gl.constexpr = b_layout(WARPS)
    Y: gl.constexpr = y_layout(WARPS)
    CHUNKS: gl.constexpr = RANK // 16
    BLOCK: gl.constexpr = 64 * WARPS
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :]
    b_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    b_two = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    y_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, Y)))[:, None, None]
    y_two = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, Y)))[None, None, :]
    columns = _by_twos(arena) + (b_warp * 32 + b_two)
    begin += column
    b = ()
    for strip in gl.static_range(STRIPS):
        for chunk in gl.static_range(CHUNKS):
            first_rows = (chunk * 16 + row < r) & (strip < blocks)
            if strip % TOGETHER == 0:
                first_at = columns + _rows_at(
                    slot_pages, num_pages, begin + strip * BLOCK, chunk * 16 + row, first_rows,
                    width, PAGE_ELEMS, ROWS,
                )  # fmt: skip
            mask = gl.expand_dims(first_rows, 2)
            b += (gl.load(first_at + strip % TOGETHER * (BLOCK // 2), mask=mask, other=0),)
    live = (token >= 0)[None, :, None] & (y_warp >= 0)
    y_at = _by_twos(y + gl.multiple_of(token.to(gl.int64) * y_stride + column, 16))
    y_at = y_at[None, :, None] + (y_warp * 32 + y_two)
    if PDL:
        wait()
    old = ()
    for strip in gl.static_range(STRIPS):
        old += (gl.load(y_at + strip * (BLOCK // 2), mask=live & (strip < blocks), other=0),)
    h = _left(parts, is_single, r, SPLITS, AT_ONCE, RANK, WARPS)
    h = _chunks((h * scale).to(y.dtype.element_ty), CHUNKS, WARPS)
    while blocks > STRIPS:
        begin += STRIPS * BLOCK
        next_b = ()
        next_old = ()
        for strip in gl.static_range(STRIPS):
            there = strip + STRIPS < blocks
            new = gl.full([WARPS, 16, 64], 0.0, gl.float32, mma_layout(WARPS))
            for chunk in gl.static_range(CHUNKS):
                right = _right(b[strip * CHUNKS + chunk], h[chunk].dtype, WARPS)
                new = mma_v2(h[chunk], right, new)
                its_rows = (chunk * 16 + row < r) & there
                if strip % TOGETHER == 0:
                    at = columns + _rows_at(
                        slot_pages, num_pages, begin + strip * BLOCK, chunk * 16 + row, its_rows,
                        width, PAGE_ELEMS, ROWS,
                    )  # fmt: skip
                b_at = at + strip % TOGETHER * (BLOCK // 2)
                next_b += (gl.load(b_at, mask=gl.expand_dims(its_rows, 2), other=0),)
            of_y = y_at + strip * (BLOCK // 2)
            gl.store(of_y, _add(old[strip], new, WARPS), mask=live)
            next_old += (gl.load(of_y + STRIPS * (BLOCK // 2), mask=live & there, other=0),)
        b, old = next_b, next_old
        y_at += STRIPS * (BLOCK // 2)
        blocks -= STRIPS
    for strip in gl.static_range(STRIPS):
        if strip < blocks:
            new = gl.full([WARPS, 16, 64], 0.0, gl.float32, mma_layout(WARPS))
            for chunk in gl.static_range(CHUNKS):
                right = _right(b[strip * CHUNKS + chunk], h[chunk].dtype, WARPS)
                new = mma_v2(h[chunk], right, new)
            gl.store(y_at + strip * (BLOCK // 2), _add(old[strip], new, WARPS), mask=live)


@gluon.jit
def _by_twos(pointers):
    """Numbers of 32 bits, since of tensors that a loop carries each number takes a register."""
    return pointers.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _rows_at(
    slot_pages, num_pages, begin, row, there, width, PAGE_ELEMS: gl.constexpr, ROWS: gl.constexpr
):
    """[1, row, 1]: where a block's columns of these rows of Bᵀ begin in the arena, by twos. None
    crosses a cell."""
    element = (begin + row * width).to(gl.uint32)
    page = pages_of(slot_pages, element, there, PAGE_ELEMS, ROWS)
    at = sixteens(page, num_pages, element, PAGE_ELEMS, ROWS).to(gl.int64) * 8
    return gl.expand_dims(gl.multiple_of(at, (8, 8)), 2)


@gluon.jit
def _left(
    parts, is_single, r, SPLITS: gl.constexpr, AT_ONCE: gl.constexpr, RANK: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The sum of the parts [token, row], always in the same order; 0 of rows that there are not,
    whatever x is. What other programs have stored is read past the L1."""
    SUMS: gl.constexpr = sums_layout(RANK, WARPS)
    i = gl.arange(0, 16 * RANK, layout=SUMS)  # chunk, and n, g, t, hi, e
    at = parts + i // 256 * (SPLITS * 256) + i % 256
    its = (i // 16 % 8 == 0) | (i < gl.where(is_single, 0, 16 * RANK))
    its = gl.max_constancy(its & (i // 256 * 16 < r), [16])
    sums = gl.full([16 * RANK], 0.0, gl.float32, SUMS)
    for first in gl.static_range(0, SPLITS, AT_ONCE):
        some = ()
        for s in gl.static_range(first, min(first + AT_ONCE, SPLITS)):
            some += (gl.load(at + s * 256, mask=its, other=0.0, cache_modifier=".cg"),)
        for s in gl.static_range(min(AT_ONCE, SPLITS - first)):
            sums += some[s]
    row = i // 256 * 16 + i // 128 % 2 * 8 + i // 4 % 4 * 2 + i % 2
    sums = (
        gl.where(row < r, sums, 0.0)
        .reshape([RANK // 16, 2, 8, 4, 2, 2])
        .permute([4, 2, 0, 1, 3, 5])
    )
    return sums.reshape([16, RANK])


@gluon.jit
def _chunks(h, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """Left operands [warp, token, 16 rows] of every warp, for each 16 rows."""
    LEFT: gl.constexpr = operand_layout(0, WARPS, 2)
    h = gl.expand_dims(gl.convert_layout(h, gl.SliceLayout(0, LEFT)), 0)
    return _split(h.broadcast_to([WARPS, 16, CHUNKS * 16]), CHUNKS, WARPS)


@gluon.jit
def _split(h, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    if CHUNKS == 1:
        return (gl.convert_layout(h, operand_layout(0, WARPS, 2)),)
    else:
        low, high = gl.split(h.reshape([WARPS, 16, 2, CHUNKS * 8]).permute([0, 1, 3, 2]))
        return _split(low, CHUNKS // 2, WARPS) + _split(high, CHUNKS // 2, WARPS)


@gluon.jit
def _right(b, TYPE: gl.constexpr, WARPS: gl.constexpr):
    """The right operand [warp, 16 rows, 64 columns]. Column ``32 · g0 + 8 · g21 + j`` is the mma's
    ``8 · j + 2 · g21 + g0``."""
    tile = gl.join(b.to(gl.int16), (b >> 16).to(gl.int16)).to(TYPE, bitcast=True)
    tile = tile.reshape([WARPS, 16, 2, 4, 8]).permute([0, 1, 4, 3, 2])
    return gl.convert_layout(tile.reshape([WARPS, 16, 64]), operand_layout(1, WARPS, 2))


@gluon.jit
def _add(old, new, WARPS: gl.constexpr):
    """Products and bfloat16 y, by twos; rounded once."""
    Y: gl.constexpr = y_layout(WARPS)
    new = new.reshape([WARPS, 16, 8, 4, 2]).permute([0, 1, 4, 3, 2])
    even, odd = gl.split(new.reshape([WARPS, 16, 32, 2]))
    even = gl.convert_layout(even, Y) + (old << 16).to(gl.float32, bitcast=True)
    odd = gl.convert_layout(odd, Y) + (old & -65536).to(gl.float32, bitcast=True)
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [odd, even],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
