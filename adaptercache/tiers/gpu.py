"""GPU: the arena, its tables, and the copies into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from adaptercache.errors import AdapterCacheError, CapacityError
from adaptercache.kernels.stack import LoraStack
from adaptercache.layout import ArenaShape, KVLayout, LoraLayout
from adaptercache.packing import VectorSpec
from adaptercache.tiers.memory import free_bytes
from adaptercache.tiers.streams import Streams
from adaptercache.tiers.transfer import Arrivals, Transfer
from adaptercache.tiers.ways import Wait, Ways

__all__ = ["GpuTier"]


class GpuTier:
    """One allocation for adapters and KV blocks, and the tables that kernels read.

    Owns the memory; frees it in `drop`. `write` blocks until the bytes are in place, so it
    belongs to a mover; several may be under way. Thread-safe.

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
        self._memory: tuple[LoraStack, Ways] | None = None
        self._coming: dict[int, Transfer] = {}  # by slot
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

    def _allocated(self) -> tuple[LoraStack, Ways]:
        if self._memory is None:
            raise AdapterCacheError(
                "the arena is not allocated: after drop_gpu, call restore; after close, it is gone"
            )
        return self._memory

    @torch.inference_mode(False)  # else only that mode could write to what is made
    def restore(self) -> None:
        """Allocate arena and tables, at new addresses, unless they are there.

        Raises:
            CapacityError: there is not so much memory; what was taken of it is given back.
        """
        if self._memory is not None:
            return
        try:
            stack = LoraStack(self.layout, self.shape, self._num_slots, self.device)
            with self.streams.scatter.use():  # its device is current, too
                ways = Ways.of(self.streams, stack)
            if self.device.type == "cuda":  # filled on this thread's stream, written on others
                torch.cuda.synchronize(self.device)
            self._memory = stack, ways
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and (
                self.device.type != "cpu" or "allocate" not in str(error)
            ):
                raise
            asked = self.shape.rows * self.shape.num_pages * self.shape.page_bytes
            free = free_bytes(self.device)
            raise CapacityError(
                f"{self.device} has no {asked / 2**30:.2f} GiB for the arena, of which "
                f"{free / 2**30:.2f} GiB are free: make gpu_bytes smaller, or a share of what is "
                "free (gpu_bytes=0.8), or make the cache before others take the memory",
                needed=asked,
                limit=free,
            ) from error

    def drop(self) -> None:
        """Give the memory back. Nothing may be reading it."""
        self.streams.drain()
        self._memory = None
        self._coming.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def expect(
        self,
        slot: int,
        pages: Sequence[int],
        spec: VectorSpec,
        pieces: Callable[[], Iterable[Tensor]],
        after: int = 0,
        wait: Wait = Wait.SOMEBODY,
    ) -> Transfer:
        """An adapter is to come into these pages, which are free, and this slot. Touches no CUDA.

        Args:
            after: the last step that may use what was there (see `streams`).
            wait: who waits for it.
            pieces: gives the flat vector's bytes, in order: ``uint8 [n]`` tensors in CPU memory.
        """
        _, ways = self._allocated()
        way = ways.of_wait(wait)
        transfer = Transfer(self.streams, way, slot, pages, spec, pieces, after)
        if wait is Wait.A_STEP:
            transfer.lead()
        self._coming[slot] = transfer
        return transfer

    def write(self, slot: int, transfer: Transfer) -> None:
        """Bring it; returns when it can be read. Raises as `Transfer.run`; then a step that has
        the slot by now is still told, when it waits."""
        transfer.run()
        if self._coming.get(slot) is transfer:
            del self._coming[slot]

    def give_up(self, slot: int) -> None:
        """What was expected in this slot will not be written; nothing of it is under way."""
        self._coming.pop(slot, None)

    def arrivals(self, slots: Iterable[int]) -> Arrivals | None:
        """What a step that reads these slots waits for; None where all are in place."""
        found = [self._coming.get(slot) for slot in slots]
        transfers = [transfer for transfer in found if transfer is not None]
        return Arrivals(self.device, transfers) if transfers else None

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
