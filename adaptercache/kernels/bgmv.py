"""BGMV: few tokens, each with an adapter of its own (decode).

Work is a list of tokens that are alone with their adapter, and one of groups of up to 16 that share
theirs (see `work`). A token alone is a matrix-vector product read straight into registers, in tiles
of as many elements whatever the adapter's rank; a group uses the tensor cores, so that its adapter
is read once. The grid is fixed, and programs stride over the work that the batch brings, so one
CUDA graph serves every popularity and every mix of ranks.

After Punica's BGMV (Chen et al., MLSys 2024), over S-LoRA's paged memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adaptercache.kernels.dots import dot_into
from adaptercache.kernels.groups import block_of, expand_group, is_last, sum_parts
from adaptercache.kernels.jit import kernel, pick, share_of
from adaptercache.kernels.paging import load_part, load_tile, part_pages

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
    SUM_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Semantics: ``partials[m, t, s, i] = Σ_k x[t, k] · A_m[i, k]`` with A of token t's slot, over
    the s-th BK columns; for a token of a group, over the s-th GROUP_BK, or with SUM_PARTS over all,
    at s = 0. A program does 16 rows i."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SPLITS: tl.constexpr = (K + BK - 1) // BK
    GROUP_SPLITS: tl.constexpr = (K + GROUP_BK - 1) // GROUP_BK
    CHUNKS: tl.constexpr = M * RANK // 16
    of_groups = tl.load(work) * (GROUP_SPLITS * CHUNKS)
    programs = tl.num_programs(0)
    for unit in range(tl.program_id(0), of_groups, programs):
        group = unit // (GROUP_SPLITS * CHUNKS)
        split = unit % GROUP_SPLITS
        chunk = unit // GROUP_SPLITS % CHUNKS
        slot = tl.load(work + 4 + group)
        m = chunk // (RANK // 16)
        rows = chunk % (RANK // 16) * 16 + tl.arange(0, 16)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        if chunk % (RANK // 16) * 16 < r:
            _shrink_group(
                x, x_stride, arena, pages + slot * table_stride, num_pages,
                tl.load(start + at) * 512, rows, r, split, work + 4 + tokens // 2 + group * 16,
                partials + (m * tokens).to(tl.int64) * (ROOM * RANK),
                counters + group * CHUNKS + chunk, K, ROOM, RANK, GROUP_BK, DOT_BK, STAGES,
                SUM_PARTS, PAGE_ELEMS, ROWS, ALIGNED, PDL, DOT_IN_FLOAT32,
            )  # fmt: skip
    # The singles begin with the programs that have a group's part less.
    singles = tl.load(work + 1) + tl.load(work + 2) + tl.load(work + 3)
    first = (tl.program_id(0) + programs - of_groups % programs) % programs
    for unit in range(first, singles * (SPLITS * CHUNKS), programs):
        single = unit // (SPLITS * CHUNKS)
        split = unit % SPLITS
        chunk = unit // SPLITS % CHUNKS
        slot = tl.load(work + 4 + tokens // 2 * 17 + single)
        token = tl.load(work + 4 + tokens // 2 * 17 + tokens + single)
        m = chunk // (RANK // 16)
        rows = chunk % (RANK // 16) * 16 + tl.arange(0, 16)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        begin = tl.load(start + at) * 512
        if chunk % (RANK // 16) * 16 < r:
            # [16, BK]
            a = load_tile(
                arena, pages + slot * table_stride, num_pages, begin, rows, rows < r,
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


@triton.jit
def _shrink_group(
    x,
    x_stride,
    arena,
    slot_pages,
    num_pages,
    begin,
    rows,
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
    SUM_PARTS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """16 rows of A and GROUP_BK columns, for the tokens of a group."""
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
    if SUM_PARTS and PARTS > 1:
        if is_last(counter, PARTS):
            sum_parts(to, live[:, None] & (rows >= 0)[None, :], RANK, PARTS, min(PARTS, 16), 16, 16)


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
    GROUP_SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
    RANK: tl.constexpr,
    BN: tl.constexpr,
    GROUP_BN: tl.constexpr,
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
    once, with B and scaling of token t's slot; for a token of a group, over GROUP_SPLITS of s."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    G0: tl.constexpr = (N0 + GROUP_BN - 1) // GROUP_BN
    G1: tl.constexpr = (N1 + GROUP_BN - 1) // GROUP_BN
    GROUP_BLOCKS: tl.constexpr = G0 + G1 + (N2 + GROUP_BN - 1) // GROUP_BN
    # Of the groups' blocks, programs take runs, so that one reads a group's x Aᵀ but once.
    of_groups = tl.load(work) * GROUP_BLOCKS
    unit, end, _ = share_of(of_groups, tl.program_id(0), tl.num_programs(0), True)
    while unit < end:
        group = unit // GROUP_BLOCKS
        block = unit % GROUP_BLOCKS
        m, column = block_of(block, G0, G1, GROUP_BN, M)
        blocks = tl.minimum(end - unit, pick(m, G0, G0 + G1, GROUP_BLOCKS, M) - block)
        blocks = tl.minimum(blocks, PAGE_ELEMS // GROUP_BN)
        slot = tl.load(work + 4 + group)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        if r > 0:
            expand_group(
                pick(m, y0, y1, y2, M), pick(m, y_stride0, y_stride1, y_stride2, M), arena,
                pages + slot * table_stride, num_pages,
                tl.load(start + at) * 512 + (r * K + 511) // 512 * 512, r,
                tl.load(scaling + at), column, blocks, pick(m, N0, N1, N2, M),
                work + 4 + tokens // 2 + group * 16,
                partials + (m * tokens).to(tl.int64) * (ROOM * RANK), ROOM * RANK, 16, RANK,
                GROUP_SPLITS, GROUP_BN, PAGE_ELEMS, ROWS, ALIGNED, PDL, DOT_IN_FLOAT32, STAGES,
            )  # fmt: skip
        unit += blocks
    # The singles' blocks begin with the programs that have less to do so far.
    busy = 0
    singles = work + 4 + tokens // 2 * 17
    over32 = tl.load(work + 1)
    over16 = tl.load(work + 2)
    if RANK > 16:
        busy += _expand_singles(
            y0, y1, y2, y_stride0, y_stride1, y_stride2, arena, pages, start, rank, scaling,
            table_stride, num_pages, site0, site1, site2, singles, 0, over32, busy, partials,
            tokens, K, N0, N1, N2, M, SPLITS, SPLITS_POW2, ROOM, RANK, 64, BN, VECTOR, IN_RUNS,
            PAGE_ELEMS, ROWS, ALIGNED, PDL,
        )  # fmt: skip
        busy += _expand_singles(
            y0, y1, y2, y_stride0, y_stride1, y_stride2, arena, pages, start, rank, scaling,
            table_stride, num_pages, site0, site1, site2, singles, over32, over16, busy, partials,
            tokens, K, N0, N1, N2, M, SPLITS, SPLITS_POW2, ROOM, RANK, 32, BN, VECTOR, IN_RUNS,
            PAGE_ELEMS, ROWS, ALIGNED, PDL,
        )  # fmt: skip
    _expand_singles(
        y0, y1, y2, y_stride0, y_stride1, y_stride2, arena, pages, start, rank, scaling,
        table_stride, num_pages, site0, site1, site2, singles, over32 + over16, tl.load(work + 3), busy, partials,
        tokens, K, N0, N1, N2, M, SPLITS, SPLITS_POW2, ROOM, RANK, 16, BN, VECTOR, IN_RUNS,
        PAGE_ELEMS, ROWS, ALIGNED, PDL,
    )  # fmt: skip


@triton.jit
def _expand_singles(
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
    singles,  # their slots, then their tokens
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
    B0: tl.constexpr = (N0 + COLUMNS - 1) // COLUMNS
    B1: tl.constexpr = (N1 + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = B0 + B1 + (N2 + COLUMNS - 1) // COLUMNS
    programs = tl.num_programs(0)
    first = (tl.program_id(0) + programs - busy % programs) % programs
    first, end, step = share_of(count * BLOCKS, first, programs, IN_RUNS)
    for block in range(first, end, step):
        single = first_single + block // BLOCKS
        m, column = block_of(block % BLOCKS, B0, B1, COLUMNS, M)
        slot = tl.load(singles + single)
        token = tl.load(singles + tokens + single)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = tl.load(rank + at)
        if r > 0:
            _expand_single(
                pick(m, y0, y1, y2, M) + token.to(tl.int64) * pick(m, y_stride0, y_stride1, y_stride2, M),
                arena, pages + slot * table_stride, num_pages,
                tl.load(start + at) * 512 + (r * K + 511) // 512 * 512, r,
                tl.load(scaling + at), column, pick(m, N0, N1, N2, M),
                partials + (m * tokens + token).to(tl.int64) * (ROOM * RANK), SPLITS, SPLITS_POW2,
                RANK, AT_ONCE, COLUMNS, VECTOR, PAGE_ELEMS, ROWS, ALIGNED, PDL,
            )  # fmt: skip
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
