"""HOST: one arena of CPU memory, page-locked where a GPU will read it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptercache.errors import CacheClosed, CapacityError
from adaptercache.tiers.pinned import give_back, take_pinned

__all__ = ["HostTier"]

log = logging.getLogger(__name__)

SLAB_BYTES = 16 << 20
"""The driver is busy for some ms while it page-locks one, and launches stand."""

AHEAD = 16
"""Slabs that are page-locked before anybody needs them."""

PAUSE_S = 0.001  # between slabs, for launches


class HostTier:
    """Blocks of CPU memory, taken from the system in slabs, a few ahead of their first use.

    Page-locking takes 0.75 s a GiB, so it is done once for each slab, by a thread of its own.
    What has been page-locked is usable meanwhile; only a load that is first to need a slab waits
    for that slab. Plain memory costs nothing to take: it is taken at its first use.

    Owns the memory and the thread until `close`. Thread-safe.

    Args:
        num_blocks: blocks in all.
        block_bytes: bytes a block.
        pinned: page-lock it; the GPU then copies from it at full speed, asynchronously.
        allow_pageable: where the system page-locks no more, take plain memory, and log it once.
        ahead: slabs taken before they are needed; None: 16 where page-locked, else 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        pinned: bool,
        allow_pageable: bool = False,
        ahead: int | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._pinned, self._allow_pageable = pinned, allow_pageable
        self._slab_blocks = max(1, SLAB_BYTES // block_bytes)
        self._num_slabs = -(-num_blocks // self._slab_blocks)
        self._ahead = ahead if ahead is not None else AHEAD if pinned else 0
        self._slabs: dict[int, Tensor] = {}
        self._locked: list[Tensor] = []
        self._changed = threading.Condition()  # guards what follows; never held while taking memory
        self._taking: set[int] = set()
        self._sought = self._ahead  # slabs below it are taken in the background
        self._failed = False  # the background has met a refusal, and rests until somebody asks
        self._closed = False
        self._thread: threading.Thread | None = None
        if self._ahead:
            self._thread = threading.Thread(
                target=self._grow, name="adaptercache-host-grow", daemon=True
            )
            self._thread.start()

    @property
    def taken_bytes(self) -> int:
        """Bytes that were taken from the system so far."""
        with self._changed:
            return sum(slab.numel() for slab in self._slabs.values())

    def views(self, runs: Sequence[tuple[int, int]], nbytes: int) -> list[Tensor]:
        """The first ``nbytes`` bytes of these runs of blocks, in order: ``uint8 [n]`` tensors.

        Blocks only at a slab's first use, while it is page-locked.

        Raises:
            CapacityError: the system refuses more memory, or more page-locked memory.
            CacheClosed: the memory was given back.
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
        with self._changed:
            if self._closed:  # a step that is open may still ask for what it has not waited for
                raise CacheClosed()
            if self._sought <= index + self._ahead:
                self._sought = index + self._ahead + 1 if self._ahead else 0
                self._failed = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: index not in self._taking)
            if index in self._slabs:
                return self._slabs[index]
            self._taking.add(index)
        return self._take(index)

    def _take(self, index: int) -> Tensor:
        """Take a slab that nobody else is taking; the lock is not held."""
        slab: Tensor | None = None
        try:
            blocks = min(self._slab_blocks, self._num_blocks - index * self._slab_blocks)
            slab = self._allocate(blocks * self.block_bytes)
            return slab
        finally:
            with self._changed:
                if slab is not None and not self._closed:
                    self._slabs[index] = slab
                self._taking.discard(index)
                self._changed.notify_all()

    def _grow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                index = self._next()
                if self._closed or index is None:
                    return
                self._taking.add(index)
            try:
                self._take(index)
                time.sleep(PAUSE_S)
            except CapacityError as error:  # whoever needs the slab asks again, and is told
                with self._changed:
                    self._failed = True
                log.warning("%s", error)

    def _next(self) -> int | None:
        """The next slab to take in the background."""
        if self._failed:
            return None
        some = range(min(self._sought, self._num_slabs))
        return next((i for i in some if i not in self._slabs and i not in self._taking), None)

    def _allocate(self, nbytes: int) -> Tensor:
        try:
            if not self._pinned:
                return torch.empty(nbytes, dtype=torch.uint8)
            slab = take_pinned(nbytes)
            self._locked.append(slab)
            return slab
        except (RuntimeError, MemoryError, OSError) as error:
            if self._pinned and self._allow_pageable:
                log.warning("no more memory can be page-locked (%s): copies will be slow", error)
                self._pinned = False
                return self._allocate(nbytes)
            held = self.taken_bytes
            kind = "page-locked CPU memory" if self._pinned else "CPU memory"
            remedy = "make host_bytes smaller"
            if self._pinned:
                remedy += ", raise the limit (`ulimit -l`, the container's memory), or say "
                remedy += "allow_pageable=True and have slow copies"
            raise CapacityError(
                f"the system gives no more {kind}; {remedy}", needed=held + nbytes, limit=held
            ) from error

    def close(self) -> None:
        """Give the memory back. Nobody may use a view any more."""
        with self._changed:
            self._closed = True
            self._slabs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self._locked:
            give_back(self._locked.pop())
