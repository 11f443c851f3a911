"""Launches of the Triton kernels. Imports triton, so it is imported only where they run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from adaptercache.kernels import bgmv, sgmv
from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.stack import LoraStack
from adaptercache.kernels.tuning import bgmv_blocks, modules_at_once, sgmv_blocks
from adaptercache.kernels.work import LARGE_TILE, SMALL

__all__ = ["add_lora_triton", "compile_group"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def add_lora_triton(
    outputs: Sequence[Tensor], x: Tensor, batch: LoraBatch, modules: Sequence[str], layer: int
) -> None:
    """Add the LoRA terms of modules that share their input; one y a module. All is checked.

    Makes a pair of launches for up to three modules, and nothing else: no allocation but that of
    scratch at its first use, no synchronisation.
    """
    if batch.num_rows == 0:
        return
    work = batch.work()
    at_once = modules_at_once(batch.rank_class)
    for i in range(0, len(modules), at_once):
        sites = [batch.stack.site(layer, module) for module in modules[i : i + at_once]]
        _launch_pair(outputs[i : i + at_once], x, batch, work, sites)
        batch.has_launched = True


def compile_group(
    stack: LoraStack, k: int, widths: Sequence[int], rank_class: int, tokens: int
) -> None:
    """Compile the kernels that batches of ``tokens`` rows need for modules of these widths.

    What is compiled lies in Triton's cache on disk, for other processes too.
    """
    shape = (stack.device, stack.dtype, stack.shape.page_elems, stack.shape.rows)
    at_once = modules_at_once(rank_class)
    weights, ints = stack.dtype, torch.int32
    tables, paging = (weights, ints, ints, ints), (2, 2, 2, 2, 2)
    for i in range(0, len(widths), at_once):
        args = (*shape, k, tuple(widths[i : i + at_once]), rank_class)
        if tokens <= SMALL:
            pair, work = _bgmv_pair(*args), (ints, torch.float32, 2)
            more: tuple[int, ...] = ()
        else:
            pair, work = _sgmv_pair(*args, tokens), (ints, 2, torch.float32, 2)
            more = (2,)
        for pdl in {False, _has_pdl(stack.device)}:
            pair.shrink.compile((weights, 16, *tables, *paging, *work), pdl=pdl)
        pair.expand.compile(
            (*[weights] * 3, *[16] * 3, *tables, torch.float32, *paging, *work, *more),
            pdl=_has_pdl(stack.device),
        )


@dataclass(slots=True)
class _Kernel:
    """A kernel and all its constants: one binary, but for how arguments are aligned."""

    function: Any
    constants: dict[str, Any]
    num_warps: int
    _compiled: dict[bool, Any] = field(default_factory=dict)
    _in_order: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        names = self.function.arg_names
        self._in_order = tuple(self.constants[name] for name in names if name in self.constants)

    def launch(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], *, aligned: bool, pdl: bool
    ) -> None:
        """Queue it. ``aligned``: all pointers and strides that Triton looks at are multiples of 16.

        Triton's own launch looks up the binary by the types and values of all arguments, which
        takes longer than all else here. Among aligned ones nothing is left to look at.
        """
        compiled = self._compiled.get(pdl) if aligned else None
        if compiled is not None:
            compiled[grid](*args, *self._in_order)
            return
        options = {"num_warps": self.num_warps, **({"launch_pdl": True} if pdl else {})}
        compiled = self.function[grid](*args, **self.constants, **options)
        if aligned and compiled is not None:  # the interpreter gives None
            self._compiled[pdl] = compiled

    def compile(self, args: Sequence[Any], *, pdl: bool) -> None:
        """Compile it for arguments like these; a dtype stands for a tensor of it."""
        options = {"num_warps": self.num_warps, **({"launch_pdl": True} if pdl else {})}
        self.function.warmup(*args, grid=(1, 1, 1), **self.constants, **options)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A shrink and its expand, for one shape of group and rank class."""

    shrink: _Kernel
    expand: _Kernel
    scratch: int  # float32 elements a row
    shrink_units: int  # programs at most: a row, and a multiprocessor
    shrink_programs: int
    expand_units: int
    expand_programs: int


