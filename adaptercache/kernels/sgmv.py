"""SGMV: many tokens in segments of one adapter each (prefill).

Work is a list of tiles: up to BM tokens of one slot. The shrink reads x once for all modules of a
group; the expand is bound by reading and writing y, which its software pipeline streams.

After Punica's SGMV (Chen et al., MLSys 2024), over S-LoRA's paged memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adaptercache.kernels.dots import dot_into
from adaptercache.kernels.groups import block_of, expand_group, is_last, sum_parts
from adaptercache.kernels.jit import end_in_turn, kernel, pick, share_of
from adaptercache.kernels.paging import load_part, part_pages

__all__ = ["sgmv_expand", "sgmv_shrink"]


@kernel
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
    max_groups,
    partials,  # float32 [M, tokens, SPLITS, RANK]
    counters,  # int32 [strips], 0
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BM: tl.constexpr,
    STRIP: tl.constexpr,
    BK: tl.constexpr,
    SUM_AT_ONCE: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Semantics: ``partials[m, t, 0, i] = Σ_k x[t, k] · A_m[i, k]`` with A of token t's slot. A
    program does STRIP tokens of a tile and a part of K; the last one there adds the parts up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    strip = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tile = strip // (BM // STRIP)
    if tile >= tl.load(work):
        end_in_turn(PDL)
        return
    its_tokens = work + 8 + max_groups + strip * STRIP
    if tl.load(its_tokens) < 0:
        return
    slot = tl.load(work + 8 + tile)
    at = slot * table_stride
    slot_pages = pages + at
    # [STRIP], [RANK]
    token = tl.load(its_tokens + tl.arange(0, STRIP)).to(tl.int64)
    i = tl.arange(0, RANK)
    live = token >= 0
    r0 = tl.load(rank + at + site0)
    begin0 = tl.load(start + at + site0) * 512
    r1 = tl.load(rank + at + site1)
    begin1 = tl.load(start + at + site1) * 512
    r2 = tl.load(rank + at + site2)
    begin2 = tl.load(start + at + site2) * 512
    # [STRIP, RANK]
    h0 = tl.zeros([STRIP, RANK], tl.float32)
    h1 = tl.zeros([STRIP, RANK], tl.float32)
    h2 = tl.zeros([STRIP, RANK], tl.float32)
    PART: tl.constexpr = (K + SPLITS * BK - 1) // (SPLITS * BK) * BK
    begin = split * PART
    first0, page0, next0 = part_pages(
        slot_pages, begin0, i, i < r0, begin, K, PART, PAGE_ELEMS, ROWS
    )
    first1, page1, next1 = part_pages(
        slot_pages, begin1, i, i < r1, begin, K, PART, PAGE_ELEMS, ROWS
    )
    first2, page2, next2 = part_pages(
        slot_pages, begin2, i, i < r2, begin, K, PART, PAGE_ELEMS, ROWS
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in tl.range(0, tl.minimum(PART, K - begin), BK, num_stages=STAGES):
        k = begin + step + tl.arange(0, BK)
        # [STRIP, BK]
        xs = tl.load(
            x + token[:, None] * x_stride + k[None, :],
            mask=live[:, None] & (k < K)[None, :],
            other=0.0,
        )
        h0 = _add_part(
            h0, xs, arena, slot_pages, num_pages, begin0, i, r0, begin, first0, page0, next0, step,
            K, PART, BK, PAGE_ELEMS, ROWS, ALIGNED, DOT_IN_FLOAT32,
        )  # fmt: skip
        if M > 1:
            h1 = _add_part(
                h1, xs, arena, slot_pages, num_pages, begin1, i, r1, begin, first1, page1, next1,
                step, K, PART, BK, PAGE_ELEMS, ROWS, ALIGNED, DOT_IN_FLOAT32,
            )  # fmt: skip
        if M > 2:
            h2 = _add_part(
                h2, xs, arena, slot_pages, num_pages, begin2, i, r2, begin, first2, page2, next2,
                step, K, PART, BK, PAGE_ELEMS, ROWS, ALIGNED, DOT_IN_FLOAT32,
            )  # fmt: skip
    # [STRIP, RANK]
    to = partials + (token * SPLITS)[:, None] * RANK + i[None, :]
    mask = live[:, None] & (i >= 0)[None, :]
    next_module = tokens.to(tl.int64) * SPLITS * RANK
    tl.store(to + split * RANK, h0, mask=mask)
    if M > 1:
        tl.store(to + next_module + split * RANK, h1, mask=mask)
    if M > 2:
        tl.store(to + 2 * next_module + split * RANK, h2, mask=mask)
    if SPLITS > 1 and is_last(counters + strip, SPLITS):
        for m in tl.static_range(M):
            sum_parts(to + m * next_module, mask, RANK, SPLITS, SUM_AT_ONCE, STRIP, RANK)


@triton.jit
def _add_part(
    h,  # [STRIP, RANK]
    xs,  # [STRIP, BK]
    arena,
    slot_pages,
    num_pages,
    begin,
    i,
    r,
    column,
    first,
    page,
    next_page,
    step,
    K: tl.constexpr,
    PART: tl.constexpr,
    BK: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """``h`` and what BK columns of one module's A add to it."""
    # [RANK, BK]
    a = load_part(
        arena, slot_pages, num_pages, begin, i, i < r, column, K, first, page, next_page, step,
        PART, BK, PAGE_ELEMS, ROWS, ALIGNED,
    )  # fmt: skip
    return dot_into(h, xs, tl.trans(a), DOT_IN_FLOAT32)


@kernel
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
    max_groups,
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
    BN: tl.constexpr,
    STRIP: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Semantics: ``y_m[t, n] += scaling · Σ_i partials[m, t, 0, i] · Bᵀ_m[i, n]``, rounded once.
    Programs do STRIP tokens of a tile at once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    B0: tl.constexpr = (N0 + BN - 1) // BN
    B1: tl.constexpr = (N1 + BN - 1) // BN
    BLOCKS: tl.constexpr = B0 + B1 + (N2 + BN - 1) // BN
    # Programs take runs of blocks, so that one adds a strip's partials up but once.
    STRIPS: tl.constexpr = BM // STRIP
    units = tl.load(work) * (STRIPS * BLOCKS)
    unit, end, _ = share_of(units, tl.program_id(0), tl.num_programs(0), True)
    while unit < end:
        strip = unit // BLOCKS
        block = unit % BLOCKS
        m, column = block_of(block, B0, B1, BN, M)
        blocks = tl.minimum(end - unit, pick(m, B0, B0 + B1, BLOCKS, M) - block)
        blocks = tl.minimum(blocks, PAGE_ELEMS // BN)
        its_tokens = work + 8 + max_groups + strip * STRIP
        slot = tl.load(work + 8 + strip // STRIPS)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        if (r > 0) & (tl.load(its_tokens) >= 0):
            expand_group(
                pick(m, y0, y1, y2, M), pick(m, y_stride0, y_stride1, y_stride2, M), arena,
                pages + slot * table_stride, num_pages,
                tl.load(start + at) * 512 + (r * K + 511) // 512 * 512, r,
                tl.load(scaling + at), column, blocks, pick(m, N0, N1, N2, M), its_tokens,
                partials + (m * tokens).to(tl.int64) * (SPLITS * RANK), SPLITS * RANK, STRIP, RANK,
                BN, PAGE_ELEMS, ROWS, ALIGNED, PDL, DOT_IN_FLOAT32, STAGES,
            )  # fmt: skip
        unit += blocks
    end_in_turn(PDL)
