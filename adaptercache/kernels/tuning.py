"""The choice of block sizes: one rule, known from a launch's shape before anything runs.

Measured on an H200 (`benchmarks/bench_kernels.py`). What carries over to other GPUs: rows are read
in segments of 512 bytes and more; a program of the matrix-vector path holds a whole 16-row tile in
few registers, so that many programs are in flight; and where a width is no multiple of 16, every
element looks up its own page, which is right and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bgmv", "Sgmv", "bgmv_blocks", "modules_at_once", "sgmv_blocks"]

UNALIGNED = 64


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


@dataclass(frozen=True, slots=True)
class Sgmv:
    """``splits`` of K; ``run``: blocks of columns that a program does one after another."""

    bk: int
    splits: int
    bn: int
    run: int
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


def bgmv_blocks(in_features: int, out_features: Sequence[int], rank_class: int) -> Bgmv:
    """For few tokens."""
    bk, bn = _divisor([in_features], 512), _divisor(out_features, 512)
    if min(bk, bn) < 16:
        bk = bn = UNALIGNED
    # The fewer parts of K, the less an expand adds up; chunks of rank are programs of their own.
    parts = 8 if rank_class == 16 else 4
    group_bk = max(bk, 1 << (in_features // parts - 1).bit_length())
    return Bgmv(
        bk=bk,
        group_bk=group_bk,
        dot_bk=min(bk, 128),
        bn=bn,
        group_bn=min(bn, max(16, min(128, 4096 // rank_class))),
        shrink_warps=2 if bk == 512 else 1,
        expand_warps=rank_class // 64 if rank_class >= 256 else 2 if bn == 512 else 1,
        shrink_stages=3,
        expand_stages=2,
    )


def sgmv_blocks(
    in_features: int, out_features: Sequence[int], rank_class: int, tokens: int
) -> Sgmv:
    """For many tokens."""
    bk = _divisor([in_features], 256 if rank_class <= 16 else 64)
    bn = _divisor(out_features, max(16, min(128, 4096 // rank_class)))
    if min(bk, bn) < 16:
        bk = bn = max(16, min(UNALIGNED, 4096 // rank_class))
    return Sgmv(
        bk=bk,
        splits=1 if in_features < 8 * bk else 4 if tokens < 4096 else 2,
        bn=bn,
        run=4,
        shrink_warps=4 if rank_class <= 128 else 8,
        expand_warps=4 if rank_class <= 256 else 8,
        shrink_stages=2,
        expand_stages=3,
    )
