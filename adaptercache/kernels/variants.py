"""Which binaries a group of modules needs: everything that a launch's constants depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from adaptercache.kernels import bgmv, sgmv
from adaptercache.kernels.binary import INTERPRETED, Binary, has_mma, has_pdl
from adaptercache.kernels.stack import LoraStack
from adaptercache.kernels.tuning import (
    all_singles,
    bgmv_blocks,
    fragment_blocks,
    modules_at_once,
    sgmv_blocks,
)
from adaptercache.kernels.work import LARGE_TILE, LONG, SHORT, SMALL

__all__ = ["Pair", "compile_group", "pair_for", "scratch_of"]

_HAS_GLUON = not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
"""As `fragments` needs it."""
_MOST = 16 << 32
"""Elements of an arena that `fragments` finds with 32 bits: 128 GiB."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A shrink and its expand, for one shape of group and one rank (see `pair_for`)."""

    shrink: Binary
    expand: Binary
    pdl: bool
    scratch: int
    """float32 elements a row."""
    counters: int
    """A row, or a tile; 0: its kernels take none."""
    shrink_programs: int
    """BGMV: that a row can keep busy; SGMV: that a tile can, as also the other."""
    expand_programs: int


def pair_for(
    stack: LoraStack,
    k: int,
    widths: Sequence[int],
    rank: int,
    num_rows: int,
    *,
    all_singles: bool,
    aligned: bool = True,
) -> Pair:
    """The binaries for modules of these widths that share an input of width ``k``. ``rank``: a
    class, or for many rows one of `tuning.SGMV_RANKS`. ``aligned``: as they will be launched (see
    `Binary.launch`)."""
    stacks = (stack.device, stack.dtype, stack.shape.page_elems, stack.shape.rows)
    shape = (k, tuple(widths), rank)
    if num_rows <= SMALL:
        if aligned and _takes_fragments(stack):
            pair = _fragments_pair(*stacks, *shape)
            if pair is not None:
                return pair
        return _bgmv_pair(*stacks, *shape, num_rows <= SHORT, all_singles)
    return _sgmv_pair(*stacks, *shape, num_rows > LONG)


def _takes_fragments(stack: LoraStack) -> bool:
    if not (_HAS_GLUON and stack.dtype.itemsize == 2 and has_mma(stack.device)):
        return False
    shape = stack.shape
    return shape.rows * shape.num_pages * shape.page_elems <= _MOST


def compile_group(
    stack: LoraStack,
    k: int,
    widths: Sequence[int],
    rank: int,
    num_rows: int,
    *,
    aligned: bool = True,
) -> None:
    """Compile what batches of ``num_rows`` rows need for modules of these widths.

    What is compiled lies in Triton's cache on disk, for other processes too.
    """
    for pair in _pairs(stack, k, widths, rank, num_rows, aligned):
        for follows in {False, pair.pdl}:
            pair.shrink.compile(aligned=aligned, pdl=follows)
        pair.expand.compile(aligned=aligned, pdl=pair.pdl)


def scratch_of(
    stack: LoraStack, k: int, widths: Sequence[int], rank: int, num_rows: int
) -> tuple[int, int]:
    """What each of their rows needs of `LoraStack.scratch`."""
    pairs = list(_pairs(stack, k, widths, rank, num_rows, True))
    return max(pair.scratch for pair in pairs), max(pair.counters for pair in pairs)


def _pairs(
    stack: LoraStack, k: int, widths: Sequence[int], rank: int, num_rows: int, aligned: bool
) -> Iterator[Pair]:
    at_once = modules_at_once(rank)
    alone = all_singles(len(widths) * k + sum(widths), rank, num_rows)
    for i in range(0, len(widths), at_once):
        its = widths[i : i + at_once]
        yield pair_for(stack, k, its, rank, num_rows, all_singles=alone, aligned=aligned)


