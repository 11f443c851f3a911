"""Launches of the Triton kernels. Imports triton, so it is imported only where they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaptercache.kernels.binary import INTERPRETED, Address, address
from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.stack import Group
from adaptercache.kernels.tuning import all_singles, modules_at_once, sgmv_rank
from adaptercache.kernels.variants import Pair, compile_group, pair_for, scratch_of
from adaptercache.kernels.work import LONG, SHORT

__all__ = ["add_lora_triton"]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A pair of launches for up to three modules of a group, and the arguments that stay."""

    pair: Pair
    sums: int
    counters: int
    """A row, of `LoraStack.scratch`."""
    modules: slice
    to_shrink: tuple[Address | int, ...]
    to_expand: tuple[Address | int, ...]


def add_lora_triton(
    y: Tensor | Sequence[Tensor], x: Tensor, batch: LoraBatch, group: Group
) -> None:
    """Add the LoRA terms of modules that share their input. All is checked.

    Makes a pair of launches for up to three modules, and nothing else: no allocation but that of
    scratch at its first use, no synchronisation.
    """
    rows, stack = batch.num_rows, batch.stack
    if not (rows and stack.num_slots):  # kernels look up a slot before they know of any
        return
    work = address(batch.work())
    alone = batch.shape.is_small and all_singles(group.elements, batch.rank_class, rows)
    x_at, x_stride = address(x), x.stride(0)
    outputs, strides, aligned = _outputs(y, group)
    aligned = aligned and not (x_stride % 16 or x.data_ptr() % 16)
    of_batch: tuple[Any, ...] = (work,)
    units, rank = rows, batch.rank_class
    if not batch.shape.is_small:
        of_batch = (work, batch.shape.max_groups)
        if _is_captured(x):  # replays may bring more
            units = batch.shape.max_groups
        else:
            units, rank = max(1, batch.num_groups), sgmv_rank(batch.max_rank)
    of_rows = (rows <= SHORT, batch.shape.is_small, rows > LONG)
    kind = (rank, batch.rank_class, *of_rows, alone, aligned)
    launches = group.launches.get(kind)
    if launches is None:
        launches = group.launches[kind] = _launches(batch, group, rank, alone, aligned)
    for launch in launches:
        pair = launch.pair
        sums, zeros = stack.scratch(rows * launch.sums, rows * launch.counters)
        partials = address(sums)
        counters = (address(zeros),) if pair.counters else ()
        pair.shrink.launch(
            units * pair.shrink_programs,
            (x_at, x_stride, *launch.to_shrink, *of_batch, partials, *counters, rows),
            aligned=aligned,
            pdl=pair.pdl and batch.has_launched,
        )
        at, apart = _three(outputs[launch.modules]), _three(strides[launch.modules])
        pair.expand.launch(
            units * pair.expand_programs,
            (*at, *apart, *launch.to_expand, *of_batch, partials, rows),
            aligned=aligned,
            pdl=pair.pdl,
        )
        batch.has_launched = True


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _launches(
    batch: LoraBatch, group: Group, rank: int, alone: bool, aligned: bool
) -> tuple[_Launch, ...]:
    stack, at_once = batch.stack, modules_at_once(rank)
    k, rows = group.in_features, batch.num_rows
    sums = counters = 0
    if rank != batch.rank_class and not INTERPRETED:
        # A capture of the same call takes those of the class, and can neither compile nor allocate.
        of_capture = (stack, k, group.widths, batch.rank_class, rows)
        compile_group(*of_capture, aligned=aligned)
        sums, counters = scratch_of(*of_capture)
    tables = tuple(map(address, (stack.arena, stack.pages, stack.start, stack.rank)))
    launches = []
    for i in range(0, len(group.modules), at_once):
        modules = slice(i, i + at_once)
        its = (k, group.widths[modules], rank, rows)
        pair = pair_for(stack, *its, all_singles=alone, aligned=aligned)
        paging = (stack.table.stride(0), stack.shape.num_pages, *_three(group.sites[modules]))
        to_expand = (*tables, address(stack.scaling), *paging)
        scratch = max(pair.scratch, sums), max(pair.counters, counters)
        launches.append(_Launch(pair, *scratch, modules, (*tables, *paging), to_expand))
    return tuple(launches)


def _outputs(y: Tensor | Sequence[Tensor], group: Group) -> tuple[list[Address], list[int], bool]:
    """Where each module's y lies, its row stride, and whether all are multiples of 16."""
    if isinstance(y, Tensor):
        if INTERPRETED:
            y = y.split(group.widths, dim=1)
        else:  # without a tensor a module, which take longer to make than a launch
            at, itemsize, stride = y.data_ptr(), y.itemsize, y.stride(0)
            addresses: list[Address] = []
            aligned = not stride % 16
            for width in group.widths:
                addresses.append(at)
                aligned = aligned and not at % 16
                at += width * itemsize
            return addresses, [stride] * len(addresses), aligned
    strides = [output.stride(0) for output in y]
    aligned = not any(stride % 16 for stride in strides)
    aligned = aligned and not any(output.data_ptr() % 16 for output in y)
    return [address(output) for output in y], strides, aligned


def _three(values: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    """Kernels take three of each; the last is repeated, and not looked at."""
    return (*values, *[values[-1]] * (3 - len(values)))
