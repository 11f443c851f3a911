"""A unit of work of a group, by fragments: a part of ``x Aᵀ``, and a run of columns of y."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from adaptercache.kernels.fragment_layouts import (
    b_layout,
    by_twos,
    load_steps,
    mma_layout,
    operand_layout,
    pages_of,
    parts_layout,
    pointers_to,
    sums_layout,
    two,
    wait,
    y_layout,
)

__all__ = ["expand_run", "shrink_unit"]


@gluon.jit
def shrink_unit(
    x,
    x_stride,
    token,  # [16], as `tokens_of_operand`
    arena,
    slot_pages,
    num_pages,
    begin,  # of the module's A in the slot's vector
    r,
    first_row,  # of 16 · CHUNKS
    first_slice,  # of K, BK columns each
    part,  # pointer to 256 float32, of the first chunk
    apart,  # from a chunk's to the next
    alone,  # one token
    K: gl.constexpr,
    BK: gl.constexpr,
    LOOPS: gl.constexpr,  # slices that a warp does one after the other
    CHAINS: gl.constexpr,  # of products that wait for one another
    CHUNKS: gl.constexpr,  # of 16 rows of A, by other warps each, which find x in the L1
    WARPS: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A part of ``x Aᵀ``: 16 tokens, 16 rows of A for each chunk, LOOPS slices of K of each warp.

    Dimensions are the warp, then those of its product. Warps add their sums up in shared memory.
    """
    SLICES: gl.constexpr = WARPS // CHUNKS
    PARTS: gl.constexpr = parts_layout(SLICES, CHUNKS, WARPS)
    X: gl.constexpr = operand_layout(0, WARPS, 8)  # [warp, token, k]
    A: gl.constexpr = operand_layout(1, WARPS, 8)  # [warp, k, row]
    STEPS: gl.constexpr = BK // 64
    WIDE: gl.constexpr = BK * SLICES
    EVEN: gl.constexpr = K % (WIDE * LOOPS) == 0
    xk = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    ak = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    xw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))
    aw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, A)))
    x_column = ((first_slice + xw % SLICES) * BK)[:, None, None]
    a_column = ((first_slice + aw % SLICES) * BK)[:, None]
    # [warp, row]; none crosses a cell, since BK divides K and 512
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, :]
    row += (first_row + aw // SLICES * 16)[:, None]
    element = (begin + row * K + a_column).to(gl.uint32)
    there = (row < r) & (a_column < K)  # the last part may have fewer slices
    live = (token >= 0)[None, :, None] & (x_column < K)
    x_at = x + (token.to(gl.int64) * x_stride)[None, :, None] + x_column + xk
    pages = ()
    for loop in gl.static_range(LOOPS):
        its = there if EVEN else there & (a_column + loop * WIDE < K)
        pages = pages + (pages_of(slot_pages, element + loop * WIDE, its, PAGE_ELEMS, ROWS),)
    a_at = pointers_to(arena, pages[0], num_pages, element, (16, 16), PAGE_ELEMS, ROWS)
    a = load_steps(gl.expand_dims(a_at, 1) + ak, gl.expand_dims(there, 1), STEPS, 64)
    if PDL:
        wait()
    xs = load_steps(x_at, live, STEPS, 64)
    sums = ()
    for chain in gl.static_range(CHAINS):
        sums = sums + (gl.full([WARPS, 16, 16], 0.0, gl.float32, mma_layout(WARPS)),)
    for loop in gl.static_range(LOOPS):
        next_a, next_xs = a, xs
        if loop + 1 < LOOPS:  # asked for before these are multiplied
            at = (loop + 1) * WIDE
            a_at = pointers_to(
                arena, pages[loop + 1], num_pages, element + at, (16, 16), PAGE_ELEMS, ROWS
            )
            its_a = there if EVEN else there & (a_column + at < K)
            its_x = live if EVEN else live & (x_column + at < K)
            next_a = load_steps(gl.expand_dims(a_at, 1) + ak, gl.expand_dims(its_a, 1), STEPS, 64)
            next_xs = load_steps(x_at + at, its_x, STEPS, 64)
        new = ()
        for chain in gl.static_range(CHAINS):
            h = sums[chain]
            for step in gl.static_range(chain * (STEPS // CHAINS), (chain + 1) * (STEPS // CHAINS)):
                h = mma_v2(xs[step], a[step], h)
            new = new + (h,)
        sums = new
        a, xs = next_a, next_xs
    h = sums[0]
    for chain in gl.static_range(1, CHAINS):
        h += sums[chain]
    # token = 8 · hi + g, row = 8 · n + 2 · t + e → slice, and chunk, n, g, t, hi, e
    h = h.reshape([CHUNKS, SLICES, 2, 8, 2, 4, 2]).permute([1, 0, 4, 3, 5, 2, 6])
    h = gl.sum(gl.convert_layout(h.reshape([SLICES, CHUNKS * 256]), PARTS), 0)
    of_part = gl.arange(0, CHUNKS * 256, layout=gl.SliceLayout(0, PARTS))
    live_parts = (of_part // 16 % 8 == 0) | (of_part < gl.where(alone, 0, CHUNKS * 256))
    gl.store(part + of_part // 256 * apart + of_part % 256, h, mask=live_parts)


@gluon.jit
def expand_run(
    y,  # the module's
    y_stride,
    token,  # [16], as `tokens_of_y`
    arena,
    slot_pages,
    num_pages,
    begin,  # of the module's B in the slot's vector
    r,  # at most RANK
    scale,
    column,  # the first
    width,
    blocks,  # how many, of BN · WARPS columns each
    parts,  # pointer to float32 [RANK / 16, SPLITS, 256]
    alone,  # one token
    SPLITS: gl.constexpr,
    RANK: gl.constexpr,
    BN: gl.constexpr,  # columns a warp: 64 and more; BN · WARPS divides all widths and 512
    WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,  # parts of K that are read at once
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """``y += scaling · (sum of the parts) · Bᵀ`` for 16 tokens and a run of blocks of columns.

    Of a block the pages are asked for two blocks ahead, and B and y where those before are done with.
    """
    SUMS: gl.constexpr = sums_layout(RANK, WARPS)
    B_READ: gl.constexpr = b_layout(RANK, WARPS)
    Y: gl.constexpr = y_layout(WARPS)
    H: gl.constexpr = operand_layout(0, WARPS, 2)  # [warp, token, row]
    STRIPS: gl.constexpr = BN // 64
    WIDE: gl.constexpr = BN * WARPS
    row = gl.arange(0, RANK, layout=gl.SliceLayout(0, gl.SliceLayout(2, B_READ)))[None, :]
    bw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, B_READ)))[:, None, None]
    bn = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, B_READ)))[None, None, :]
    yw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, Y)))[:, None, None]
    yn = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, Y)))[None, None, :]
    element = (begin + row * width + column).to(gl.uint32)  # [1, row]
    there = row < r
    b_column = bw * (BN // 2) + bn
    page = pages_of(slot_pages, element, there, PAGE_ELEMS, ROWS)
    b_at = by_twos(pointers_to(arena, page, num_pages, element, (16, 16), PAGE_ELEMS, ROWS))
    b = load_steps(gl.expand_dims(b_at, 2) + b_column, gl.expand_dims(there, 2), STRIPS, 32)
    page = pages_of(slot_pages, element + WIDE, there & (blocks > 1), PAGE_ELEMS, ROWS)
    live = (token >= 0)[None, :, None] & (yw >= 0)
    y_at = by_twos(y + gl.multiple_of(token.to(gl.int64) * y_stride + column, 16))
    y_at = y_at[None, :, None] + (yw * (BN // 2) + yn)
    if PDL:
        wait()
    old = load_steps(y_at, live, STRIPS, 32)
    # chunk, and n, g, t, hi, e → token, row
    of_part = gl.arange(0, 16 * RANK, layout=SUMS)
    part_at = parts + of_part // 256 * (SPLITS * 256) + of_part % 256
    its = of_part // 256 * 16 < r
    its = its & ((of_part // 16 % 8 == 0) | (of_part < gl.where(alone, 0, 16 * RANK)))
    its = gl.max_constancy(its, [16])
    sums = gl.full([16 * RANK], 0.0, gl.float32, SUMS)
    for first in gl.static_range(0, SPLITS, AT_ONCE):
        some = ()
        for s in gl.static_range(first, min(first + AT_ONCE, SPLITS)):
            one = gl.load(part_at + s * 256, mask=its, other=0.0, cache_modifier=".cg")
            some = some + (one,)
        for s in gl.static_range(min(AT_ONCE, SPLITS - first)):
            sums += some[s]
    h = (sums * scale).to(y.dtype.element_ty)
    h = h.reshape([RANK // 16, 2, 8, 4, 2, 2]).permute([4, 2, 0, 1, 3, 5]).reshape([16, RANK])
    h = gl.expand_dims(gl.convert_layout(h, gl.SliceLayout(0, H)), 0)
    h = h.broadcast_to([WARPS, 16, RANK])
    while blocks > 1:
        element += WIDE
        next_at = by_twos(pointers_to(arena, page, num_pages, element, (16, 16), PAGE_ELEMS, ROWS))
        next_b_at = gl.expand_dims(next_at, 2) + b_column
        page = pages_of(slot_pages, element + WIDE, there & (blocks > 2), PAGE_ELEMS, ROWS)
        next_b = ()
        next_old = ()
        for strip in gl.static_range(STRIPS):
            new = mma_v2(h, _of_strip(b[strip], RANK, WARPS, y.dtype.element_ty), gl.full([WARPS, 16, 64], 0.0, gl.float32, mma_layout(WARPS)))
            next_b += (gl.load(next_b_at + strip * 32, mask=gl.expand_dims(there, 2), other=0),)
            gl.store(y_at + strip * 32, _sum(old[strip], new, WARPS), mask=live)
            next_old += (gl.load(y_at + (WIDE // 2 + strip * 32), mask=live, other=0),)
        b, old = next_b, next_old
        y_at += WIDE // 2
        blocks -= 1
    for strip in gl.static_range(STRIPS):
        new = mma_v2(h, _of_strip(b[strip], RANK, WARPS, y.dtype.element_ty), gl.full([WARPS, 16, 64], 0.0, gl.float32, mma_layout(WARPS)))
        gl.store(y_at + strip * 32, _sum(old[strip], new, WARPS), mask=live)


@gluon.jit
def _of_strip(b, RANK: gl.constexpr, WARPS: gl.constexpr, TYPE: gl.constexpr):
    """The mma's operand. Column 32 · g0 + 8 · g21 + j of Bᵀ is its 8 · j + 2 · g21 + g0."""
    tile = gl.join(b.to(gl.int16), (b >> 16).to(gl.int16)).to(TYPE, bitcast=True)
    tile = tile.reshape([WARPS, RANK, 2, 4, 8]).permute([0, 1, 4, 3, 2])
    return gl.convert_layout(tile.reshape([WARPS, RANK, 64]), operand_layout(1, WARPS, 2))


@gluon.jit
def _sum(old, new, WARPS: gl.constexpr):
    Y: gl.constexpr = y_layout(WARPS)
    new = new.reshape([WARPS, 16, 8, 4, 2]).permute([0, 1, 4, 3, 2])
    even, odd = gl.split(new.reshape([WARPS, 16, 32, 2]))
    even = gl.convert_layout(even, Y) + (old << 16).to(gl.float32, bitcast=True)
    odd = gl.convert_layout(odd, Y) + (old & -65536).to(gl.float32, bitcast=True)
    return two(even, odd)
