"""When memory may change its owner while steps are in flight.

The argument. Kernels of a step read and write the arena, and read the tables, on the cache's one
*compute* stream, inside the step. Bytes of adapters come on two streams of ours: the *copy* stream
brings chunks into staging buffers, and the *scatter* stream lays them into cells and sets table
rows. A step's batch holds every slot that it lists, from `step`'s beginning to its end, so none of
these adapters is evicted before the last launch. At the end a *fence* is recorded on the compute
stream. Cells and rows are written on the scatter stream alone, and each transfer makes it wait for
the latest fence first. Hence, for each change of owner:

- adapter → adapter: the old adapter was idle when it was evicted, so each step that read it has
  ended, and its launches lie before the latest fence. What brought the old one ended earlier on the
  scatter stream.
- KV → adapter: pages may be freed in the midst of a step whose later launches still use them.
  `gave_up` notes which steps were open. `ticket`, drawn when pages are given to an adapter, names
  them; `wait_turn` waits on the host until those have ended, and the fence is taken after that.
- adapter → KV: KV is written on the compute stream by later launches than all that read the
  adapter. An adapter on its way is never evicted, and one that failed on its way gives its pages up
  only once both our streams are empty (`drain`). So nothing of ours writes the page any more.
- table rows: written on the scatter stream, behind the same fence; a slot is free only when its
  adapter was evicted. The row's copies (in CPU memory, and on the GPU) belong to the slot: no
  second transfer into a slot begins before the first has ended.
- staging: a buffer is filled again on the copy stream behind the event of the scatter that emptied
  it; the scatter stream reads it behind the event of the copy that filled it.
- blocks of CPU memory: held by the load until its last event has come, which is behind all copies
  that read them; after a failure until `drain` has returned.
- a step that reads an adapter still on its way makes the compute stream wait for the events of the
  chunks that it reads (`Transfer.wait`), recorded behind those chunks' scatters. Its table row is
  written before the first of them.

No stream waits in a circle: a stream only ever waits for an event that was recorded before, and
whole transfers are queued one after another. No thread does either: `wait_turn` is called by movers
alone, and a step begins a transfer itself if no mover has come to it, which never waits for a turn,
since such adapters are leased only while nobody's turn is awaited (`is_quiet`).

On the CPU device launches are done when they return: streams are nothing, and the fence is the end
of the step itself.
"""

from __future__ import annotations

import threading
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
    """The compute stream's fences, and the lanes of one device's copies. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Condition()
        self._open: set[int] = set()
        self._opened = 0
        self._closed = False
        self._awaited = 0  # pages were given up while steps up to this one were open
        self._compute: torch.cuda.Stream | None = None
        self._fence: torch.cuda.Event | None = None
        self.copy = Lane(device)
        self.scatter = Lane(device, priority=-1)  # short kernels that free what copies wait for

    # -- steps

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
        if self._device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._device)
        if self._compute is None:
            self._compute = current
        elif self._compute != current:
            raise ValueError("all steps of a cache run on one compute stream")

    def gave_up(self) -> None:
        """Pages were freed that open steps may still read. Touches no CUDA."""
        with self._ended:
            if self._open:
                self._awaited = self._opened

    # -- transfers

    def ticket(self) -> int:
        """For pages that are free now: the last step that may still use them."""
        with self._ended:
            return self._awaited

    @property
    def is_quiet(self) -> bool:
        """Whether no open step may use pages that are free now: no transfer has to wait its turn.

        True holds for all transfers that were decided on before, whatever is given up later.
        """
        with self._ended:
            return self._may_write(self._awaited)

    def wait_turn(self, ticket: int) -> None:
        """Block a mover, never a step, until the steps that its ticket names have ended.

        Raises:
            CacheClosed: the cache is closed.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._closed or self._may_write(ticket))
            if self._closed:
                raise CacheClosed()

    def _may_write(self, ticket: int) -> bool:
        return all(number > ticket for number in self._open)

    @property
    def fence(self) -> torch.cuda.Event | None:
        """The end of the latest step that has ended; None: there was none, or it is past."""
        with self._ended:
            return self._fence

    def drain(self) -> None:
        """Wait on the host until all copies and scatters have been done."""
        self.copy.drain()
        self.scatter.drain()

    def close(self) -> None:
        """Movers that wait for a step to end wait no longer: `wait_turn` raises CacheClosed."""
        with self._ended:
            self._closed = True
            self._ended.notify_all()
