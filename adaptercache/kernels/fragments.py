"""BGMV by fragments: few tokens, bfloat16, ranks up to 64.

Gluon, so that layouts are ours: operands of the tensor cores' ``mma.m16n8k16`` come straight from
global memory into the registers where it wants them (`fragment_layouts`), and shared memory only
adds up what warps have. Tokens that share an adapter go in groups of up to 16; a single is a group
of one, since it is the adapter's bytes that take the time. However a batch is grouped, a token's
sums are made in the same order, so equal inputs give equal bits, in batches of one rank class.

Parts of K are stored as they lie in the accumulators, and each program of the expand adds them up,
once for a run of columns: as accumulators lie, so lies the next product's left operand. Programs
stride over the work that the batch brings, so one CUDA graph serves every popularity and every mix
of ranks. What has no binary here (`tuning.fragment_blocks`) is left to `bgmv`.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaptercache.kernels.fragment_expand import expand_run
from adaptercache.kernels.fragment_layouts import tokens_of_x, tokens_of_y
from adaptercache.kernels.fragment_reads import (
    end_in_turn,
    group_of,
    launch_dependents,
    numbers_of,
    tokens_of,
)
from adaptercache.kernels.fragment_shrink import shrink_part
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
    partials,  # float32 [M, groups, RANK / 16, SPLITS, 256]
    tokens,
    K: gl.constexpr,
    M: gl.constexpr,
    RANK: gl.constexpr,
    BK: gl.constexpr,  # columns a slice: 64 and more, divides 512 and K
    LOOPS: gl.constexpr,
    CHAINS: gl.constexpr,
    WARPS: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Semantics: ``partials[m, g, i // 16, s]`` holds ``Σ_k x[t, k] · A_m[i, k]`` over the s-th
    BK · WARPS · LOOPS columns, for group g's tokens t, with A of its slot, in the order that
    `shrink_part` says. A unit of work is 16 rows i, one s and one m. Where its weights begin takes
    two look-ups, one after the other, that are made while the units before it are read."""
    if PDL:
        launch_dependents()
    SLICES: gl.constexpr = WARPS * LOOPS
    SPLITS: gl.constexpr = (K + BK * SLICES - 1) // (BK * SLICES)
    EACH: gl.constexpr = SPLITS * M  # units of 16 rows of a group
    programs = gl.num_programs(0)
    unit = gl.program_id(0)
    slot, which = group_of(work, unit // EACH, tokens)
    over32, over16, others = numbers_of(work, tokens)
    # The first 16 rows of all groups come first, then the next of those that have them, so that
    # programs have as much to do as others, whatever the ranks.
    first = (over32 + over16 + others) * EACH
    second = (over32 + over16) * EACH
    third = over32 * EACH
    units = first
    if RANK > 16:
        units += second + 2 * third
        if unit >= first:
            _, group = _place(unit, first, second, third, EACH, RANK)
            slot, which = group_of(work, group, tokens)
    at = slot * table_stride + pick(unit // SPLITS % M, site0, site1, site2, M)
    r = gl.load(rank + at)
    begin = gl.load(start + at) * 512
    _, group = _place(unit + programs, first, second, third, EACH, RANK)
    next_slot, next_which = group_of(work, group, tokens)
    while unit < units:
        later = unit + programs
        at = next_slot * table_stride + pick(later // SPLITS % M, site0, site1, site2, M)
        next_r = gl.load(rank + at)
        next_begin = gl.load(start + at) * 512
        _, group = _place(later + programs, first, second, third, EACH, RANK)
        last_slot, last_which = group_of(work, group, tokens)
        chunk, group = _place(unit, first, second, third, EACH, RANK)
        if chunk * 16 < r:
            part = unit // SPLITS % M * tokens + group
            part = (part * (RANK // 16) + chunk) * SPLITS + unit % SPLITS
            token = tokens_of(work, which, tokens, tokens_of_x(WARPS))
            shrink_part(
                x, x_stride, token, which >= 0, arena, pages + slot * table_stride, num_pages,
                begin, r, chunk * 16, unit % SPLITS * SLICES, partials + part.to(gl.int64) * 256,
                K, BK, LOOPS, CHAINS, WARPS, PAGE_ELEMS, ROWS, PDL,
            )  # fmt: skip
        unit = later
        slot, which, r, begin = next_slot, next_which, next_r, next_begin
        next_slot, next_which = last_slot, last_which
    end_in_turn(PDL)


@gluon.jit
def _place(unit, first, second, third, EACH: gl.constexpr, RANK: gl.constexpr):
    """Which 16 rows a unit is of, and its group. ``first``, …: units of the first 16 rows, …"""
    chunk = 0
    if RANK > 16:
        chunk = gl.where(unit < first, 0, gl.where(unit < first + second, 1, 2))
        unit -= gl.where(chunk > 0, first, 0) + gl.where(chunk > 1, second, 0)
        is_last = (chunk == 2) & (unit >= third)
        chunk += gl.where(is_last, 1, 0)
        unit -= gl.where(is_last, third, 0)
    return chunk, unit // EACH


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
    TILES: gl.constexpr,  # of B, 16 rows and 64 columns each, that a warp asks for at once
    TOGETHER: gl.constexpr,  # blocks of a run: a multiple of it, where programs have more than one
    WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Semantics: ``y_m[t] += scaling · (Σ_s partials[m, g, :, s]) · B_mᵀ`` for the tokens t of each
    group g. A program does a run of blocks of columns, of which those of one group and module are
    done at once."""
    if PDL:
        launch_dependents()
    BLOCK: gl.constexpr = 64 * WARPS
    B0: gl.constexpr = N0 // BLOCK
    B1: gl.constexpr = N1 // BLOCK
    BLOCKS: gl.constexpr = B0 + B1 + N2 // BLOCK
    program, programs = gl.program_id(0), gl.num_programs(0)
    known = program // BLOCKS  # right where programs have a block at most
    slot, which = group_of(work, known, tokens)
    token = tokens_of(work, which, tokens, tokens_of_y(WARPS))
    over32, over16, others = numbers_of(work, tokens)
    unit = program
    end = gl.minimum((over32 + over16 + others) * BLOCKS, program + 1)
    if (over32 + over16 + others) * BLOCKS > programs:
        all32, all16 = over32 * (BLOCKS // TOGETHER), over16 * (BLOCKS // TOGETHER)
        rest = others * (BLOCKS // TOGETHER)
        unit = _begin(program, programs, all32, all16, rest) * TOGETHER
        end = _begin(program + 1, programs, all32, all16, rest) * TOGETHER
    while unit < end:
        group = unit // BLOCKS
        if group != known:
            slot, which = group_of(work, group, tokens)
            token = tokens_of(work, which, tokens, tokens_of_y(WARPS))
            known = group
        m, column = block_of(unit % BLOCKS, B0, B1, BLOCK, M)
        blocks = gl.minimum(end - unit, pick(m, B0, B0 + B1, BLOCKS, M) - unit % BLOCKS)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = gl.load(rank + at)
        begin = gl.load(start + at) * 512 + (r * K + 511) // 512 * 512
        scale = gl.load(scaling + at)
        y = pick(m, y0, y1, y2, M)
        y_stride = pick(m, y_stride0, y_stride1, y_stride2, M)
        width = pick(m, N0, N1, N2, M)
        parts = partials + (m * tokens + group).to(gl.int64) * (RANK * 16 * SPLITS)
        if r > (32 if RANK > 16 else 0):
            expand_run(
                y, y_stride, token, which >= 0, arena, pages + slot * table_stride, num_pages,
                begin, r, scale, column, width, blocks, parts, SPLITS, RANK, TILES * 16 // RANK,
                TOGETHER, WARPS, AT_ONCE, PAGE_ELEMS, ROWS, PDL,
            )  # fmt: skip
        if RANK > 16:
            if (r > 16) & (r <= 32):
                expand_run(
                    y, y_stride, token, which >= 0, arena, pages + slot * table_stride, num_pages,
                    begin, r, scale, column, width, blocks, parts, SPLITS, 32, TILES // 2,
                    TOGETHER, WARPS, AT_ONCE, PAGE_ELEMS, ROWS, PDL,
                )  # fmt: skip
            if (r > 0) & (r <= 16):
                expand_run(
                    y, y_stride, token, which >= 0, arena, pages + slot * table_stride, num_pages,
                    begin, r, scale, column, width, blocks, parts, SPLITS, 16, TILES,
                    TOGETHER, WARPS, AT_ONCE, PAGE_ELEMS, ROWS, PDL,
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
