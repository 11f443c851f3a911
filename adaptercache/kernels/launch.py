"""Launches of the Triton kernels. Imports triton, so it is imported only where they run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from adaptercache.kernels import bgmv, sgmv
from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.tuning import bgmv_blocks, modules_at_once, sgmv_blocks

__all__ = ["add_lora_triton"]

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
    at_once = modules_at_once(batch.rank_class)
    work = batch.work()
    for i in range(0, len(modules), at_once):
        sites = [batch.stack.site(layer, module) for module in modules[i : i + at_once]]
        launch = _bgmv if batch.is_small else _sgmv
        launch(list(outputs[i : i + at_once]), x, batch, work, sites)
        batch.has_launched = True


def _bgmv(
    outputs: list[Tensor], x: Tensor, batch: LoraBatch, work: Tensor, sites: list[int]
) -> None:
    k, widths = x.shape[1], [y.shape[1] for y in outputs]
    blocks = bgmv_blocks(k, widths, batch.rank_class)
    splits = -(-k // blocks.bk)
    chunks = batch.rank_class // 16
    partials = batch.stack.scratch(len(sites) * batch.num_rows * splits * batch.rank_class)
    aligned = not (k % blocks.bk or any(width % blocks.bn for width in widths))
    paged, tables = _paged(batch), _tables(batch)
    multiprocessors = _multiprocessors(batch.stack.device)
    units = batch.num_rows * len(sites) * chunks * splits
    bgmv.bgmv_shrink[min(units, multiprocessors * blocks.shrink_programs),](
        x, x.stride(0), *tables, *_three(sites), work, batch.capacity, partials,
        batch.num_rows,
        K=k, M=len(sites), RANK=batch.rank_class, BK=blocks.bk, DOT_BK=blocks.dot_bk,
        ALIGNED=aligned, num_warps=blocks.shrink_warps, **paged, **_pdl(batch, first=True),
    )  # fmt: skip
    strips = sum(-(-width // blocks.bn) for width in widths)
    bgmv.bgmv_expand[min(batch.num_rows * strips, multiprocessors * blocks.expand_programs),](
        *_three(outputs), *_three([y.stride(0) for y in outputs]), *tables[:4],
        batch.stack.scaling, *tables[4:], *_three(sites), work, batch.capacity, partials,
        batch.num_rows,
        K=k, **_widths(widths), M=len(sites), SPLITS=splits,
        SPLITS_POW2=triton.next_power_of_2(splits), RANK=batch.rank_class, BN=blocks.bn,
        DOT_BN=blocks.dot_bn, ALIGNED=aligned, num_warps=blocks.expand_warps, **paged,
        **_pdl(batch, first=False),
    )  # fmt: skip


def _sgmv(
    outputs: list[Tensor], x: Tensor, batch: LoraBatch, work: Tensor, sites: list[int]
) -> None:
    k, widths = x.shape[1], [y.shape[1] for y in outputs]
    blocks = sgmv_blocks(k, widths, batch.rank_class, batch.num_rows)
    partials = batch.stack.scratch(len(sites) * blocks.splits * batch.num_rows * batch.rank_class)
    aligned = not (k % blocks.bk or any(width % blocks.bn for width in widths))
    paged, tables = _paged(batch), _tables(batch)
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    tiles = batch.capacity if capturing else max(1, batch.num_tiles)
    sgmv.sgmv_shrink[tiles, blocks.splits](
        x, x.stride(0), *tables, *_three(sites), work, batch.capacity, partials,
        batch.num_rows,
        K=k, M=len(sites), SPLITS=blocks.splits, RANK=batch.rank_class, BM=sgmv.TILE,
        BK=blocks.bk, ALIGNED=aligned, STAGES=blocks.stages, num_warps=blocks.shrink_warps, **paged,
        **_pdl(batch, first=True),
    )  # fmt: skip
    strips = sum(-(-width // blocks.bn) for width in widths)
    sgmv.sgmv_expand[strips, tiles * (sgmv.TILE // blocks.strip)](
        *_three(outputs), *_three([y.stride(0) for y in outputs]), *tables[:4],
        batch.stack.scaling, *tables[4:], *_three(sites), work, batch.capacity, partials,
        batch.num_rows,
        K=k, **_widths(widths), M=len(sites), SPLITS=blocks.splits, RANK=batch.rank_class,
        BM=sgmv.TILE, STRIP=blocks.strip, BN=blocks.bn, ALIGNED=aligned,
        num_warps=blocks.expand_warps, **paged,
        **_pdl(batch, first=False),
    )  # fmt: skip


def _tables(batch: LoraBatch) -> list[Any]:
    stack = batch.stack
    return [
        *(stack.arena, stack.pages, stack.start, stack.rank),
        *(stack.table.stride(0), stack.shape.num_pages),
    ]


def _paged(batch: LoraBatch) -> dict[str, Any]:
    shape = batch.stack.shape
    in_float32 = INTERPRETED or batch.stack.dtype != torch.bfloat16
    return {"PAGE_ELEMS": shape.page_elems, "ROWS": shape.rows, "DOT_IN_FLOAT32": in_float32}


def _three(values: list[Any]) -> list[Any]:
    """Kernels take three of each; the last is repeated, and not looked at."""
    return values + values[-1:] * (3 - len(values))


def _widths(widths: list[int]) -> dict[str, int]:
    return {f"N{m}": widths[m] if m < len(widths) else 0 for m in range(3)}


def _pdl(batch: LoraBatch, *, first: bool) -> dict[str, Any]:
    """Programmatic dependent launch, where the GPU has it.

    A kernel may then start before the one ahead of it has ended. It waits for that before it reads
    x, y or partials, and before it writes; weights, tables and work it reads at once, since they
    were written before the batch's first kernel, which is launched without the attribute.
    """
    if INTERPRETED or not _has_pdl(batch.stack.device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": batch.has_launched or not first}


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
