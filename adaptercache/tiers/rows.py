"""Rows of the tables, in CPU memory, from where they go to the GPU."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptercache.kernels.stack import LoraStack
from adaptercache.layout import ALIGN
from adaptercache.packing import VectorSpec, bytes_of

__all__ = ["TableRows"]


class TableRows:
    """A row a slot, page-locked where a GPU reads it; see `LoraStack.row` for what it says.

    A slot's row is written while nothing is under way into the slot. It is made of bytes, since a
    load has to wait for it: as tensors it takes longer than copying the adapter's first chunk.
    """

    def __init__(self, stack: LoraStack) -> None:
        self._rows = torch.empty(
            stack.table.shape, dtype=torch.int32, pin_memory=stack.device.type == "cuda"
        )
        self._views = [bytes_of(row) for row in self._rows]
        self._max_pages = stack.pages.shape[1]

    def write(self, slot: int, spec: VectorSpec, pages: Sequence[int]) -> Tensor:
        """The slot's row, ``int32 [row]`` in CPU memory, for an adapter in these pages."""
        row = array("i", pages).tobytes() + bytes(4 * (self._max_pages - len(pages)))
        self._views[slot][:] = row + _sites_of(spec)
        return self._rows[slot]


def _sites_of(spec: VectorSpec) -> bytes:
    """Start, rank and scaling of every site; made once for an adapter."""
    found: bytes | None = spec.__dict__.get("_table_row")
    if found is None:
        starts = array("i", [start // ALIGN if start >= 0 else -1 for start in spec.starts])
        found = starts.tobytes() + array("i", spec.ranks).tobytes()
        found += array("f", spec.scalings).tobytes()
        spec.__dict__["_table_row"] = found
    return found
