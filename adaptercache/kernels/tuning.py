"""The choice of block sizes: one rule, known from a launch's shape before anything runs.

From sweeps of block sizes on an H200, which `benchmarks/tune_kernels.py` repeats on other GPUs.

What carries over to other GPUs: memory is read in segments of 512 bytes and more; a thread of the
matrix-vector path holds all rows of its columns, so that nothing is exchanged; programs that stride
over work are no more than fit at once (see `binary`), so a few more of them are worth a few spilled
words; and loops are long enough to hide the memory's latency behind their own pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptercache.kernels.work import LARGE_TILE, LONG, SHORT, SMALL

__all__ = [
    "Bgmv",
    "Fragments",
    "SGMV_RANKS",
    "Sgmv",
    "all_singles",
    "bgmv_blocks",
    "fragment_blocks",
    "modules_at_once",
    "rows_alike",
    "sgmv_blocks",
    "sgmv_rank",
]

SGMV_RANKS = (16, 32, 64, 128, 256, 512)
"""That `sgmv`'s kernels are compiled for: the rank classes, and 32, since three modules' rows of A
for rank 64 leave a multiprocessor room for one program."""

UNALIGNED = 32
"""Columns at once where a width is no multiple of 16: every element looks up its own page."""
FROM_L2 = 20 << 20
"""Elements that the L2 passes on to all tokens of a launch in no more time than groups take."""
SHARED_BYTES = 160 << 10
"""Of a multiprocessor's shared memory, for one program: what data-center GPUs since the A100 have.
Others get fewer stages (see `Binary.compile`)."""
HALF_BYTES = 112 << 10
"""Likewise, for one of two programs: what data-center GPUs since the H100 have."""


@dataclass(frozen=True, slots=True)
class Bgmv:
    """``bk``, ``bn``: columns of A and of Bᵀ a program, for a single; ``group_…``, for a group.
    ``dot_bk``: at once on the tensor cores. ``in_runs``: an expand's program does blocks side by
    side. ``all_singles``: groups are not used; else, where the sum of the tokens' ranks is at most
    ``from_l2``, neither. ``…_words``: that a thread keeps at most."""

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
    all_singles: bool
    from_l2: int
    shrink_words: int | None
    expand_words: int | None


@dataclass(frozen=True, slots=True)
class Fragments:
    """``bk``: columns of A a warp. ``strips``: blocks of columns that an expand's program has at
    once, up to rank 16. ``…_words``: that a thread keeps at most."""

    bk: int
    strips: int
    shrink_warps: int
    expand_warps: int
    shrink_words: int
    expand_words: int

    def parts(self, in_features: int) -> int:
        """Of K."""
        return -(-in_features // (self.bk * self.shrink_warps))


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


def sgmv_rank(largest: int) -> int:
    """Of the kernels for a batch of ranks up to ``largest``."""
    return next(rank for rank in SGMV_RANKS if largest <= rank)


def _divisor(widths: Sequence[int], most: int) -> int:
    """The largest power of two, up to ``most``, that divides all widths."""
    block = most
    while any(width % block for width in widths):
        block //= 2
    return block


def _power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def all_singles(elements: int, rank_class: int, num_rows: int) -> bool:
    """Whether tokens that share an adapter are best done as if they didn't: the L2 serves them, and
    a group's chain of steps takes 2 to 5 µs more than a single's. ``elements``: of A and B, a rank.
    """
    return num_rows <= SHORT or num_rows * rank_class * elements <= FROM_L2


def rows_alike(elements: int, rank_class: int, num_rows: int) -> int:
    """The most rows that are served by the same binaries as these; over 2,048, one more."""
    shared = FROM_L2 // (rank_class * elements)
    steps = (SHORT, min(max(shared, SHORT), SMALL), SMALL, LONG)
    return next((most for most in steps if num_rows <= most), LONG + 1)


def bgmv_blocks(
    in_features: int,
    out_features: Sequence[int],
    rank_class: int,
    *,
    itemsize: int,
    is_short: bool,
    all_singles: bool,
) -> Bgmv:
    """For few tokens; ``is_short``: so few that more, smaller programs are done sooner."""
    bk = _divisor([in_features], 256 if is_short and rank_class <= 16 else 512)
    bn = _divisor(out_features, 512)
    if min(bk, bn) < 16:
        bk = bn = UNALIGNED
    return Bgmv(
        bk=bk,
        group_bk=max(
            min(bk, 128), min(512 if rank_class <= 16 else 1024, _power_of_2(in_features // 8))
        ),
        dot_bk=min(bk, 128),
        bn=bn,
        group_bn=min(bn, 128 if rank_class <= 64 else max(16, 4096 // rank_class)),
        shrink_warps=max(1, min(2, bk // 256)),
        expand_warps=rank_class // 64 if rank_class >= 256 else 2 if bn * rank_class >= 1024 else 1,
        shrink_stages=3,
        expand_stages=2 if rank_class <= 16 else 1,
        in_runs=rank_class <= 16,
        all_singles=all_singles,
        from_l2=FROM_L2 // (len(out_features) * in_features + sum(out_features)),
        shrink_words={16: 96, 64: 128}.get(rank_class) if bk == 512 and itemsize == 2 else None,
        expand_words={16: 112, 64: 160}.get(rank_class) if itemsize == 2 else None,
    )


def fragment_blocks(
    in_features: int, out_features: Sequence[int], rank_class: int, *, page_elems: int
) -> Fragments | None:
    """For few tokens of 16 bits a number. None: registers don't do for the rank class, or a width
    is no multiple of 64, or a cell none of 512.

    Bytes on their way are what counts: as many programs to a multiprocessor as their registers
    allow. Eight warps to a shrink make the parts fewer that an expand reads: over
    rank 16 it would else read more of them than of B.
    """
    few, short = rank_class <= 16, in_features <= 8192
    bk = _divisor([in_features], 128)
    block = _divisor(out_features, 256)
    if rank_class > 64 or min(bk, block) < 64 or page_elems % 512:
        return None
    return Fragments(
        bk=bk,
        strips=1 if few else 2,
        shrink_warps=min(4 if few and short else 8, _power_of_2(in_features // bk)),
        expand_warps=block // 64,
        shrink_words=80,
        expand_words=96 if few else 168,
    )


def sgmv_blocks(
    in_features: int,
    out_features: Sequence[int],
    rank: int,
    *,
    itemsize: int,
    is_long: bool,
) -> Sgmv:
    """For many tokens; ``is_long``: over 2,048, which are parallel enough with few splits of K.
    Up to rank 32, two shrinks fit a multiprocessor, and so more bytes are on their way."""

    def stages(bk: int) -> int:
        """Of the shrink's pipeline, as shared memory allows."""
        columns = (LARGE_TILE + len(out_features) * rank) * itemsize
        return min(4, (SHARED_BYTES if rank > 32 else HALF_BYTES) // (columns * bk))

    longest = 128 if rank <= 64 else 64
    bk = _divisor([in_features], longest if stages(longest) >= 3 else 64)
    bn = _divisor(out_features, max(16, min(128, 8192 // rank)))
    wide = rank <= 128
    splits = (2 if is_long else 8) if rank <= 32 else 1 if is_long else 4
    if min(bk, bn) < 16:
        bk, bn, wide = UNALIGNED, max(16, min(UNALIGNED, 4096 // rank)), False
    return Sgmv(
        bk=bk,
        splits=max(1, min(in_features // 512, splits)),
        bn=bn,
        shrink_strip=LARGE_TILE if wide else 32 if rank > 128 else 16,
        expand_strip=(64 if rank in (32, 64) else 32) if wide else 16,
        sum_at_once=max(1, 128 // rank),
        shrink_warps=4 if rank <= 32 else 8,
        expand_warps=4 if 32 < rank <= 256 else 8,
        shrink_stages=stages(bk) if wide else 2,
        expand_stages=3 if wide else 2,
    )
