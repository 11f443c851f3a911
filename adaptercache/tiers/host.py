"""HOST: one arena of CPU memory, page-locked where a GPU will read it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptercache.errors import CapacityError

__all__ = ["HostTier"]

SLAB_BYTES = 256 << 20


class HostTier:
    """Blocks of CPU memory, taken from the system in slabs as they are first used.

    Page-locking takes 0.75 s a GiB, so it is done once for each slab, by whichever mover first
    needs it, and never on a serving thread. Owns the memory until `close`. Thread-safe.

    Args:
        num_blocks: blocks in all.
        block_bytes: bytes a block.
        pinned: page-lock it; the GPU then copies from it at full speed, asynchronously.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._pinned = pinned
        self._slab_blocks = max(1, SLAB_BYTES // block_bytes)
        self._slabs: dict[int, Tensor] = {}
        self._growing = threading.Lock()

    def views(self, runs: Sequence[tuple[int, int]], nbytes: int) -> list[Tensor]:
        """The first ``nbytes`` bytes of these runs of blocks, in order: ``uint8 [n]`` tensors.

        May block while a slab is page-locked.

        Raises:
            CapacityError: the system refuses more memory, or more page-locked memory.
        """
        views: list[Tensor] = []
        for first, count in runs:
            while count and nbytes:
                slab, offset = divmod(first, self._slab_blocks)
                here = min(count, self._slab_blocks - offset)
                start, size = offset * self.block_bytes, min(here * self.block_bytes, nbytes)
                views.append(self._slab(slab)[start : start + size])
                first, count, nbytes = first + here, count - here, nbytes - size
        assert nbytes == 0, "the runs hold the vector"
        return views

    def _slab(self, index: int) -> Tensor:
        with self._growing:
            if index not in self._slabs:
                blocks = min(self._slab_blocks, self._num_blocks - index * self._slab_blocks)
                self._slabs[index] = self._allocate(blocks * self.block_bytes)
            return self._slabs[index]

    def _allocate(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            held = sum(slab.numel() for slab in self._slabs.values())
            kind = "page-locked CPU memory" if self._pinned else "CPU memory"
            raise CapacityError(
                f"the system gives no more {kind} (see `ulimit -l`); make host_bytes smaller",
                needed=held + nbytes,
                limit=held,
            ) from error

    def close(self) -> None:
        """Give the memory back. Nobody may use a view any more."""
        with self._growing:
            self._slabs.clear()
