"""Launches of the Triton kernels. Imports triton, so it is imported only where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaptercache.kernels.binary import has_pdl
from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.tuning import modules_at_once
from adaptercache.kernels.variants import pair_for

__all__ = ["add_lora_triton"]


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


def _launch_pair(
    outputs: Sequence[Tensor], x: Tensor, batch: LoraBatch, work: Tensor, sites: list[int]
) -> None:
    stack, rows, device = batch.stack, batch.num_rows, batch.stack.device
    pair = pair_for(stack, x.shape[1], [y.shape[1] for y in outputs], batch.rank_class, rows)
    partials, counters = stack.scratch(rows * pair.scratch, rows * pair.counters)
    units = rows
    shape: tuple[Any, ...] = (work,)
    if not batch.shape.is_small:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        units = batch.shape.max_groups if capturing else max(1, batch.num_groups)
        shape = (work, batch.shape.max_groups)
    tables = (stack.arena, stack.pages, stack.start, stack.rank)
    paging = (stack.table.stride(0), stack.shape.num_pages, *_three(sites))
    strides = [y.stride(0) for y in outputs]
    aligned = not (x.data_ptr() % 16 or x.stride(0) % 16)
    for y, stride in zip(outputs, strides, strict=True):
        aligned = aligned and not (y.data_ptr() % 16 or stride % 16)
    pdl = has_pdl(device)
    pair.shrink.launch(
        units * pair.shrink_programs,
        (x, x.stride(0), *tables, *paging, *shape, partials, counters, rows), device,
        aligned=aligned, pdl=pdl and batch.has_launched,
    )  # fmt: skip
    pair.expand.launch(
        units * pair.expand_programs,
        (*_three(outputs), *_three(strides), *tables, stack.scaling, *paging, *shape, partials,
         rows), device,
        aligned=aligned, pdl=pdl,
    )  # fmt: skip


def _three(values: Sequence[Any]) -> list[Any]:
    """Kernels take three of each; the last is repeated, and not looked at."""
    return [*values, *(values[-1] for _ in range(3 - len(values)))]
