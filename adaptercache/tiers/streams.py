"""When memory may change its owner while steps are in flight.

The argument. Kernels of a step read the arena and the tables on the cache's one compute stream.
A step's batch holds every slot that it lists, from `step`'s beginning to its end, so none of
these adapters is evicted before the last launch. At the end a fence is recorded on the compute
stream. Hence, for each change of a page's owner:

- adapter → adapter: the old adapter was idle when it was evicted, so each step that read it has
  ended and its launches lie before the latest fence. The mover calls `before_writing`, which
  makes the copy stream wait for that fence, and writes only then.
- KV → adapter: pages may be freed in the midst of a step whose later launches still read them.
  `gave_up` notes which steps were open; `before_writing` waits until those have ended, then for
  the latest fence.
- adapter → KV: KV is written on the compute stream by later launches than all that read the
  adapter. A copy that is under way holds its pages: a loading adapter is never evicted.
- table rows are written by the same mover, on the copy stream, behind the same fence; a slot is
  free only when its adapter was evicted.
- staging and CPU memory: `copied` lets the mover wait for the end of the copy before the adapter
  becomes ready, its copy in CPU memory is let go, or the staging buffer is used again.

On the CPU device launches are done when they return, so the fence is the end of the step itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adaptercache.errors import CacheClosed

__all__ = ["Streams"]


class Streams:
    """The compute stream's fences and the copy stream of one device. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Condition()
        self._open: set[int] = set()
        self._opened = 0
        self._closed = False
        self._awaited = 0  # pages were given up while steps up to this one were open
        self._compute: torch.cuda.Stream | None = None
        self._fence: torch.cuda.Event | None = None
        self._copy = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step that reads the arena. Its launches are made inside, on one stream for all steps.

        Raises:
            ValueError: another stream is current than in the steps before.
        """
        with self._ended:
            self._check_stream()
            self._opened += 1
            number = self._opened
            self._open.add(number)
        try:
            yield
        finally:
            with self._ended:
                if self._compute is not None:
                    self._fence = torch.cuda.Event()
                    self._fence.record(self._compute)
                self._open.discard(number)
                self._ended.notify_all()

    def _check_stream(self) -> None:
        if self._copy is None:
            return
        current = torch.cuda.current_stream(self._device)
        if self._compute is None:
            self._compute = current
        elif self._compute != current:
            raise ValueError("all steps of a cache run on one compute stream")

    def close(self) -> None:
        """Movers that wait for a step to end wait no longer: `copying` raises CacheClosed."""
        with self._ended:
            self._closed = True
            self._ended.notify_all()

    def gave_up(self) -> None:
        """Pages were freed that open steps may still read. Touches no CUDA."""
        with self._ended:
            if self._open:
                self._awaited = self._opened

    @contextmanager
    def copying(self) -> Iterator[None]:
        """A mover's copies into memory that had another owner.

        Blocks the mover, never a step: first until steps that still read what was given up have
        ended, and at the end until the copies are done.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._closed or self._may_write())
            if self._closed:
                raise CacheClosed()
            fence = self._fence
        if self._copy is None:
            yield
            return
        with torch.cuda.stream(self._copy):
            if fence is not None:
                self._copy.wait_event(fence)
            yield
            done = torch.cuda.Event()
            done.record(self._copy)
        done.synchronize()

    def _may_write(self) -> bool:
        return all(number > self._awaited for number in self._open)
