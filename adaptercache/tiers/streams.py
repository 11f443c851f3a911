"""When memory may change its owner while steps are in flight.

The argument. Kernels of a step read and write the arena, and read the tables, on the cache's one
*compute* stream, inside the step. Bytes of adapters come on streams of ours. Either the *copy*
stream brings chunks into staging buffers, from where the *scatter* stream lays them into cells and
sets table rows; or a *direct* stream, one for hints and one for what steps wait for layer by layer,
brings them straight into cells and rows. One transfer goes one way. Nothing else writes cells of
adapters, or rows.

Steps are numbered. A step's batch holds every slot that it lists, from `step`'s beginning to its
end, so none of these adapters is evicted before the last launch. At the end a *fence* is recorded
on the compute stream. Each page and slot remembers the last step that may use what was in it
(`GpuArena`), and a transfer into it comes *after* that step: on the host it waits until that step,
and all before it, have ended (`wait_turn`), and on the GPU the streams that write cells wait for
the first fence that was recorded after that. Hence, for each change of owner:

- adapter → adapter: the last step is the last one whose batch listed the old adapter. What brought
  the old one was over before it could be evicted: a mover has waited for its last events.
- KV → adapter: pages may be freed in the midst of a step whose later launches still use them; the
  last step is the last one that had begun when they were freed.
- adapter → KV: KV is written on the compute stream by later launches than all that read the
  adapter. An adapter on its way is never evicted, and one that failed on its way gives its pages up
  only once our streams are empty (`drain`). So nothing of ours writes the page any more.
- table rows: written where cells are, behind the same fence; a slot is free only when its adapter
  was evicted. The row's copies (in CPU memory, and on the GPU) belong to the slot: no second
  transfer into a slot begins before the first has ended.
- staging: a buffer is filled again on the copy stream behind the event of the scatter that emptied
  it; the scatter stream reads it behind the event of the copy that filled it.
- blocks of CPU memory: held by the load until its last event has come, which is behind all copies
  that read them; after a failure until `drain` has returned.
- an adapter that flows (`Transfer.arrived`: copied while it is still being read from the disk):
  its pages are its own, and no step's, from before the first copy. A chunk's copy is queued by the
  thread that has seen the reads of all its bytes end; nobody writes these bytes again while the
  load holds the blocks. Copies go where a whole transfer's would, behind the same fence, but only
  once the step that they come after has ended, for that thread doesn't wait. Where reading fails,
  or the checksum is another, it waits until our streams are empty (`abandon`) before pages, slot
  and blocks are given up. No step reads what flows: an adapter is leased only when it is whole on
  the GPU or, by a pipelined request, when it is whole and checked in CPU memory.
- a step that reads an adapter still on its way makes the compute stream wait for the events of the
  chunks that it reads (`Transfer.wait`), recorded behind all that writes these chunks' cells. The
  table's row is written before the first of them.

No stream waits in a circle: a stream only ever waits for an event that was recorded before. No
thread does either: `wait_turn` is called by movers alone, without a lock, and a step queues the
chunks that it needs itself if no mover has come to them. That never waits for a turn, since an
adapter on its way is leased only once the steps that it comes after have ended.

On the CPU device launches are done when they return: streams are nothing, and the fence is the end
of the step itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from adaptercache.errors import CacheClosed

__all__ = ["Lane", "Streams"]


class Lane:
    """A stream of our own; on the CPU, where work is done when its call returns, nothing."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority)

    def use(self) -> AbstractContextManager[object]:
        """What is launched in the block goes here."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What is launched from now on waits for ``event``; None has come already."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        """The event that all launched so far has been done. A thread that waits for it sleeps."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def drain(self) -> None:
        """Wait on the host until all launched so far has been done."""
        if self._stream is not None:
            self._stream.synchronize()


class Streams:
    """The compute stream's steps and fences, and the lanes of one device's copies. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Condition()
        self._open: set[int] = set()
        self._opened = 0
        self._closed = False
        self._compute: torch.cuda.Stream | None = None
        # (number, fence): all steps up to the number had ended when the fence was recorded. Those
        # up to _past are over on the GPU, too.
        self._fences: deque[tuple[int, torch.cuda.Event]] = deque()
        self._past = 0
        self.copy = Lane(device)
        # Strided copies: nobody's staged ones stand behind them, and what steps wait for not behind
        # hints.
        self.direct, self.hinted = Lane(device), Lane(device)
        self.scatter = Lane(device, priority=-1)  # short kernels that free what copies wait for
        self.lanes = (self.copy, self.direct, self.hinted, self.scatter)

    # -- steps

    @contextmanager
    def step(self) -> Iterator[int]:
        """A step that reads the arena. Its launches are made inside, on one stream for all steps.

        Yields its number.

        Raises:
            ValueError: another stream is current than in the steps before.
        """
        with self._ended:
            self._check_stream()
            self._opened += 1
            number = self._opened
            self._open.add(number)
        try:
            yield number
        finally:
            with self._ended:
                self._open.discard(number)
                self._record_fence()
                self._ended.notify_all()

    @property
    def last_opened(self) -> int:
        """The number of the last step that has begun; 0: none has."""
        with self._ended:
            return self._opened

    def have_ended(self, number: int) -> bool:
        """Whether this step, and all before it, have made their last launch."""
        with self._ended:
            return self._have_ended(number)

    def _have_ended(self, number: int) -> bool:
        return all(other > number for other in self._open)

    def _check_stream(self) -> None:
        if self._device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._device)
        if self._compute is None:
            self._compute = current
        elif self._compute != current:
            raise ValueError("all steps of a cache run on one compute stream")

    def _record_fence(self) -> None:
        number = min(self._open) - 1 if self._open else self._opened
        if self._compute is None:
            self._past = number
            return
        fence = torch.cuda.Event()
        fence.record(self._compute)
        self._fences.append((number, fence))
        while self._fences and self._fences[0][1].query():
            self._past, _ = self._fences.popleft()

    # -- transfers

    def wait_turn(self, after: int) -> None:
        """Block a mover, never a step, until that step and all before it have ended.

        Raises:
            CacheClosed: the cache is closed.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._closed or self._have_ended(after))
            if self._closed:
                raise CacheClosed()

    def fence(self, after: int) -> torch.cuda.Event | None:
        """What a stream waits for before it writes where that step, which has ended, may have read;
        None: it is over."""
        with self._ended:
            if after <= self._past:
                return None
            return next(fence for number, fence in self._fences if number >= after)

    def drain(self) -> None:
        """Wait on the host until all copies and scatters have been done."""
        for lane in self.lanes:
            lane.drain()

    def close(self) -> None:
        """Movers that wait for a step to end wait no longer: `wait_turn` raises CacheClosed."""
        with self._ended:
            self._closed = True
            self._ended.notify_all()
