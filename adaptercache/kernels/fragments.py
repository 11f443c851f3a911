"""BGMV by fragments: few tokens, of 16 bits a number, ranks up to 64.

Gluon, so that layouts are ours: operands of the tensor cores' ``mma.m16n8k16`` come straight from
global memory into the registers where it wants them (`fragment_layouts`), and shared memory only
adds up what warps have. Tokens that share an adapter go in entries, 8 to an mma, so that a single
token takes as few registers as can be: it is the adapter's bytes that take the time, and of them
that many are on their way as registers allow. Adapters of up to rank 8 are done two parts at a
time, so that their mma are as full as others. However a batch is grouped, a token's sums are made
in the same order, so equal inputs give equal bits, in batches of one rank class.

Programs stride over the work that the batch brings, so one CUDA graph serves every popularity and
every mix of ranks. What has no binary here (`tuning.fragment_blocks`) is left to `bgmv`.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaptercache.kernels.fragment_expand import expand_run
from adaptercache.kernels.fragment_reads import (
    end_in_turn,
    entry_of,
    launch_dependents,
    numbers_of,
    tokens_of,
)
from adaptercache.kernels.fragment_shrink import part_pages, shrink_part
from adaptercache.kernels.groups import block_of
from adaptercache.kernels.jit import alike, pick

__all__ = ["fragment_expand", "fragment_shrink"]


def _kernel(function: Any) -> Any:
    return gluon.jit(function, **alike(function))


@_kernel
def fragment_shrink(
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
    partials,  # float32 [M, tokens, RANK / 16, SPLITS, 16]
    tokens,
    K: gl.constexpr,
    M: gl.constexpr,
    RANK: gl.constexpr,
    BK: gl.constexpr,  # columns a warp: 64 and more, divides 512 and K
    WARPS: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Semantics: ``partials[m, t, i // 16, s, i % 16]`` holds ``Σ_k x[t, k] · A_m[i, k]`` over the
    s-th BK · WARPS columns, with A of the token's slot, in the order that `shrink_part` says. A
    unit of work is 16 rows i, one s and one m of an entry; of a narrow one, two s."""
    if PDL:
        launch_dependents()
    SPLITS: gl.constexpr = (K + BK * WARPS - 1) // (BK * WARPS)
    programs = gl.num_programs(0)
    unit = gl.program_id(0)
    # Asked for before it is known which is right: the one where no entry is narrow or all are.
    guess, other = unit // (SPLITS * M), unit // ((SPLITS + 1) // 2 * M)
    slot, which = entry_of(work, guess, tokens)
    other_slot, other_which = entry_of(work, other, tokens)
    numbers = numbers_of(work, tokens)
    full = numbers[2]
    units = _units(numbers, SPLITS, M, RANK)
    entry, _, m, _ = _place(unit, numbers, SPLITS, M, RANK)
    if entry != guess:
        slot, which = other_slot, other_which
        if entry != other:
            slot, which = entry_of(work, entry, tokens)
    at = slot * table_stride + pick(m, site0, site1, site2, M)
    r = gl.load(rank + at)
    begin = gl.load(start + at) * 512
    next_entry, _, _, _ = _place(unit + programs, numbers, SPLITS, M, RANK)
    next_slot, next_which = entry_of(work, next_entry, tokens)
    while unit < units:
        later = unit + programs
        next_entry, _, m, _ = _place(later, numbers, SPLITS, M, RANK)
        at = next_slot * table_stride + pick(m, site0, site1, site2, M)
        next_r = gl.load(rank + at)
        next_begin = gl.load(start + at) * 512
        last_entry, _, _, _ = _place(later + programs, numbers, SPLITS, M, RANK)
        last_slot, last_which = entry_of(work, last_entry, tokens)
        entry, chunk, m, split = _place(unit, numbers, SPLITS, M, RANK)
        if chunk * 16 < r:
            of_part = (begin, r, chunk * 16, split, entry >= full)
            page = part_pages(
                pages + slot * table_stride, of_part, K, BK, WARPS, PAGE_ELEMS, ROWS
            )  # fmt: skip
            of_entry = (work, which, tokens, arena, page, num_pages)
            parts = partials + m * tokens * (RANK * SPLITS)
            if tokens_of(which) > 8:
                if RANK > 16:
                    shrink_part(
                        x, x_stride, of_entry, of_part, parts, K, RANK, BK, 16, WARPS,
                        PAGE_ELEMS, ROWS, PDL,
                    )  # fmt: skip
            else:
                shrink_part(
                    x, x_stride, of_entry, of_part, parts, K, RANK, BK, 8, WARPS,
                    PAGE_ELEMS, ROWS, PDL,
                )  # fmt: skip
        unit = later
        slot, which, r, begin = next_slot, next_which, next_r, next_begin
        next_slot, next_which = last_slot, last_which
    end_in_turn(PDL)


