"""An experiment (ADAPTERCACHE_FRAGMENTS=1): groups of tokens that share an adapter, by fragments.

Gluon, so that layouts are ours: operands of ``mma.m16n8k16`` come straight from global memory into the
registers where the tensor cores want them; shared memory only adds up what warps have, and no counter.
Parts of K are stored as they lie in the accumulators, 1 KiB a part, and each program of the expand adds
them up, once for a run of columns: as accumulators lie, so lies the next product's left operand.

Only groups are done, not singles; only aligned shapes, only bfloat16.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaptercache.kernels.fragment_layouts import (
    group_of,
    launch_dependents,
    number_of,
    pick,
    tokens_of_operand,
    tokens_of_y,
)
from adaptercache.kernels.fragment_units import expand_run, shrink_unit
from adaptercache.kernels.jit import NUMBERS, TABLES

__all__ = ["fragment_expand", "fragment_shrink"]


def _kernel(function: Any) -> Any:
    """As `jit.kernel`, for Gluon."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return gluon.jit(
        function,
        do_not_specialize=[name for name in names if name in NUMBERS],
        do_not_specialize_on_alignment=[name for name in names if name in TABLES],
    )


@_kernel
def fragment_shrink(
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
    partials,  # float32 [M, groups, RANK / 16, SPLITS, 256]
    counters,  # not used
    tokens,
    K: gl.constexpr,
    M: gl.constexpr,
    RANK: gl.constexpr,
    BK: gl.constexpr,  # columns a slice: 64 and more, divides 512 and K
    LOOPS: gl.constexpr,
    CHAINS: gl.constexpr,
    AT_ONCE: gl.constexpr,  # chunks of 16 rows of A a program
    WARPS: gl.constexpr,
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Parts of ``x Aᵀ`` of all groups, 16 rows of A, or as many times as many, a unit of work."""
    if PDL:
        launch_dependents()
    TOKENS: gl.constexpr = tokens_of_operand(WARPS)
    SLICES: gl.constexpr = WARPS // AT_ONCE * LOOPS
    SPLITS: gl.constexpr = (K + BK * SLICES - 1) // (BK * SLICES)
    CHUNKS: gl.constexpr = RANK // 16
    EACH: gl.constexpr = SPLITS * M * CHUNKS // AT_ONCE  # units a group
    max_groups = tokens
    unit = gl.program_id(0)
    slot, token = group_of(work, unit // EACH, max_groups, TOKENS)
    groups, units = number_of(work)
    units *= EACH
    programs = gl.num_programs(0)
    at = slot * table_stride + pick(unit // SPLITS % (M * CHUNKS // AT_ONCE) * AT_ONCE // CHUNKS, site0, site1, site2, M)
    r = gl.load(rank + at)
    begin = gl.load(start + at) * 512
    next_slot, next_token = group_of(work, (unit + programs) // EACH, max_groups, TOKENS)
    while unit < units:
        group = unit // EACH
        later = unit + programs
        at = next_slot * table_stride + pick(later // SPLITS % (M * CHUNKS // AT_ONCE) * AT_ONCE // CHUNKS, site0, site1, site2, M)
        next_r = gl.load(rank + at)
        next_begin = gl.load(start + at) * 512
        last_slot, last_token = group_of(work, (later + programs) // EACH, max_groups, TOKENS)
        split = unit % SPLITS
        chunk = unit // SPLITS % (M * CHUNKS // AT_ONCE) * AT_ONCE
        m = chunk // CHUNKS
        if chunk % CHUNKS * 16 < r:
            part = ((m * max_groups + group) * CHUNKS + chunk % CHUNKS) * SPLITS + split
            shrink_unit(
                x, x_stride, token, arena, pages + slot * table_stride, num_pages, begin, r,
                chunk % CHUNKS * 16, split * SLICES, partials + part * 256, SPLITS * 256, group >= groups, K, BK,
                LOOPS, CHAINS, AT_ONCE, WARPS, PAGE_ELEMS, ROWS, PDL,
            )  # fmt: skip
        unit += programs
        slot, token, r, begin = next_slot, next_token, next_r, next_begin
        next_slot, next_token = last_slot, last_token


@gluon.jit
def _share(units, RUNS: gl.constexpr):
    """A program's units, as a range: as `jit.share_of`."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first = program
    end = units
    if RUNS:
        end = gl.minimum(units, program + 1)
        if units > programs:  # else there is no need to divide
            longer = units % programs
            first = program * (units // programs) + gl.minimum(program, longer)
            end = first + units // programs + gl.where(program < longer, 1, 0)
    return first, end


@_kernel
def fragment_expand(
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
    partials,
    tokens,
    K: gl.constexpr,
    N0: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    M: gl.constexpr,
    SPLITS: gl.constexpr,
    RANK: gl.constexpr,
    BN: gl.constexpr,
    WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    RUNS: gl.constexpr,  # blocks side by side, or every so many
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """All groups and columns; a run of blocks of one group and module at once."""
    if PDL:
        launch_dependents()
    TOKENS: gl.constexpr = tokens_of_y(WARPS)
    B0: gl.constexpr = N0 // (BN * WARPS)
    B1: gl.constexpr = N1 // (BN * WARPS)
    BLOCKS: gl.constexpr = B0 + B1 + N2 // (BN * WARPS)
    HALF: gl.constexpr = (
        RANK // 2 if RANK > 16 else 0
    )  # adapters of up to it have code of their own
    max_groups = tokens
    known = gl.program_id(0) // BLOCKS  # right where programs have a unit at most
    slot, token = group_of(work, known, max_groups, TOKENS)
    groups, units = number_of(work)
    unit, end = _share(units * BLOCKS, RUNS)
    while unit < end:
        group = unit // BLOCKS
        block = unit % BLOCKS
        if group != known:
            slot, token = group_of(work, group, max_groups, TOKENS)
            known = group
        m = 0
        if M > 1:
            m += gl.where(block >= B0, 1, 0)
        if M > 2:
            m += gl.where(block >= B0 + B1, 1, 0)
        blocks = 1
        if RUNS:
            blocks = gl.minimum(end - unit, pick(m, B0, B0 + B1, BLOCKS, M) - block)
        column = (block - pick(m, 0, B0, B0 + B1, M)) * (BN * WARPS)
        at = slot * table_stride + pick(m, site0, site1, site2, M)
        r = gl.load(rank + at)
        begin = gl.load(start + at) * 512 + (r * K + 511) // 512 * 512
        scale = gl.load(scaling + at)
        y = pick(m, y0, y1, y2, M)
        y_stride = pick(m, y_stride0, y_stride1, y_stride2, M)
        width = pick(m, N0, N1, N2, M)
        parts = partials + (m * max_groups + group) * (RANK * 16 * SPLITS)
        if r > HALF:
            expand_run(
                y, y_stride, token, arena, pages + slot * table_stride, num_pages, begin, r, scale,
                column, width, blocks, parts, group >= groups, SPLITS, RANK, BN, WARPS, AT_ONCE, PAGE_ELEMS, ROWS,
                PDL,
            )  # fmt: skip
        if HALF > 0:
            if (r > 0) & (r <= HALF):
                expand_run(
                    y, y_stride, token, arena, pages + slot * table_stride, num_pages, begin, r,
                    scale, column, width, blocks, parts, group >= groups, SPLITS, HALF, BN, WARPS, AT_ONCE,
                    PAGE_ELEMS, ROWS, PDL,
                )  # fmt: skip
        if RUNS:
            unit += blocks
        else:
            unit += gl.num_programs(0)
