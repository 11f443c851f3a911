"""The GPU's staging: where chunks of adapters arrive before they are laid into cells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptercache.kernels.cells import lay_into_cells
from adaptercache.kernels.stack import LoraStack
from adaptercache.packing import VectorSpec

__all__ = ["CHUNK_BYTES", "FIRST_BYTES", "RING", "Buffer", "Staging"]

CHUNK_BYTES = 8 << 20
"""Of one copy. PCIe runs at full rate from here on."""

FIRST_BYTES = 4 << 20
"""Of an adapter's first copy: a step that waits for its first layers waits for little else."""

RING = 3
"""Buffers: one that is being filled, one that is being emptied, and one for unevenness."""


@dataclass(slots=True)
class Buffer:
    """``cells [pages, rows, page_elems]``, ``bytes`` the same memory; ``emptied`` is the event of
    the scatter that read it last."""

    cells: Tensor
    bytes: Tensor
    emptied: torch.cuda.Event | None = None


class Staging:
    """A ring of buffers, and rows of the tables on their way. Owns their memory.

    Not thread-safe: whoever uses it holds ``lock``, for one whole transfer. ``lay``: the scatter.
    """

    def __init__(
        self, stack: LoraStack, lay: Callable[[Tensor, Tensor, Tensor], None] = lay_into_cells
    ) -> None:
        shape, device = stack.shape, stack.device
        page_bytes = shape.rows * shape.page_bytes
        self._pages = max(1, CHUNK_BYTES // page_bytes)
        self._first = max(1, min(FIRST_BYTES, CHUNK_BYTES) // page_bytes)
        self.lock = threading.Lock()
        self._lay = lay
        self._buffers: list[Buffer] = []
        for _ in range(RING):
            cells = torch.empty(
                (self._pages, shape.rows, shape.page_elems), dtype=stack.dtype, device=device
            )
            whole = cells.view(torch.uint8).flatten()
            self._buffers.append(Buffer(cells.view(torch.int64), whole))
        self._turn = 0
        self._arena = stack.arena.view(torch.int64)  # moved eight bytes at a time
        pinned = device.type == "cuda"
        self._rows = torch.empty(stack.table.shape, dtype=torch.int32, pin_memory=pinned)
        self.rows = torch.zeros_like(stack.table)
        self.lay(self._buffers[0], 0, 0, 1)  # compiles the kernel; nobody has the page yet

    def next(self) -> Buffer:
        """The next buffer of the ring."""
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]

    def send_row(self, stack: LoraStack, slot: int, spec: VectorSpec, pages: Sequence[int]) -> None:
        """Make a slot's row of the table, and copy it into ``rows`` on the GPU."""
        self._rows[slot].copy_(stack.row(spec, pages))
        self.rows[slot].copy_(self._rows[slot], non_blocking=True)

    def lay(self, buffer: Buffer, slot: int, first: int, count: int) -> None:
        """Scatter a chunk into the cells of ``count`` pages, the slot's from ``first`` on."""
        self._lay(self._arena, buffer.cells[:count], self.rows[slot, first : first + count])

    def chunks(self, num_pages: int) -> Iterator[tuple[int, int]]:
        """``(first page, number of pages)`` of each copy that an adapter of as many pages takes."""
        first, most = 0, self._first
        while first < num_pages:
            count = min(most, num_pages - first)
            yield first, count
            first, most = first + count, self._pages
