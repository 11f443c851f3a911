"""The GPU's staging: where chunks of adapters arrive before a kernel lays them into cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptercache.kernels.cells import lay_into_cells
from adaptercache.kernels.stack import LoraStack

__all__ = ["RING", "Buffer", "Source", "Staging"]

RING = 3
"""Buffers: one that is being filled, one that is being emptied, and one for unevenness."""


@dataclass(slots=True)
class Buffer:
    """``cells [pages, rows, words]``, ``bytes`` the same memory; ``emptied`` is the event of the
    scatter that read it last."""

    cells: Tensor
    bytes: Tensor
    emptied: torch.cuda.Event | None = None


class Staging:
    """A ring of buffers. Owns their memory. Not thread-safe: one transfer is queued at a time.

    Args:
        pages: of each buffer.
        lay: the scatter.
    """

    def __init__(
        self,
        stack: LoraStack,
        pages: int,
        lay: Callable[[Tensor, Tensor, Tensor], None] = lay_into_cells,
    ) -> None:
        shape = stack.shape
        self._buffers: list[Buffer] = []
        for _ in range(RING):
            cells = torch.empty(
                (pages, shape.rows, shape.page_elems), dtype=stack.dtype, device=stack.device
            )
            self._buffers.append(Buffer(cells.view(torch.int64), cells.view(torch.uint8).flatten()))
        self._turn = 0
        self._lay = lay
        self._arena = stack.arena.view(torch.int64)  # moved eight bytes at a time
        # It compiles the kernel; nobody has the page yet.
        self.lay(self._buffers[0], torch.zeros(1, dtype=torch.int32, device=stack.device))

    def next(self) -> Buffer:
        """The next buffer of the ring."""
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]

    def lay(self, buffer: Buffer, pages: Tensor) -> None:
        """Scatter a buffer's first pages into the cells of these: ``int32 [n]`` on the GPU."""
        self._lay(self._arena, buffer.cells[: len(pages)], pages)


class Source:
    """Pieces of bytes, read as one."""

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self._pieces = iter(pieces)
        self._piece = torch.empty(0, dtype=torch.uint8)

    def copy_into(self, target: Tensor) -> None:
        """Queue copies of as many bytes as ``target`` has, on the current stream."""
        while len(target):
            while not len(self._piece):
                self._piece = next(self._pieces)
            count = min(len(target), len(self._piece))
            target[:count].copy_(self._piece[:count], non_blocking=True)
            target, self._piece = target[count:], self._piece[count:]
