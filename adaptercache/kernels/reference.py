"""What every kernel must compute, in plain torch: the path on CPUs.

Semantics:
    y[t] += scaling[s] · (x[t] A[s]ᵀ) B[s]ᵀ   with s = slot of token t, nothing where s = −1

It depends on the tables and the paged layout exactly as kernels do. One adapter comes after the
other, in few calls: its matrices are read where they lie, and gathered only where their cells are
apart; what the tables say of it is read once a batch, which holds it meanwhile.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.stack import Group, LoraStack
from adaptercache.kernels.work import rows_by_slot
from adaptercache.layout import ALIGN, align

__all__ = ["add_lora_reference"]


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Its rows of the batch, and its row of each of the tables."""

    rows: slice | Tensor
    pages: list[int]
    start: list[int]
    rank: list[int]
    scaling: list[float]


def add_lora_reference(
    outputs: Sequence[Tensor], x: Tensor, batch: LoraBatch, group: Group
) -> None:
    """Add the LoRA terms of modules that share their input, to one tensor a module. All is checked.

    The arithmetic is float32, and rounded once, into ``outputs``.
    """
    stack = batch.stack
    if batch.adapters is None:
        by_slot = rows_by_slot(batch.segments).items()
        batch.adapters = [_adapter(stack, slot, rows) for slot, rows in by_slot]
    x = x.float()
    for its in batch.adapters:
        x_rows = x[its.rows]
        for y, site, width in zip(outputs, group.sites, group.widths, strict=True):
            rank, start = its.rank[site], its.start[site] * ALIGN
            if not rank:
                continue
            a = _elements(stack, its, start, rank * group.in_features).view(rank, -1)
            start += align(rank * group.in_features)
            b = _elements(stack, its, start, rank * width).view(rank, -1)
            term = (x_rows @ a.t() @ b).mul_(its.scaling[site])
            # Not by addmm, which may round at the size of y with each product that it adds up.
            if y.dtype == torch.float32 and isinstance(its.rows, slice):
                y[its.rows].add_(term)
            else:
                y[its.rows] = term.add_(y[its.rows]).to(y.dtype)


def _adapter(stack: LoraStack, slot: int, rows: MutableSequence[int]) -> _Adapter:
    first, end = rows[0], rows[-1] + 1  # they rise
    tables = (stack.pages, stack.start, stack.rank, stack.scaling)
    return _Adapter(
        slice(first, end) if end - first == len(rows) else torch.tensor(list(rows)),
        *(table[slot].tolist() for table in tables),
    )


def _elements(stack: LoraStack, its: _Adapter, start: int, count: int) -> Tensor:
    """``count`` elements of its flat vector from ``start`` on, in float32."""
    arena, (rows, num_pages, elems) = stack.arena, stack.arena.shape
    cells = [
        cell % rows * num_pages + its.pages[cell // rows]
        for cell in range(start // elems, (start + count - 1) // elems + 1)
    ]
    offset = start % elems
    if cells[-1] - cells[0] == len(cells) - 1 and cells == sorted(cells):  # side by side
        offset += cells[0] * elems
        return arena.view(-1)[offset : offset + count].float()
    gathered = arena.view(-1, elems)[cells].view(-1)
    return gathered[offset : offset + count].float()
