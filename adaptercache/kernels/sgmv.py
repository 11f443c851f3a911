"""SGMV: many tokens in segments of one adapter each (prefill).

Work is a list of tiles: up to BM tokens of one slot. The shrink reads x once for all modules of a
group; the expand is bound by reading and writing y, and does a tile's rows in narrower strips.

After Punica's SGMV (Chen et al., MLSys 2024), over S-LoRA's paged memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adaptercache.kernels.paging import dot_exact, load_tile, pick
from adaptercache.kernels.segments import LARGE_TILE

__all__ = ["TILE", "sgmv_expand", "sgmv_shrink"]

TILE = LARGE_TILE
"""Tokens a tile at most."""


@triton.jit
def sgmv_shrink(
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
    work,
    capacity,
    partials,  # float32 [M, SPLITS, tokens, RANK]
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Semantics: ``partials[m, s, t, i] = Σ_k x[t, k] · A_m[i, k]`` over the s-th part of K, with A
    of token t's slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if tile >= tl.load(work):
        return
    slot = tl.load(work + 1 + tile)
    first = tl.load(work + 1 + capacity + tile)
    count = tl.load(work + 1 + 2 * capacity + tile)
    order = work + 1 + 3 * capacity + first
    at = slot * table_stride
    slot_pages = pages + at
    # [BM], [RANK], [BK]
    t = tl.arange(0, BM)
    i = tl.arange(0, RANK)
    live = t < count
    token = tl.load(order + t, mask=live, other=0).to(tl.int64)
    r0 = tl.load(rank + at + site0)
    begin0 = tl.load(start + at + site0) * 512
    r1 = tl.load(rank + at + site1)
    begin1 = tl.load(start + at + site1) * 512
    r2 = tl.load(rank + at + site2)
    begin2 = tl.load(start + at + site2) * 512
    # [BM, RANK]
    h0 = tl.zeros([BM, RANK], tl.float32)
    h1 = tl.zeros([BM, RANK], tl.float32)
    h2 = tl.zeros([BM, RANK], tl.float32)
    PART: tl.constexpr = (K + SPLITS * BK - 1) // (SPLITS * BK) * BK
    if PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(split * PART, tl.minimum(split * PART + PART, K), BK, num_stages=STAGES):
        ks = k + tl.arange(0, BK)
        # [BM, BK]
        xs = tl.load(
            x + token[:, None] * x_stride + ks[None, :],
            mask=live[:, None] & (ks < K)[None, :],
            other=0.0,
        )
        if DOT_IN_FLOAT32:
            xs = xs.to(tl.float32)
        a = load_tile(
            arena, slot_pages, num_pages, begin0, i, i < r0, k, K, BK, PAGE_ELEMS, ROWS, ALIGNED
        )  # fmt: skip
        h0 = tl.dot(xs, tl.trans(a.to(xs.dtype)), h0, input_precision="ieee")
        if M > 1:
            a = load_tile(
                arena, slot_pages, num_pages, begin1, i, i < r1, k, K, BK, PAGE_ELEMS, ROWS, ALIGNED
            )  # fmt: skip
            h1 = tl.dot(xs, tl.trans(a.to(xs.dtype)), h1, input_precision="ieee")
        if M > 2:
            a = load_tile(
                arena, slot_pages, num_pages, begin2, i, i < r2, k, K, BK, PAGE_ELEMS, ROWS, ALIGNED
            )  # fmt: skip
            h2 = tl.dot(xs, tl.trans(a.to(xs.dtype)), h2, input_precision="ieee")
    to = partials + (split * tokens.to(tl.int64) + token)[:, None] * RANK + i[None, :]
    module_step = SPLITS * tokens.to(tl.int64) * RANK
    tl.store(to, h0, mask=live[:, None])
    if M > 1:
        tl.store(to + module_step, h1, mask=live[:, None])
    if M > 2:
        tl.store(to + 2 * module_step, h2, mask=live[:, None])


@triton.jit
def sgmv_expand(
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
    RANK: tl.constexpr,
    BM: tl.constexpr,
    STRIP: tl.constexpr,
    BN: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Semantics: ``y_m[t, n] += scaling · Σ_i (Σ_s partials[m, s, t, i]) · Bᵀ_m[i, n]``, rounded
    once. A program does STRIP rows of a tile and BN columns of one module."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    B0: tl.constexpr = (N0 + BN - 1) // BN
    B1: tl.constexpr = (N1 + BN - 1) // BN
    block = tl.program_id(0)
    tile = tl.program_id(1) // (BM // STRIP)
    skipped = tl.program_id(1) % (BM // STRIP) * STRIP
    if tile >= tl.load(work):
        return
    slot = tl.load(work + 1 + tile)
    first = tl.load(work + 1 + capacity + tile) + skipped
    count = tl.load(work + 1 + 2 * capacity + tile) - skipped
    if count <= 0:
        return
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
    if r <= 0:
        return
    begin = tl.load(start + at) * 512 + (r * K + 511) // 512 * 512
    scale = tl.load(scaling + at)
    # [RANK, BN]
    i = tl.arange(0, RANK)
    b = load_tile(
        arena, pages + slot * table_stride, num_pages, begin, i, i < r, column, width, BN,
        PAGE_ELEMS, ROWS, ALIGNED,
    )  # fmt: skip
    # [STRIP], [BN]
    t = tl.arange(0, STRIP)
    n = column + tl.arange(0, BN)
    live = t < count
    token = tl.load(work + 1 + 3 * capacity + first + t, mask=live, other=0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    to = y + token[:, None] * y_stride + n[None, :]
    mask = live[:, None] & (n < width)[None, :]
    # [STRIP, BN]
    old = tl.load(to, mask=mask, other=0.0)
    # [STRIP, RANK]
    h = tl.zeros([STRIP, RANK], tl.float32)
    for s in tl.static_range(SPLITS):
        row = (m * SPLITS + s) * tokens.to(tl.int64) + token
        h_mask = live[:, None] & (i < r)[None, :]
        h += tl.load(partials + row[:, None] * RANK + i[None, :], mask=h_mask, other=0.0)
    new = old.to(tl.float32) + dot_exact(h * scale, b, DOT_IN_FLOAT32)
    tl.store(to, new.to(y.dtype.element_ty), mask=mask)