def _launch_pair(
    outputs: Sequence[Tensor], x: Tensor, batch: LoraBatch, work: Tensor, sites: list[int]
) -> None:
    stack, rows = batch.stack, batch.num_rows
    is_small = batch.shape.is_small
    strides = [y.stride(0) for y in outputs]
    pair = (_bgmv_pair if is_small else _sgmv_pair)(
        *(stack.device, stack.dtype, stack.shape.page_elems, stack.shape.rows),
        *(x.shape[1], tuple(y.shape[1] for y in outputs), batch.rank_class),
        *(() if is_small else (rows,)),
    )
    partials = stack.scratch(rows * pair.scratch)
    if is_small:
        shrink_grid = (min(rows * pair.shrink_units, pair.shrink_programs), 1, 1)
        expand_grid = (min(rows * pair.expand_units, pair.expand_programs), 1, 1)
        shape: tuple[Any, ...] = (work, partials, rows)
        more: tuple[int, ...] = ()
    else:
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        groups = batch.shape.max_groups if capturing else max(1, batch.num_groups)
        shrink_grid = (groups, pair.shrink_units, 1)
        run = max(1, groups * pair.expand_units // pair.expand_programs)
        expand_grid = (-(-pair.expand_units // run), groups, 1)
        shape = (work, batch.shape.max_groups, partials, rows)
        more = (run,)
    tables = (stack.arena, stack.pages, stack.start, stack.rank)
    paging = (stack.table.stride(0), stack.shape.num_pages, *_three(sites))
    aligned = not x.data_ptr() % 16 and not x.stride(0) % 16
    for y, stride in zip(outputs, strides, strict=True):
        aligned = aligned and not y.data_ptr() % 16 and not stride % 16
    # Weights, tables and work were written before the batch's first kernel, so that one waits.
    pdl = _has_pdl(stack.device)
    pair.shrink.launch(
        shrink_grid, (x, x.stride(0), *tables, *paging, *shape), aligned=aligned,
        pdl=pdl and batch.has_launched,
    )  # fmt: skip
    pair.expand.launch(
        expand_grid,
        (*_three(outputs), *_three(strides), *tables, stack.scaling, *paging, *shape, *more),
        aligned=aligned, pdl=pdl,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _bgmv_pair(
    device: torch.device,
    dtype: torch.dtype,
    page_elems: int,
    rows: int,
    k: int,
    widths: tuple[int, ...],
    rank_class: int,
) -> _Pair:
    blocks = bgmv_blocks(k, widths, rank_class)
    splits, group_splits = -(-k // blocks.bk), -(-k // blocks.group_bk)
    strips = sum(-(-width // blocks.bn) for width in widths)
    aligned = not (k % blocks.bk or any(width % blocks.bn for width in widths))
    paged = _paged(device, dtype, page_elems, rows, aligned)
    multiprocessors = _multiprocessors(device)
    return _Pair(
        _Kernel(
            bgmv.bgmv_shrink,
            {
                **{"K": k, "M": len(widths), "RANK": rank_class, "BK": blocks.bk},
                **{"GROUP_BK": blocks.group_bk, "DOT_BK": blocks.dot_bk, "STAGES": blocks.shrink_stages},
                **paged,
            },
            blocks.shrink_warps,
        ),
        _Kernel(
            bgmv.bgmv_expand,
            {
                **{"K": k, **_widths(widths), "M": len(widths), "SPLITS": splits},
                **{"GROUP_SPLITS": group_splits, "SPLITS_POW2": triton.next_power_of_2(splits)},
                **{"RANK": rank_class, "BN": blocks.bn, "GROUP_BN": blocks.group_bn, **paged},
                "STAGES": blocks.expand_stages,
            },
            blocks.expand_warps,
        ),
        scratch=len(widths) * splits * rank_class,
        shrink_units=len(widths) * splits * rank_class // 16,
        shrink_programs=multiprocessors * blocks.shrink_programs,
        expand_units=strips,
        expand_programs=multiprocessors * blocks.expand_programs,
    )


@lru_cache(maxsize=4096)
def _sgmv_pair(
    device: torch.device,
    dtype: torch.dtype,
    page_elems: int,
    rows: int,
    k: int,
    widths: tuple[int, ...],
    rank_class: int,
    tokens: int,
) -> _Pair:
    blocks = sgmv_blocks(k, widths, rank_class, tokens)
    aligned = not (k % blocks.bk or any(width % blocks.bn for width in widths))
    paged = _paged(device, dtype, page_elems, rows, aligned)
    common = {"M": len(widths), "SPLITS": blocks.splits, "RANK": rank_class, "BM": LARGE_TILE}
    return _Pair(
        _Kernel(
            sgmv.sgmv_shrink,
            {"K": k, **common, "BK": blocks.bk, **paged, "STAGES": blocks.shrink_stages},
            blocks.shrink_warps,
        ),
        _Kernel(
            sgmv.sgmv_expand,
            {
                **{"K": k, **_widths(widths), **common, "BN": blocks.bn, **paged},
                "STAGES": blocks.expand_stages,
            },
            blocks.expand_warps,
        ),
        scratch=len(widths) * blocks.splits * rank_class,
        shrink_units=blocks.splits,
        shrink_programs=1,
        expand_units=sum(-(-width // blocks.bn) for width in widths),
        expand_programs=_multiprocessors(device) * blocks.expand_programs,
    )


def _paged(
    device: torch.device, dtype: torch.dtype, page_elems: int, rows: int, aligned: bool
) -> dict[str, Any]:
    return {
        **{"PAGE_ELEMS": page_elems, "ROWS": rows, "ALIGNED": aligned, "PDL": _has_pdl(device)},
        "DOT_IN_FLOAT32": INTERPRETED or dtype != torch.bfloat16,
    }


def _three(values: Sequence[Any]) -> list[Any]:
    """Kernels take three of each; the last is repeated, and not looked at."""
    return [*values, *values[-1:] * (3 - len(values))]


def _widths(widths: tuple[int, ...]) -> dict[str, int]:
    return {f"N{m}": widths[m] if m < len(widths) else 0 for m in range(3)}


@cache
def _has_pdl(device: torch.device) -> bool:
    """Whether it has programmatic dependent launch.

    A kernel may then start before the one ahead of it has ended. It waits for that before it reads
    x, y or partials, and before it writes; weights, tables and work it reads at once, since they
    were written before the batch's first kernel, which is launched without the attribute.
    """
    return not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
