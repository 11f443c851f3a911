"""GPU: the arena, its tables, and the copies into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from adaptercache.errors import AdapterCacheError, CapacityError
from adaptercache.kernels.stack import LoraStack
from adaptercache.layout import ArenaShape, KVLayout, LoraLayout
from adaptercache.packing import VectorSpec
from adaptercache.tiers.streams import Streams

__all__ = ["GpuTier"]

STAGING_BYTES = 16 << 20


class GpuTier:
    """One allocation for adapters and KV blocks, and the tables that kernels read.

    Owns the memory; frees it in `drop`. `write` blocks until the bytes are in place, so it
    belongs to a mover. One `write` at a time; all else is thread-safe.

    Args:
        layout: of the flat vectors.
        shape: of the arena.
        num_slots: rows of the tables.
        device: ``"cuda"``, ``"cuda:1"``, or ``"cpu"``: then the arena is CPU memory.

    Raises:
        CapacityError: the device hasn't that much memory free.
    """

    def __init__(
        self, layout: LoraLayout, shape: ArenaShape, num_slots: int, device: torch.device
    ) -> None:
        self.layout = layout
        self.shape = shape
        self.device = device
        self.streams = Streams(device)
        self._num_slots = num_slots
        self._memory: tuple[LoraStack, Tensor] | None = None  # and the staging buffer
        self.restore()

    @property
    def is_up(self) -> bool:
        """Whether the memory is allocated."""
        return self._memory is not None

    @property
    def stack(self) -> LoraStack:
        """The arena and its tables.

        Raises:
            AdapterCacheError: they are not allocated.
        """
        return self._allocated()[0]

    def _allocated(self) -> tuple[LoraStack, Tensor]:
        if self._memory is None:
            raise AdapterCacheError(
                "the arena is not allocated: after drop_gpu, call restore; after close, it is gone"
            )
        return self._memory

    def restore(self) -> None:
        """Allocate arena and tables, at new addresses, unless they are there."""
        if self._memory is not None:
            return
        page_elems = self.shape.rows * self.shape.page_elems
        pages = max(1, STAGING_BYTES // (page_elems * self.shape.itemsize))
        try:
            stack = LoraStack(self.layout, self.shape, self._num_slots, self.device)
            staging = torch.empty(
                (pages, self.shape.rows, self.shape.page_elems),
                dtype=stack.dtype,
                device=self.device,
            )
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and (
                self.device.type != "cpu" or "allocate" not in str(error)
            ):
                raise
            shape = self.shape
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
            raise CapacityError(
                f"{self.device} has not enough memory for the arena; make gpu_bytes smaller",
                needed=shape.rows * shape.num_pages * shape.page_bytes,
                limit=free,
            ) from error
        self._memory = stack, staging

    def drop(self) -> None:
        """Give the memory back. Nothing may be reading it."""
        self._memory = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(
        self, slot: int, pages: Sequence[int], spec: VectorSpec, pieces: Iterable[Tensor]
    ) -> None:
        """Put an adapter into its pages and its slot's row; returns when it can be read.

        Args:
            pieces: the flat vector's bytes, in order: ``uint8 [n]`` tensors in CPU memory.
        """
        stack, pages_of_staging = self._allocated()
        at = torch.tensor(pages, dtype=torch.int64).to(self.device)
        row = stack.row(spec, pages)
        staging = pages_of_staging.view(torch.uint8).flatten()
        at_once = len(pages_of_staging)
        page_bytes = len(staging) // at_once
        with self.streams.copying():
            written = filled = 0
            for piece in _cut(pieces, len(staging)):
                staging[filled : filled + len(piece)].copy_(piece, non_blocking=True)
                filled += len(piece)
                if filled == len(staging):
                    self._scatter(at[written : written + at_once])
                    written += at_once
                    filled = 0
            self._scatter(at[written : written + -(-filled // page_bytes)])
            stack.table[slot].copy_(row, non_blocking=True)

    def _scatter(self, pages: Tensor) -> None:
        """The first pages of the staging buffer into these pages of the arena."""
        stack, staging = self._allocated()
        if len(pages):
            stack.arena.index_copy_(1, pages, staging[: len(pages)].transpose(0, 1))

    def kv_view(
        self,
        kv: KVLayout,
        layer: int,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The arena's row of a layer as the paged KV tensor ``[num_pages, *shape]``.

        Args:
            shape: of one block; None: ``[2, block_size, kv_heads, head_dim]``.
            dtype: None: the KV layout's. Shape and dtype must make up exactly a cell.

        Raises:
            ValueError: they don't, or there is no such layer.
            AdapterCacheError: the arena is not allocated.
        """
        if not 0 <= layer < self.shape.rows:
            raise ValueError(f"layer {layer}: the arena has rows 0 to {self.shape.rows - 1}")
        dtype = dtype or getattr(torch, kv.dtype)
        shape = tuple(shape or kv.shape)
        block_bytes = torch.Size(shape).numel() * dtype.itemsize
        if block_bytes != self.shape.page_bytes:
            raise ValueError(
                f"a block {list(shape)} of {dtype} is {block_bytes} bytes; a page has "
                f"{self.shape.page_bytes} in each layer"
            )
        cells = self.stack.arena[layer].view(torch.uint8).view(dtype)
        return cells.view(self.shape.num_pages, *shape)


def _cut(pieces: Iterable[Tensor], size: int) -> Iterable[Tensor]:
    """The same bytes, cut so that no piece crosses a multiple of ``size``."""
    at = 0
    for piece in pieces:
        while len(piece):
            head = piece[: size - at % size]
            yield head
            at += len(head)
            piece = piece[len(head) :]
