"""The choice of block sizes: one rule, known from a launch's shape before anything runs.

From sweeps of block sizes on an H200, before the kernels' last change: `in_runs`, and the tiles of
rank classes over 16, are not measured yet. `benchmarks/tune_kernels.py` tries others.

What carries over to other GPUs: memory is read in segments of 512 bytes and more; a thread of the
matrix-vector path holds all rows of its columns, so that nothing is exchanged; programs that stride
over work are no more than fit at once (see `binary`); and loops are long enough to hide the
memory's latency behind their own pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptercache.kernels.work import LARGE_TILE

__all__ = ["Bgmv", "Sgmv", "bgmv_blocks", "modules_at_once", "sgmv_blocks"]

UNALIGNED = 32
"""Columns at once where a width is no multiple of 16: every element looks up its own page."""


@dataclass(frozen=True, slots=True)
class Bgmv:
    """``bk``, ``bn``: columns of A and of Bᵀ a program, for a single; ``group_…``, for a group;
    ``dot_bk``: at once on the tensor cores."""

    bk: int
    group_bk: int
    dot_bk: int
    bn: int
    group_bn: int
    shrink_warps: int
    expand_warps: int
    shrink_stages: int
    expand_stages: int
    in_runs: bool


@dataclass(frozen=True, slots=True)
class Sgmv:
    """``splits`` of K; ``…_strip``: tokens at once; ``sum_at_once``: parts of K that one program
    adds up at once in the end, as registers allow."""

    bk: int
    splits: int
    bn: int
    shrink_strip: int
    expand_strip: int
    sum_at_once: int
    shrink_warps: int
    expand_warps: int
    shrink_stages: int
    expand_stages: int


def modules_at_once(rank_class: int) -> int:
    """Modules of a group that one pair of launches takes: as registers allow."""
    return 3 if rank_class <= 64 else 1


def _divisor(widths: Sequence[int], most: int) -> int:
    """The largest power of two, up to ``most``, that divides all widths."""
    block = most
    while any(width % block for width in widths):
        block //= 2
    return block


def _power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def bgmv_blocks(in_features: int, out_features: Sequence[int], rank_class: int) -> Bgmv:
    """For few tokens."""
    bk = _divisor([in_features], 512)
    bn = _divisor(out_features, max(128, 8192 // rank_class))
    if min(bk, bn) < 16:
        bk = bn = UNALIGNED
    dot_bk = min(bk, 128)
    return Bgmv(
        bk=bk,
        # The fewer parts of K, the less an expand adds up; the more, the sooner they are done.
        group_bk=max(dot_bk, min(512, _power_of_2(in_features // 8))),
        dot_bk=dot_bk,
        bn=bn,
        group_bn=min(bn, max(16, min(128, 8192 // rank_class))),
        shrink_warps=max(1, min(2, bk // 256)),
        expand_warps=rank_class // 64 if rank_class >= 256 else 2 if bn * rank_class >= 1024 else 1,
        shrink_stages=3,
        expand_stages=1,
        in_runs=True,
    )


def sgmv_blocks(in_features: int, out_features: Sequence[int], rank_class: int) -> Sgmv:
    """For many tokens."""
    bk = _divisor([in_features], 128 if rank_class <= 16 else 64)
    bn = _divisor(out_features, max(16, min(128, 8192 // rank_class)))
    wide = rank_class <= 128
    if min(bk, bn) < 16:
        bk, bn, wide = UNALIGNED, max(16, min(UNALIGNED, 4096 // rank_class)), False
    return Sgmv(
        bk=bk,
        splits=max(1, min(16, in_features // 512)),
        bn=bn,
        shrink_strip=LARGE_TILE if wide else 32 if rank_class > 128 else 16,
        expand_strip=32 if wide else 16,
        sum_at_once=max(1, 128 // rank_class),
        shrink_warps=4 if rank_class <= 16 else 8,
        expand_warps=4 if 16 < rank_class <= 256 else 8,
        shrink_stages=3 if wide else 2,
        expand_stages=3 if wide else 2,
    )
