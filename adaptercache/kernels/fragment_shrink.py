"""A part of a group's ``x Aᵀ``, by fragments (see `fragments`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from adaptercache.kernels.fragment_layouts import mma_layout, operand_layout, parts_layout
from adaptercache.kernels.fragment_reads import load_steps, pages_of, sixteens, wait

__all__ = ["shrink_part"]


@gluon.jit
def shrink_part(
    x,
    x_stride,
    token,  # [16], of layout `tokens_of_x`
    is_single,
    arena,
    slot_pages,
    num_pages,
    begin,  # of the module's A in the slot's vector
    r,
    first_row,  # of 16
    first_slice,  # of K, BK columns each
    part,  # pointer to 256 float32
    K: gl.constexpr,
    BK: gl.constexpr,
    LOOPS: gl.constexpr,  # slices that a warp does one after the other
    CHAINS: gl.constexpr,  # of products that wait for one another
    WARPS: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """16 tokens, 16 rows of A, LOOPS slices of K of each warp, added up in shared memory.

    The sums lie as the mma has them, token ``8 · hi + g`` and row ``8 · n + 2 · t + e`` at
    ``n, g, t, hi, e``; of a single, those of g = 0 alone.
    """
    PARTS: gl.constexpr = parts_layout(WARPS, WARPS)
    X: gl.constexpr = operand_layout(0, WARPS, 8)  # [warp, token, k]
    A: gl.constexpr = operand_layout(1, WARPS, 8)  # [warp, k, row]
    STEPS: gl.constexpr = BK // 64
    WIDE: gl.constexpr = BK * WARPS
    EVEN: gl.constexpr = K % (WIDE * LOOPS) == 0
    xk = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    ak = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    xw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))
    aw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, A)))
    x_column = ((first_slice + xw) * BK)[:, None, None]
    a_column = ((first_slice + aw) * BK)[:, None]
    # [1, row]
    row = first_row + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, :]
    # [warp, row]; none crosses a cell, since BK divides K and 512
    element = (begin + row * K + a_column).to(gl.uint32)
    there = (row < r) & (a_column < K)  # the last part may have fewer slices
    live = (token >= 0)[None, :, None] & (x_column < K)
    x_at = x + (token.to(gl.int64) * x_stride)[None, :, None] + x_column + xk
    pages = ()
    for loop in gl.static_range(LOOPS):
        its = there if EVEN else there & (a_column + loop * WIDE < K)
        pages += (pages_of(slot_pages, element + loop * WIDE, its, PAGE_ELEMS, ROWS),)
    a_at = _at(arena + ak, sixteens(pages[0], num_pages, element, PAGE_ELEMS, ROWS))
    a = load_steps(a_at, gl.expand_dims(there, 1), STEPS, 64)
    if PDL:
        wait()
    xs = load_steps(x_at, live, STEPS, 64)
    sums = ()
    for _ in gl.static_range(CHAINS):
        sums += (gl.full([WARPS, 16, 16], 0.0, gl.float32, mma_layout(WARPS)),)
    for loop in gl.static_range(LOOPS):
        next_a, next_xs = a, xs
        if loop + 1 < LOOPS:  # asked for before these are multiplied
            at = (loop + 1) * WIDE
            unit = sixteens(pages[loop + 1], num_pages, element + at, PAGE_ELEMS, ROWS)
            its_a = there if EVEN else there & (a_column + at < K)
            its_x = live if EVEN else live & (x_column + at < K)
            next_a = load_steps(_at(arena + ak, unit), gl.expand_dims(its_a, 1), STEPS, 64)
            next_xs = load_steps(x_at + at, its_x, STEPS, 64)
        new = ()
        for chain in gl.static_range(CHAINS):
            h = sums[chain]
            for step in gl.static_range(chain * (STEPS // CHAINS), (chain + 1) * (STEPS // CHAINS)):
                h = mma_v2(xs[step], a[step], h)
            new += (h,)
        sums = new
        a, xs = next_a, next_xs
    h = sums[0]
    for chain in gl.static_range(1, CHAINS):
        h += sums[chain]
    h = h.reshape([WARPS, 2, 8, 2, 4, 2]).permute([0, 3, 2, 4, 1, 5])
    h = gl.sum(gl.convert_layout(h.reshape([WARPS, 256]), PARTS), 0)
    at = gl.arange(0, 256, layout=gl.SliceLayout(0, PARTS))
    gl.store(part + at, h, mask=(at // 16 % 8 == 0) | (at < gl.where(is_single, 0, 256)))


@gluon.jit
def _at(columns, unit):
    """Pointers [warp, k, row] to columns of rows that begin at these units of 16 elements."""
    return columns + gl.expand_dims(gl.multiple_of(unit.to(gl.int64) * 16, (16, 16)), 1)
