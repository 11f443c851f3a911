"""Tokens that are alone with their adapter: matrix-vector products, read straight into registers.

Where a unit of work finds its weights takes three look-ups, each of them after the other: the
token's slot, then the slot's row of the tables, then the page. The first two are made while the
units before are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adaptercache.kernels.groups import block_of
from adaptercache.kernels.jit import pick, share_of
from adaptercache.kernels.paging import load_tile

__all__ = ["counts", "expand_singles", "shrink_singles"]


@triton.jit
def counts(work, ALL_SINGLES: tl.constexpr, FROM_L2: tl.constexpr):
    """How many groups; how many singles of ranks over 32, over 16, and the others; and where the
    second and the third kind begin among the tokens. With ALL_SINGLES, or where the sum of the
    tokens' ranks is at most FROM_L2, no token is of a group."""
    groups = tl.load(work)  # all are read at once
    over32, over16, up_to16 = tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    all32, all16, all_others = tl.load(work + 4), tl.load(work + 5), tl.load(work + 6)
    if ALL_SINGLES:
        groups = 0
        over32, over16, up_to16 = all32, all16, all_others
    else:
        alone = tl.load(work + 7) <= FROM_L2
        groups = tl.where(alone, 0, groups)
        over32 = tl.where(alone, all32, over32)
        over16 = tl.where(alone, all16, over16)
        up_to16 = tl.where(alone, all_others, up_to16)
    return groups, over32, over16, up_to16, all32, all32 + all16


@triton.jit
def _single(singles, tokens, i, there):
    """Its slot and its token."""
    return (
        tl.load(singles + i, mask=there, other=0),
        tl.load(singles + tokens + i, mask=there, other=0),
    )


@triton.jit
def _site(rank, start, scaling, at, there):
    """Its rank, and where its A begins, in units of 512 elements, and its scaling."""
    return (
        tl.load(rank + at, mask=there, other=0),
        tl.load(start + at, mask=there, other=0),
        tl.load(scaling + at, mask=there, other=0.0),
    )


