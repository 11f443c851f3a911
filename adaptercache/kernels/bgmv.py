"""BGMV: few tokens, each with an adapter of its own (decode).

Work is a list of tiles: up to 16 tokens of one slot. A tile of one token is a matrix-vector product
read straight into registers; a tile of several uses the tensor cores, so that tokens that share an
adapter read its weights once. The grid is fixed, and programs stride over the work that the batch
brings, so one CUDA graph serves every popularity; empty work costs nothing.

After Punica's BGMV (Chen et al., MLSys 2024), over S-LoRA's paged memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adaptercache.kernels.paging import dot_exact, load_tile, pick
from adaptercache.kernels.segments import SMALL_TILE

__all__ = ["TILE", "bgmv_expand", "bgmv_shrink"]

TILE = SMALL_TILE
"""Tokens a tile at most: the least that the tensor cores take."""


@triton.jit
def bgmv_shrink(
    x,  # [tokens, K], rows strided
    x_stride,
    arena,
    pages,  # int32 [slots, …], rows strided by table_stride, as start and rank
    start,
    rank,
    table_stride,
    num_pages,
    site0,  # the modules' indices in the tables
    site1,
    site2,
    work,  # int32 [1 + 3 * capacity + tokens]: see LoraBatch
    capacity,
    partials,  # float32 [M, tokens, K / BK, RANK]
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    BK: tl.constexpr,
    DOT_BK: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Semantics: ``partials[m, t, s, i] = Σ_k x[t, k] · A_m[i, k]`` over the s-th BK columns, for
    the 16 rows i that a program does, with A of token t's slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SPLITS: tl.constexpr = (K + BK - 1) // BK
    CHUNKS: tl.constexpr = RANK // 16
    UNITS: tl.constexpr = SPLITS * M * CHUNKS
    for unit in range(tl.program_id(0), tl.load(work) * UNITS, tl.num_programs(0)):
        split = unit % SPLITS
        chunk = unit // SPLITS % CHUNKS
        m = unit // (SPLITS * CHUNKS) % M
        tile = unit // UNITS
        slot = tl.load(work + 1 + tile)
        first = tl.load(work + 1 + capacity + tile)
        count = tl.load(work + 1 + 2 * capacity + tile)
        order = work + 1 + 3 * capacity + first
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        begin = tl.load(start + at) * 512
        slot_pages = pages + slot * table_stride
        # [16]
        rows = chunk * 16 + tl.arange(0, 16)
        if chunk * 16 < r:
            if count == 1:
                token = tl.load(order)
                # [16, BK]
                a = load_tile(
                    arena, slot_pages, num_pages, begin, rows, rows < r, split * BK, K, BK,
                    PAGE_ELEMS, ROWS, ALIGNED,
                )  # fmt: skip
                if PDL:
                    tl.extra.cuda.gdc_wait()
                # [BK]
                k = split * BK + tl.arange(0, BK)
                xs = tl.load(x + token.to(tl.int64) * x_stride + k, mask=k < K, other=0.0)
                h = tl.sum(a.to(tl.float32) * xs.to(tl.float32)[None, :], 1)
                to = ((m * tokens + token) * SPLITS + split).to(tl.int64) * RANK
                tl.store(partials + to + rows, h)
            else:
                i = tl.arange(0, 16)
                live = i < count
                its_token = tl.load(order + i, mask=live, other=0)
                if PDL:
                    tl.extra.cuda.gdc_wait()
                # [16, 16]
                hs = tl.zeros([16, 16], tl.float32)
                for step in tl.range(0, BK, DOT_BK, num_stages=2):
                    # [16, DOT_BK]
                    at_k = split * BK + step
                    piece = load_tile(
                        arena, slot_pages, num_pages, begin, rows, rows < r, at_k, K, DOT_BK,
                        PAGE_ELEMS, ROWS, ALIGNED,
                    )  # fmt: skip
                    ks = at_k + tl.arange(0, DOT_BK)
                    # [16, DOT_BK]
                    xt = tl.load(
                        x + its_token.to(tl.int64)[:, None] * x_stride + ks[None, :],
                        mask=live[:, None] & (ks < K)[None, :],
                        other=0.0,
                    )
                    if DOT_IN_FLOAT32:
                        xt = xt.to(tl.float32)
                        piece = piece.to(tl.float32)
                    hs = tl.dot(xt, tl.trans(piece), hs, input_precision="ieee")
                their = ((m * tokens + its_token) * SPLITS + split).to(tl.int64) * RANK
                tl.store(partials + their[:, None] + rows[None, :], hs, mask=live[:, None])


@triton.jit
def bgmv_expand(
    y0,  # [tokens, N0], rows strided; y1, y2 likewise
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
    work,
    capacity,
    partials,
    tokens,
    K: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    RANK: tl.constexpr,
    BN: tl.constexpr,
    DOT_BN: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Semantics: ``y_m[t, n] += scaling · Σ_i (Σ_s partials[m, t, s, i]) · Bᵀ_m[i, n]``, rounded
    once, with B and scaling of token t's slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    B0: tl.constexpr = (N0 + BN - 1) // BN
    B1: tl.constexpr = (N1 + BN - 1) // BN
    B2: tl.constexpr = (N2 + BN - 1) // BN
    BLOCKS: tl.constexpr = B0 + B1 + B2
    for unit in range(tl.program_id(0), tl.load(work) * BLOCKS, tl.num_programs(0)):
        block = unit % BLOCKS
        tile = unit // BLOCKS
        slot = tl.load(work + 1 + tile)
        first = tl.load(work + 1 + capacity + tile)
        count = tl.load(work + 1 + 2 * capacity + tile)
        order = work + 1 + 3 * capacity + first
        m = 0
        if M > 1:
            m += (block >= B0).to(tl.int32)
        if M > 2:
            m += (block >= B0 + B1).to(tl.int32)
        column = (block - pick(m, 0, B0, B0 + B1, M)) * BN
        width = pick(m, N0, N1, N2, M)
        y = pick(m, y0, y1, y2, M)
        y_stride = pick(m, y_stride0, y_stride1, y_stride2, M)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        begin = tl.load(start + at) * 512 + (r * K + 511) // 512 * 512
        scale = tl.load(scaling + at)
        slot_pages = pages + slot * table_stride
        if r > 0:
            if count == 1:
                _expand_one(
                    y, y_stride, arena, slot_pages, num_pages, begin, r, scale, column, width, m,
                    order, partials, tokens, SPLITS, SPLITS_POW2, RANK, BN, PAGE_ELEMS, ROWS,
                    ALIGNED, PDL,
                )  # fmt: skip
            else:
                _expand_tile(
                    y, y_stride, arena, slot_pages, num_pages, begin, r, scale, column, width, m,
                    order, count, partials, tokens, SPLITS, RANK, BN, DOT_BN, PAGE_ELEMS, ROWS,
                    ALIGNED, PDL, DOT_IN_FLOAT32,
                )  # fmt: skip


@triton.jit
def _expand_one(
    y,
    y_stride,
    arena,
    slot_pages,
    num_pages,
    begin,
    r,
    scale,
    column,
    width,
    m,
    order,
    partials,
    tokens,
    SPLITS: tl.constexpr,
    SPLITS_POW2: tl.constexpr,
    RANK: tl.constexpr,
    BN: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of columns of one token: a matrix-vector product in float32."""
    token = tl.load(order)
    # [BN]
    n = column + tl.arange(0, BN)
    to = y + token.to(tl.int64) * y_stride + n
    # [SPLITS_POW2, 16]
    s = tl.arange(0, SPLITS_POW2)[:, None]
    i = tl.arange(0, 16)
    h_at = partials + ((m * tokens + token) * SPLITS + s).to(tl.int64) * RANK + i[None, :]
    # [16, BN]
    b = load_tile(
        arena, slot_pages, num_pages, begin, i, i < r, column, width, BN,
        PAGE_ELEMS, ROWS, ALIGNED,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    old = tl.load(to, mask=n < width, other=0.0)
    h = tl.sum(tl.load(h_at, mask=(s < SPLITS) & (i < r)[None, :], other=0.0), 0)
    term = tl.sum(b.to(tl.float32) * (h * scale)[:, None], 0)
    if RANK > 16:
        for i0 in range(16, r, 16):
            rows = i0 + i
            bi = load_tile(
                arena, slot_pages, num_pages, begin, rows, rows < r, column, width, BN,
                PAGE_ELEMS, ROWS, ALIGNED,
            )  # fmt: skip
            live_h = (s < SPLITS) & (rows < r)[None, :]
            hi = tl.sum(tl.load(h_at + i0, mask=live_h, other=0.0), 0)
            term += tl.sum(bi.to(tl.float32) * (hi * scale)[:, None], 0)
    new = old.to(tl.float32) + term
    tl.store(to, new.to(y.dtype.element_ty), mask=n < width)


@triton.jit
def _expand_tile(
    y,
    y_stride,
    arena,
    slot_pages,
    num_pages,
    begin,
    r,
    scale,
    column,
    width,
    m,
    order,
    count,
    partials,
    tokens,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BN: tl.constexpr,
    DOT_BN: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """A block of columns of the tokens of a tile: on the tensor cores."""
    t = tl.arange(0, 16)
    live = t < count
    its_token = tl.load(order + t, mask=live, other=0)
    rank_rows = tl.arange(0, RANK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # [16, RANK]
    hs = tl.zeros([16, RANK], tl.float32)
    their = ((m * tokens + its_token) * SPLITS).to(tl.int64) * RANK
    live_hs = live[:, None] & (rank_rows < r)[None, :]
    for q in range(SPLITS):
        hs_at = partials + their[:, None] + q * RANK + rank_rows[None, :]
        hs += tl.load(hs_at, mask=live_hs, other=0.0)
    hs *= scale
    for step in tl.range(0, BN, DOT_BN, num_stages=1):
        # [RANK, DOT_BN]
        bs = load_tile(
            arena, slot_pages, num_pages, begin, rank_rows, rank_rows < r,
            column + step, width, DOT_BN, PAGE_ELEMS, ROWS, ALIGNED,
        )  # fmt: skip
        ns = column + step + tl.arange(0, DOT_BN)
        tos = y + its_token.to(tl.int64)[:, None] * y_stride + ns[None, :]
        mask = live[:, None] & (ns < width)[None, :]
        # [16, DOT_BN]
        olds = tl.load(tos, mask=mask, other=0.0)
        sums = olds.to(tl.float32) + dot_exact(hs, bs, DOT_IN_FLOAT32)
        tl.store(tos, sums.to(y.dtype.element_ty), mask=mask)
