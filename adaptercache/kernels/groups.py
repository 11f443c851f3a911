"""What BGMV and SGMV share: tokens that share an adapter, on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from adaptercache.kernels.dots import dot_into, dot_rounded
from adaptercache.kernels.jit import pick
from adaptercache.kernels.paging import load_part, part_pages

__all__ = ["block_of", "expand_group", "is_last", "shrink_group", "sum_parts"]


@triton.jit
def is_last(counter, PARTS: tl.constexpr):
    """Whether this program is the last of PARTS to come here, after all that they stored.

    The last one finds all of it in the L2, and must not look for it in its own L1. The counter is
    0 before and after, so that a graph may be replayed.
    """
    tl.debug_barrier()  # all threads' stores are before the one thread's count
    last = tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def sum_parts(
    at,  # [R, C], pointers to the first part, where the sum goes
    mask,  # [R, C]
    step,  # from a part to the next
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # as many as fit the registers
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Add parts up, always in the same order, so that equal inputs give equal bits."""
    sums = tl.zeros([R, C], tl.float32)
    for first in range(0, PARTS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = mask & (first + i < PARTS)
            sums += tl.load(at + (first + i) * step, mask=there, other=0.0, cache_modifier=".cg")
    tl.store(at, sums, mask=mask)


@triton.jit
def block_of(block, B0: tl.constexpr, B1: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr):
    """Which module a block of columns is of, and its first column there."""
    m = 0
    if M > 1:
        m += tl.where(block >= B0, 1, 0)
    if M > 2:
        m += tl.where(block >= B0 + B1, 1, 0)
    return m, (block - pick(m, 0, B0, B0 + B1, M)) * WIDTH


@triton.jit
def shrink_group(
    x,
    x_stride,
    arena,
    slot_pages,
    num_pages,
    begin,
    rows,  # [16], of A
    r,
    split,
    its_tokens,
    partials,  # the module's
    counter,
    K: tl.constexpr,
    ROOM: tl.constexpr,
    RANK: tl.constexpr,
    GROUP_BK: tl.constexpr,
    DOT_BK: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """16 rows of A and GROUP_BK columns, for the tokens of a group; the last program there adds all
    parts of K up."""
    token = tl.load(its_tokens + tl.arange(0, 16))
    live = token >= 0
    first, page, next_page = part_pages(
        slot_pages, begin, rows, rows < r, split * GROUP_BK, K, GROUP_BK, PAGE_ELEMS, ROWS
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    # [16, 16]
    h = tl.zeros([16, 16], tl.float32)
    for step in tl.range(0, GROUP_BK, DOT_BK, num_stages=STAGES):
        # [16, DOT_BK]
        a = load_part(
            arena, slot_pages, num_pages, begin, rows, rows < r, split * GROUP_BK, K, first, page,
            next_page, step, GROUP_BK, DOT_BK, PAGE_ELEMS, ROWS, ALIGNED,
        )  # fmt: skip
        k = split * GROUP_BK + step + tl.arange(0, DOT_BK)
        # [16, DOT_BK]
        xs = tl.load(
            x + token.to(tl.int64)[:, None] * x_stride + k[None, :],
            mask=live[:, None] & (k < K)[None, :],
            other=0.0,
        )
        h = dot_into(h, xs, tl.trans(a), DOT_IN_FLOAT32)
    PARTS: tl.constexpr = (K + GROUP_BK - 1) // GROUP_BK
    to = partials + (token * ROOM).to(tl.int64)[:, None] * RANK + rows[None, :]
    tl.store(to + split * RANK, h, mask=live[:, None])
    if PARTS > 1 and is_last(counter, PARTS):
        sum_parts(to, live[:, None] & (rows >= 0)[None, :], RANK, PARTS, min(PARTS, 16), 16, 16)


@triton.jit
def expand_group(
    y,
    y_stride,
    arena,
    slot_pages,
    num_pages,
    begin,  # of the module's B in the slot's vector
    r,
    scale,
    column,  # the first
    blocks,  # how many, of BN columns each; at most a page's length
    width,
    its_tokens,  # int32 [TILE], −1 after the last
    sums,  # float32, RANK of them a row of the module's
    row_step,  # from a row's to the next
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BN: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Semantics: ``y[t, n] += scale · Σ_i sums[t, i] · Bᵀ[i, n]``, rounded once, for the tokens t
    of a group, over a run of blocks of columns n."""
    # [TILE], [RANK]
    token = tl.load(its_tokens + tl.arange(0, TILE))
    live = token >= 0
    i = tl.arange(0, RANK)
    first, page, next_page = part_pages(
        slot_pages, begin, i, i < r, column, width, PAGE_ELEMS, PAGE_ELEMS, ROWS
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    # [TILE, RANK]
    h_at = sums + (token * row_step).to(tl.int64)[:, None] + i[None, :]
    h = tl.load(h_at, mask=live[:, None] & (i < r)[None, :], other=0.0) * scale
    for block in tl.range(0, blocks, num_stages=STAGES):
        # [RANK, BN]
        b = load_part(
            arena, slot_pages, num_pages, begin, i, i < r, column, width, first, page, next_page,
            block * BN, PAGE_ELEMS, BN, PAGE_ELEMS, ROWS, ALIGNED,
        )  # fmt: skip
        n = column + block * BN + tl.arange(0, BN)
        to = y + token.to(tl.int64)[:, None] * y_stride + n[None, :]
        mask = live[:, None] & (n < width)[None, :]
        # [TILE, BN]
        old = tl.load(to, mask=mask, other=0.0)
        new = old.to(tl.float32) + dot_rounded(h, b, DOT_IN_FLOAT32)
        tl.store(to, new.to(y.dtype.element_ty), mask=mask)