@lru_cache(maxsize=4096)
def _bgmv_pair(
    device: torch.device,
    dtype: torch.dtype,
    page_elems: int,
    rows: int,
    k: int,
    widths: tuple[int, ...],
    rank_class: int,
    is_short: bool,
    alone: bool,
) -> Pair:
    shape = (k, widths, rank_class)
    blocks = bgmv_blocks(*shape, itemsize=dtype.itemsize, is_short=is_short, all_singles=alone)
    types = _types(dtype, torch.int32)
    splits = -(-k // blocks.bk)
    room = max(splits, -(-k // blocks.group_bk))
    aligned = not (k % blocks.bk or any(width % blocks.bn for width in widths))
    paged = _paged(device, dtype, page_elems, rows, aligned)
    shrink = {
        **{"K": k, "M": len(widths), "RANK": rank_class, "BK": blocks.bk, **paged},
        **{"GROUP_BK": blocks.group_bk, "DOT_BK": blocks.dot_bk, "STAGES": blocks.shrink_stages},
        **{"ALL_SINGLES": blocks.all_singles, "FROM_L2": blocks.from_l2, "ROOM": room},
        "VECTOR": _vector(16, blocks.bk, blocks.shrink_warps),
    }
    expand = {
        **{"K": k, **_widths(widths), "M": len(widths), "RANK": rank_class, **paged},
        **{"SPLITS": splits, "SPLITS_POW2": triton.next_power_of_2(splits)},
        **{"ROOM": room, "BN": blocks.bn, "GROUP_BN": blocks.group_bn},
        **{"VECTOR": _vector(rank_class, blocks.bn, blocks.expand_warps)},
        **{"ALL_SINGLES": blocks.all_singles, "FROM_L2": blocks.from_l2},
        **{"IN_RUNS": blocks.in_runs},
        **{"STAGES": blocks.expand_stages},
    }
    return Pair(
        Binary(
            *(bgmv.bgmv_shrink, device, shrink, types[0], blocks.shrink_warps),
            max_words=blocks.shrink_words,
            is_persistent=True,
        ),
        Binary(
            *(bgmv.bgmv_expand, device, expand, types[1], blocks.expand_warps),
            max_words=blocks.expand_words,
            is_persistent=True,
        ),
        pdl=has_pdl(device),
        scratch=len(widths) * room * rank_class,
        counters=len(widths) * rank_class // 16,
        shrink_programs=len(widths) * room * rank_class // 16,
        expand_programs=sum(-(-width // min(blocks.bn, 128)) for width in widths),
    )


@lru_cache(maxsize=4096)
def _fragments_pair(
    device: torch.device,
    dtype: torch.dtype,
    page_elems: int,
    rows: int,
    k: int,
    widths: tuple[int, ...],
    rank_class: int,
) -> Pair | None:
    blocks = fragment_blocks(k, widths, rank_class, page_elems=page_elems)
    if blocks is None:
        return None
    from adaptercache.kernels import fragments  # Gluon, which older releases of Triton have not

    to_shrink, to_expand = _types(dtype, torch.int32)
    splits = blocks.parts(k)
    both = {
        **{"K": k, "M": len(widths), "RANK": rank_class},
        **{"PAGE_ELEMS": page_elems, "ROWS": rows, "PDL": has_pdl(device)},
    }
    shrink = {
        **{**both, "BK": blocks.bk, "WARPS": blocks.shrink_warps},
    }
    expand = {
        **{**both, **_widths(widths), "SPLITS": splits, "AT_ONCE": min(splits, 8)},
        **{"STRIPS": blocks.strips, "WARPS": blocks.expand_warps},
    }
    units = len(widths) * splits * rank_class // 16  # of a group
    return Pair(
        Binary(
            *(fragments.fragment_shrink, device, shrink, (*to_shrink[:-2], to_shrink[-1])),
            blocks.shrink_warps,
            max_words=blocks.shrink_words,
            is_persistent=True,
        ),
        Binary(
            *(fragments.fragment_expand, device, expand, to_expand, blocks.expand_warps),
            max_words=blocks.expand_words,
            is_persistent=True,
        ),
        pdl=has_pdl(device),
        scratch=16 * units,
        counters=0,
        shrink_programs=units,
        expand_programs=sum(widths) // (64 * blocks.expand_warps),
    )


@lru_cache(maxsize=4096)
def _sgmv_pair(
    device: torch.device,
    dtype: torch.dtype,
    page_elems: int,
    rows: int,
    k: int,
    widths: tuple[int, ...],
    rank: int,
    is_long: bool,
) -> Pair:
    blocks = sgmv_blocks(k, widths, rank, itemsize=dtype.itemsize, is_long=is_long)
    types = _types(dtype, torch.int32, 2)
    aligned = not (k % blocks.bk or any(width % blocks.bn for width in widths))
    both = {
        **{"K": k, "M": len(widths), "SPLITS": blocks.splits, "RANK": rank},
        **{"BM": LARGE_TILE, **_paged(device, dtype, page_elems, rows, aligned)},
    }
    shrink = {
        **{**both, "STRIP": blocks.shrink_strip, "BK": blocks.bk},
        **{"STAGES": blocks.shrink_stages, "SUM_AT_ONCE": blocks.sum_at_once},
    }
    expand = {
        **{**both, **_widths(widths), "BN": blocks.bn, "STRIP": blocks.expand_strip},
        "STAGES": blocks.expand_stages,
    }
    columns = sum(-(-width // blocks.bn) for width in widths)
    return Pair(
        Binary(sgmv.sgmv_shrink, device, shrink, types[0], blocks.shrink_warps),
        Binary(sgmv.sgmv_expand, device, expand, types[1], blocks.expand_warps, is_persistent=True),
        pdl=has_pdl(device),
        scratch=len(widths) * blocks.splits * rank,
        counters=LARGE_TILE // blocks.shrink_strip,
        shrink_programs=blocks.splits * (LARGE_TILE // blocks.shrink_strip),
        expand_programs=columns * (LARGE_TILE // blocks.expand_strip),
    )


def _types(dtype: torch.dtype, *work: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of a shrink's and an expand's arguments; strides are multiples of 16."""
    tables, numbers = (dtype, *[torch.int32] * 3), [2] * 5
    sums = torch.float32
    return (
        (dtype, 16, *tables, *numbers, *work, sums, torch.int32, 2),
        (*[dtype] * 3, *[16] * 3, *tables, sums, *numbers, *work, sums, 2),
    )


def _paged(
    device: torch.device, dtype: torch.dtype, page_elems: int, rows: int, aligned: bool
) -> dict[str, Any]:
    return {
        **{"PAGE_ELEMS": page_elems, "ROWS": rows, "ALIGNED": aligned, "PDL": has_pdl(device)},
        "DOT_IN_FLOAT32": INTERPRETED,  # it has no other dot that is right
    }


def _vector(rank_class: int, columns: int, warps: int) -> int:
    """Columns a thread. Of 16 rows it has all of its columns, and adds them up by itself."""
    return max(1, min(8, columns // (32 * warps))) if rank_class == 16 else 8


def _widths(widths: tuple[int, ...]) -> dict[str, int]:
    return {f"N{m}": widths[m] if m < len(widths) else 0 for m in range(3)}