@gluon.jit
def _units(numbers, SPLITS: gl.constexpr, M: gl.constexpr, RANK: gl.constexpr):
    over32, over16, full, narrow = numbers
    units = full * SPLITS + narrow * ((SPLITS + 1) // 2)
    if RANK > 16:
        units += (over32 * 3 + over16) * SPLITS
    return units * M


@gluon.jit
def _place(unit, numbers, SPLITS: gl.constexpr, M: gl.constexpr, RANK: gl.constexpr):
    """A unit's entry, which 16 rows, module, and part of K. The first 16 rows of all entries come
    first, then the next of those that have them, so that programs have as much to do as others,
    whatever the ranks."""
    EACH: gl.constexpr = SPLITS * M
    PAIRS: gl.constexpr = (SPLITS + 1) // 2
    over32, over16, full, narrow = numbers
    chunk = 0
    if RANK > 16:
        first = full * EACH + narrow * (PAIRS * M)
        second, third = (over32 + over16) * EACH, over32 * EACH
        chunk = gl.where(unit < first, 0, gl.where(unit < first + second, 1, 2))
        unit -= gl.where(chunk > 0, first, 0) + gl.where(chunk > 1, second, 0)
        is_last = (chunk == 2) & (unit >= third)
        chunk += gl.where(is_last, 1, 0)
        unit -= gl.where(is_last, third, 0)
    entry, part = unit // EACH, unit % EACH
    m, split = part // SPLITS, part % SPLITS
    beyond = unit - full * EACH
    if beyond >= 0 and chunk == 0:
        entry, part = full + beyond // (PAIRS * M), beyond % (PAIRS * M)
        m, split = part // PAIRS, part % PAIRS * 2
    return entry, chunk, m, split


@_kernel
def fragment_expand(
    y0,  # [tokens, N0], rows strided; likewise y1, y2
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
    K: gl.constexpr,
    N0: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    M: gl.constexpr,
    SPLITS: gl.constexpr,
    RANK: gl.constexpr,
    STRIPS: gl.constexpr,  # blocks of columns at once, up to rank 16
    WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Semantics: ``y_m[t] += scaling · (Σ_s partials[m, t, :, s]) · B_mᵀ`` for the tokens t of each
    entry. A program does a run of blocks of columns, of which those of one entry and module are
    done at once."""
    if PDL:
        launch_dependents()
    BLOCK: gl.constexpr = 64 * WARPS
    B0: gl.constexpr = N0 // BLOCK
    B1: gl.constexpr = N1 // BLOCK
    BLOCKS: gl.constexpr = B0 + B1 + N2 // BLOCK
    program, programs = gl.program_id(0), gl.num_programs(0)
    known = program // BLOCKS  # right where programs have a block at most
    slot, which = entry_of(work, known, tokens)
    over32, over16, full, narrow = numbers_of(work, tokens)
    unit = program
    end = gl.minimum((full + narrow) * BLOCKS, program + 1)
    if (full + narrow) * BLOCKS > programs:
        all32, all16 = over32 * BLOCKS, over16 * BLOCKS
        rest = (full - over32 - over16 + narrow) * BLOCKS
        unit = _begin(program, programs, all32, all16, rest)
        end = _begin(program + 1, programs, all32, all16, rest)
    while unit < end:
        entry = unit // BLOCKS
        if entry != known:
            slot, which = entry_of(work, entry, tokens)
            known = entry
        m, column = block_of(unit % BLOCKS, B0, B1, BLOCK, M)
        blocks = gl.minimum(end - unit, pick(m, B0, B0 + B1, BLOCKS, M) - unit % BLOCKS)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = gl.load(rank + at)
        begin = gl.load(start + at) * 512 + (r * K + 511) // 512 * 512
        scale = gl.load(scaling + at)
        y = pick(m, y0, y1, y2, M)
        y_stride = pick(m, y_stride0, y_stride1, y_stride2, M)
        width = pick(m, N0, N1, N2, M)
        parts = partials + m * tokens * (RANK * SPLITS)
        slot_pages = pages + slot * table_stride
        of_entry = (work, which, tokens, arena, slot_pages, num_pages, begin, r, scale, parts)
        of_y = (y, y_stride, column, width, blocks)
        if r > 32:
            if RANK > 32:
                if tokens_of(which) > 8:
                    expand_run(
                        of_entry, of_y, False, SPLITS, RANK, 64, 1, 16, WARPS, AT_ONCE,
                        PAGE_ELEMS, ROWS, PDL,
                    )  # fmt: skip
                else:
                    expand_run(
                        of_entry, of_y, False, SPLITS, RANK, 64, 1, 8, WARPS, AT_ONCE,
                        PAGE_ELEMS, ROWS, PDL,
                    )  # fmt: skip
        elif tokens_of(which) > 8:
            if RANK > 16:
                expand_run(
                    of_entry, of_y, False, SPLITS, RANK, 32, 1, 16, WARPS, AT_ONCE,
                    PAGE_ELEMS, ROWS, PDL,
                )  # fmt: skip
        elif r > 16:
            if RANK > 16:
                expand_run(
                    of_entry, of_y, False, SPLITS, RANK, 32, 1, 8, WARPS, AT_ONCE,
                    PAGE_ELEMS, ROWS, PDL,
                )  # fmt: skip
        elif r > 0:
            expand_run(
                of_entry, of_y, entry >= full, SPLITS, RANK, 16, STRIPS, 8, WARPS, AT_ONCE,
                PAGE_ELEMS, ROWS, PDL,
            )  # fmt: skip
        unit += blocks
    end_in_turn(PDL)


@gluon.jit
def _begin(program, programs, fours, twos, ones):
    """A program's first block, where those of the highest ranks come first, and take four times as
    long as others, or twice."""
    all = 4 * fours + 2 * twos + ones
    share = program * (all // programs) + gl.minimum(program, all % programs)
    of_twos = gl.minimum(gl.maximum(share - 4 * fours, 0), 2 * twos)
    of_ones = gl.maximum(share - 4 * fours - 2 * twos, 0)
    return (gl.minimum(share, 4 * fours) + 3) // 4 + (of_twos + 1) // 2 + of_ones
