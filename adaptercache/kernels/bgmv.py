"""BGMV: few tokens, each with an adapter of its own (decode).

Work is a list of tokens that are alone with their adapter, and one of groups of up to 16 that share
theirs (see `work`). A token alone is a matrix-vector product read straight into registers, in tiles
of as many elements whatever the adapter's rank; a group uses the tensor cores, so that its adapter
is read once. The grid is fixed, and programs stride over the work that the batch brings, so one
CUDA graph serves every popularity and every mix of ranks.

After Punica's BGMV (Chen et al., MLSys 2024), over S-LoRA's paged memory.
"""

from __future__ import annotations

import triton.language as tl

from adaptercache.kernels.groups import block_of, expand_group, shrink_group
from adaptercache.kernels.jit import end_in_turn, kernel, pick, share_of
from adaptercache.kernels.singles import counts, expand_singles, shrink_singles

__all__ = ["bgmv_expand", "bgmv_shrink"]


@kernel
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
    work,
    partials,  # float32 [M, tokens, ROOM, RANK]
    counters,  # int32 [groups, M * RANK / 16], 0
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    ROOM: tl.constexpr,
    BK: tl.constexpr,
    GROUP_BK: tl.constexpr,
    DOT_BK: tl.constexpr,
    STAGES: tl.constexpr,
    ALL_SINGLES: tl.constexpr,
    FROM_L2: tl.constexpr,
    VECTOR: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Semantics: ``partials[m, t, s, i] = Σ_k x[t, k] · A_m[i, k]`` with A of token t's slot, over
    the s-th BK columns; for a token of a group, over all, at s = 0. A program does 16 rows i."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUP_SPLITS: tl.constexpr = (K + GROUP_BK - 1) // GROUP_BK
    CHUNKS: tl.constexpr = M * RANK // 16
    groups, over32, over16, up_to16, from16, from_others = counts(work, ALL_SINGLES, FROM_L2)
    of_groups = groups * (GROUP_SPLITS * CHUNKS)
    programs = tl.num_programs(0)
    for unit in range(tl.program_id(0), of_groups, programs):
        group = unit // (GROUP_SPLITS * CHUNKS)
        split = unit % GROUP_SPLITS
        chunk = unit // GROUP_SPLITS % CHUNKS
        slot = tl.load(work + 8 + group)
        m = chunk // (RANK // 16)
        rows = chunk % (RANK // 16) * 16 + tl.arange(0, 16)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        if chunk % (RANK // 16) * 16 < r:
            shrink_group(
                x, x_stride, arena, pages + slot * table_stride, num_pages,
                tl.load(start + at) * 512, rows, r, split, work + 8 + tokens // 2 + group * 16,
                partials + (m * tokens).to(tl.int64) * (ROOM * RANK),
                counters + group * CHUNKS + chunk, K, ROOM, RANK, GROUP_BK, DOT_BK, STAGES,
                PAGE_ELEMS, ROWS, ALIGNED, PDL, DOT_IN_FLOAT32,
            )  # fmt: skip
    # The singles begin with the programs that have a group's part less.
    shrink_singles(
        x, x_stride, arena, pages, start, rank, table_stride, num_pages, site0, site1, site2,
        work + 8 + tokens // 2 * 17, over32, over16, up_to16, from16, from_others,
        of_groups % programs, partials, tokens, K, M, RANK, ROOM, BK, VECTOR, PAGE_ELEMS, ROWS,
        ALIGNED, PDL,
    )  # fmt: skip
    end_in_turn(PDL)


@kernel
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
    BN: tl.constexpr,
    GROUP_BN: tl.constexpr,
    ALL_SINGLES: tl.constexpr,
    FROM_L2: tl.constexpr,
    VECTOR: tl.constexpr,
    IN_RUNS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Semantics: ``y_m[t, n] += scaling · Σ_i (Σ_s partials[m, t, s, i]) · Bᵀ_m[i, n]``, rounded
    once, with B and scaling of token t's slot; for a token of a group, with s = 0 alone."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    G0: tl.constexpr = (N0 + GROUP_BN - 1) // GROUP_BN
    G1: tl.constexpr = (N1 + GROUP_BN - 1) // GROUP_BN
    GROUP_BLOCKS: tl.constexpr = G0 + G1 + (N2 + GROUP_BN - 1) // GROUP_BN
    # Of the groups' blocks, programs take runs, so that one reads a group's x Aᵀ but once.
    groups, over32, over16, up_to16, from16, from_others = counts(work, ALL_SINGLES, FROM_L2)
    of_groups = groups * GROUP_BLOCKS
    unit, end, _ = share_of(of_groups, tl.program_id(0), tl.num_programs(0), True)
    while unit < end:
        group = unit // GROUP_BLOCKS
        block = unit % GROUP_BLOCKS
        m, column = block_of(block, G0, G1, GROUP_BN, M)
        blocks = tl.minimum(end - unit, pick(m, G0, G0 + G1, GROUP_BLOCKS, M) - block)
        blocks = tl.minimum(blocks, PAGE_ELEMS // GROUP_BN)
        slot = tl.load(work + 8 + group)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        if r > 0:
            expand_group(
                pick(m, y0, y1, y2, M), pick(m, y_stride0, y_stride1, y_stride2, M), arena,
                pages + slot * table_stride, num_pages,
                tl.load(start + at) * 512 + (r * K + 511) // 512 * 512, r,
                tl.load(scaling + at), column, blocks, pick(m, N0, N1, N2, M),
                work + 8 + tokens // 2 + group * 16,
                partials + (m * tokens).to(tl.int64) * (ROOM * RANK), ROOM * RANK, 16, RANK,
                GROUP_BN, PAGE_ELEMS, ROWS, ALIGNED, PDL, DOT_IN_FLOAT32, STAGES,
            )  # fmt: skip
        unit += blocks
    singles = work + 8 + tokens // 2 * 17
    busy = 0
    if RANK > 16:
        busy += expand_singles(
            y0, y1, y2, y_stride0, y_stride1, y_stride2, arena, pages, start, rank, scaling,
            table_stride, num_pages, site0, site1, site2, singles, 0, over32, busy, partials,
            tokens, K, N0, N1, N2, M, SPLITS, SPLITS_POW2, ROOM, RANK, 64, BN, VECTOR, IN_RUNS,
            PAGE_ELEMS, ROWS, ALIGNED, PDL,
        )  # fmt: skip
        busy += expand_singles(
            y0, y1, y2, y_stride0, y_stride1, y_stride2, arena, pages, start, rank, scaling,
            table_stride, num_pages, site0, site1, site2, singles, from16, over16, busy, partials,
            tokens, K, N0, N1, N2, M, SPLITS, SPLITS_POW2, ROOM, RANK, 32, BN, VECTOR, IN_RUNS,
            PAGE_ELEMS, ROWS, ALIGNED, PDL,
        )  # fmt: skip
    expand_singles(
        y0, y1, y2, y_stride0, y_stride1, y_stride2, arena, pages, start, rank, scaling,
        table_stride, num_pages, site0, site1, site2, singles, from_others, up_to16, busy, partials,
        tokens, K, N0, N1, N2, M, SPLITS, SPLITS_POW2, ROOM, RANK, 16, BN, VECTOR, IN_RUNS,
        PAGE_ELEMS, ROWS, ALIGNED, PDL,
    )  # fmt: skip
    end_in_turn(PDL)