@triton.jit
def _unit(
    unit,
    over32,
    over16,
    from16,
    from_others,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
):
    """Of the shrink's: which single, which module, the first of its 16 rows of A, which part of K.

    A single has as many units as its rank asks for: those of ranks over 32 stand first.
    """
    if RANK == 16:
        left = unit
        chunks = 1
        single = from_others
    else:
        of_32 = over32 * (SPLITS * M * (RANK // 16))
        of_16 = of_32 + over16 * (SPLITS * M * 2)
        chunks = tl.where(unit < of_32, RANK // 16, tl.where(unit < of_16, 2, 1))
        single = tl.where(unit < of_32, 0, tl.where(unit < of_16, from16, from_others))
        left = unit - tl.where(unit < of_32, 0, tl.where(unit < of_16, of_32, of_16))
    split = left % SPLITS
    left = left // SPLITS
    row = left % chunks * 16
    left = left // chunks
    return single + left // M, left % M, row, split


@triton.jit
def shrink_singles(
    x,
    x_stride,
    arena,
    pages,
    start,
    rank,
    table_stride,
    num_pages,
    site0,
    site1,
    site2,
    singles,  # their slots, then their tokens
    over32,  # how many of each, and from where on
    over16,
    up_to16,
    from16,
    from_others,
    busy,  # programs that have one unit more so far
    partials,
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    ROOM: tl.constexpr,
    BK: tl.constexpr,
    VECTOR: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's share: units of 16 rows of A and BK columns."""
    SPLITS: tl.constexpr = (K + BK - 1) // BK
    programs = tl.num_programs(0)
    first = (tl.program_id(0) + programs - busy) % programs
    end = (over32 * (RANK // 16) + tl.minimum(RANK // 16, 2) * over16 + up_to16) * (SPLITS * M)
    single, m, row, split = _unit(first, over32, over16, from16, from_others, SPLITS, M, RANK)
    slot, token = _single(singles, tokens, single, first < end)
    at = slot * table_stride + pick(m, site0, site1, site2, M)
    r = tl.load(rank + at, mask=first < end, other=0)
    begin = tl.load(start + at, mask=first < end, other=0)
    later = first + programs
    single, m, row, split = _unit(later, over32, over16, from16, from_others, SPLITS, M, RANK)
    next_slot, next_token = _single(singles, tokens, single, later < end)
    for unit in range(first, end, programs):
        later = unit + programs
        single, m, row, split = _unit(later, over32, over16, from16, from_others, SPLITS, M, RANK)
        at = next_slot * table_stride + pick(m, site0, site1, site2, M)
        next_r = tl.load(rank + at, mask=later < end, other=0)
        next_begin = tl.load(start + at, mask=later < end, other=0)
        later += programs
        single, m, row, split = _unit(later, over32, over16, from16, from_others, SPLITS, M, RANK)
        last_slot, last_token = _single(singles, tokens, single, later < end)
        single, m, row, split = _unit(unit, over32, over16, from16, from_others, SPLITS, M, RANK)
        rows = row + tl.arange(0, 16)
        if row < r:
            # [16, BK]
            a = load_tile(
                arena, pages + slot * table_stride, num_pages, begin * 512, rows, rows < r,
                split * BK, K, BK, PAGE_ELEMS, ROWS, ALIGNED, VECTOR,
            )  # fmt: skip
            if PDL:
                tl.extra.cuda.gdc_wait()
            # [BK]
            k = split * BK + tl.arange(0, BK)
            xs = tl.load(x + token.to(tl.int64) * x_stride + k, mask=k < K, other=0.0)
            h = tl.sum(a.to(tl.float32) * xs.to(tl.float32)[None, :], 1)
            to = ((m * tokens + token) * ROOM + split).to(tl.int64) * RANK
            tl.store(partials + to + rows, h)
        slot, token, r, begin = next_slot, next_token, next_r, next_begin
        next_slot, next_token = last_slot, last_token


@triton.jit
def expand_singles(
    y0,
    y1,
    y2,
    y_stride0,
    y_stride1,
    y_stride2,
    arena,
    pages,
    start,
    rank,
    scaling,
    table_stride,
    num_pages,
    site0,
    site1,
    site2,
    singles,
    first_single,
    count,
    busy,  # programs that have begun so far, modulo all
    partials,
    tokens,
    K: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    ROOM: tl.constexpr,
    RANK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # rows of Bᵀ; ranks are no larger, or AT_ONCE is 64
    BN: tl.constexpr,
    VECTOR: tl.constexpr,
    IN_RUNS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's share of ``count`` singles. Returns how many programs it kept busy."""
    COLUMNS: tl.constexpr = min(BN, 8192 // AT_ONCE)
    # Of 32 rows a thread holds all, so that nothing is exchanged to add them up.
    EACH: tl.constexpr = VECTOR // 2 if AT_ONCE == 32 else VECTOR
    B0: tl.constexpr = (N0 + COLUMNS - 1) // COLUMNS
    B1: tl.constexpr = (N1 + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = B0 + B1 + (N2 + COLUMNS - 1) // COLUMNS
    programs = tl.num_programs(0)
    program = (tl.program_id(0) + programs - busy % programs) % programs
    first, end, step = share_of(count * BLOCKS, program, programs, IN_RUNS)
    slot, token = _single(singles, tokens, first_single + first // BLOCKS, first < end)
    m, column = block_of(first % BLOCKS, B0, B1, COLUMNS, M)
    at = slot * table_stride + pick(m, site0, site1, site2, M)
    r, begin, scale = _site(rank, start, scaling, at, first < end)
    later = first + step
    next_slot, next_token = _single(singles, tokens, first_single + later // BLOCKS, later < end)
    for block in range(first, end, step):
        later = block + step
        m, column = block_of(later % BLOCKS, B0, B1, COLUMNS, M)
        at = next_slot * table_stride + pick(m, site0, site1, site2, M)
        next_r, next_begin, next_scale = _site(rank, start, scaling, at, later < end)
        later += step
        last_slot, last_token = _single(
            singles, tokens, first_single + later // BLOCKS, later < end
        )
        m, column = block_of(block % BLOCKS, B0, B1, COLUMNS, M)
        if r > 0:
            _expand_single(
                pick(m, y0, y1, y2, M)
                + token.to(tl.int64) * pick(m, y_stride0, y_stride1, y_stride2, M),
                arena, pages + slot * table_stride, num_pages,
                begin * 512 + (r * K + 511) // 512 * 512, r, scale, column, pick(m, N0, N1, N2, M),
                partials + (m * tokens + token).to(tl.int64) * (ROOM * RANK), SPLITS, SPLITS_POW2,
                RANK, AT_ONCE, COLUMNS, EACH, PAGE_ELEMS, ROWS, ALIGNED, PDL,
            )  # fmt: skip
        slot, token, r, begin, scale = next_slot, next_token, next_r, next_begin, next_scale
        next_slot, next_token = last_slot, last_token
    return count * BLOCKS % programs


@triton.jit
def _expand_single(
    y,  # the token's row
    arena,
    slot_pages,
    num_pages,
    begin,
    r,
    scale,
    column,
    width,
    partials,  # the token's: float32 [SPLITS, RANK]
    SPLITS: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    RANK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of columns of one token: a matrix-vector product in float32."""
    # [COLUMNS]
    n = column + tl.arange(0, COLUMNS)
    # [SPLITS_POW2, 1]
    s = tl.arange(0, SPLITS_POW2)[:, None]
    # [AT_ONCE]
    i = tl.arange(0, AT_ONCE)
    h_at = partials + s * RANK + i[None, :]
    # [AT_ONCE, COLUMNS]
    b = load_tile(
        arena, slot_pages, num_pages, begin, i, i < r, column, width, COLUMNS,
        PAGE_ELEMS, ROWS, ALIGNED, VECTOR,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    old = tl.load(y + n, mask=n < width, other=0.0)
    h = tl.sum(tl.load(h_at, mask=(s < SPLITS) & (i < r)[None, :], other=0.0), 0)
    term = tl.sum(b.to(tl.float32) * (h * scale)[:, None], 0)
    if AT_ONCE == 64 and RANK > 64:
        for i0 in range(AT_ONCE, r, AT_ONCE):
            rows = i0 + i
            b = load_tile(
                arena, slot_pages, num_pages, begin, rows, rows < r, column, width, COLUMNS,
                PAGE_ELEMS, ROWS, ALIGNED, VECTOR,
            )  # fmt: skip
            h_mask = (s < SPLITS) & (rows < r)[None, :]
            h = tl.sum(tl.load(h_at + i0, mask=h_mask, other=0.0), 0)
            term += tl.sum(b.to(tl.float32) * (h * scale)[:, None], 0)
    new = old.to(tl.float32) + term
    tl.store(y + n, new.to(y.dtype.element_ty), mask=n < width)
