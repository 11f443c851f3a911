"""One adapter on its way from CPU memory into its pages on the GPU, and who waits for it."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from adaptercache.errors import AdapterCacheError, LoadFailed, forget_locals
from adaptercache.layout import LoraLayout, align
from adaptercache.packing import VectorSpec
from adaptercache.tiers.streams import Streams
from adaptercache.tiers.ways import Landed, Way

__all__ = ["Arrivals", "Transfer"]

LEAD_S = 0.01  # how long movers leave a transfer to a step


class Transfer:
    """Copies of an adapter's chunks, and the events of each.

    `run` is a mover's. A step that already holds the adapter calls `wait` for what it reads next,
    from the thread that launches it. Thread-safe.

    Args:
        after: the last step that may use what was in these pages, or read this slot's row.
        pieces: gives the flat vector's bytes, in order: ``uint8 [n]`` tensors in CPU memory.
    """

    def __init__(
        self,
        streams: Streams,
        way: Way,
        slot: int,
        pages: Sequence[int],
        spec: VectorSpec,
        pieces: Callable[[], Iterable[Tensor]],
        after: int,
    ) -> None:
        self._streams = streams
        self._spec, self._after = spec, after
        self._chunks = way.chunks(len(pages))
        # Not the way itself, which has the arena: errors are kept, and their frames have us.
        self._lock, self._turn = way.lock, way.turn
        self._layout, self._shape = way.stack.layout, way.stack.shape
        self._device = way.stack.device
        self._queueing = _chunk_by_chunk(way, slot, spec, tuple(pages), pieces, after)
        self._led: threading.Event | None = None
        self._landed: list[Landed] = []  # of each chunk that was queued
        self._error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Of the vector."""
        return self._spec.elements * self._shape.itemsize

    def arrived(self, nbytes: int) -> None:
        """So many bytes, from the vector's beginning on, are in CPU memory by now: queue copies of
        the chunks that lie in them, unless a step may still use their pages. For the thread that
        has seen them come. `run` queues what is left, and waits; or else call `abandon`.

        What goes wrong is told to `run`.
        """
        if not self._streams.have_ended(self._after):
            return
        ends, elements = self._ends_of_chunks(), nbytes // self._shape.itemsize
        ready = len(ends) if nbytes >= self.nbytes else bisect_right(ends, elements)
        for chunk in range(len(self._landed), ready):
            self._queue(chunk)

    def abandon(self) -> None:
        """It will not be run: wait until nothing of it is under way, so that blocks and pages may
        be given up."""
        if self._landed or self._error is not None:
            self._streams.drain()
        with self._lock:
            self._queueing = iter(())

    def run(self) -> None:
        """Wait for its turn, queue all copies, and wait until the bytes are in place.

        Raises:
            CacheClosed: the cache closed before its turn came.
            Whatever reading the pieces or queueing copies raised; nothing of it is under way then.
        """
        try:
            if self._led is not None:
                self._led.wait(LEAD_S)
            self._streams.wait_turn(self._after)
            self.begin()
            if self._error is not None:
                raise self._error
            if self._landed and (last := self._landed[-1]) is not None:
                last.synchronize()
        except BaseException as error:
            with self._lock:  # a step that waits queues nothing more
                self._error = self._error or error
                self._queueing = iter(())
            self._streams.drain()  # the pages go to others now
            raise

    def begin(self) -> None:
        """Queue all copies, after those of the transfers that began before. Waits for nothing on
        the GPU; what goes wrong is told to `run` and `wait`."""
        with self._turn:
            for chunk in range(len(self._chunks)):
                self._queue(chunk)

    def _queue(self, chunk: int) -> None:
        """Queue copies up to this chunk, unless that is done. One chunk of one transfer at a time,
        by whichever thread comes to it."""
        with self._lock:
            try:
                while len(self._landed) <= chunk and self._error is None:
                    self._landed.append(next(self._queueing))
                if len(self._landed) == len(self._chunks):
                    self._queueing = iter(())
            except BaseException as error:  # whoever else wants it is told
                self._error = error
                forget_locals(error)
                if not isinstance(error, Exception):
                    raise  # an interrupt is this thread's

    # -- for steps

    def lead(self) -> None:
        """A step is about to read it: its thread queues the chunks as it needs them, and movers
        keep out of its way until it has (`led`), for two that queue at once hinder each other."""
        self._led = threading.Event()

    def start(self) -> None:
        """Queue the first chunk, so that it comes while the step is being prepared."""
        self._queue(0)

    def led(self) -> None:
        """The step has made its last launch: the rest is a mover's."""
        if self._led is not None:
            self._led.set()

    def wait(self, chunk: int) -> None:
        """Make the current stream wait until this chunk, and all before it, are in place.

        Queues its copy if no mover has come to it yet; blocks the thread for nothing else.

        Raises:
            LoadFailed, or the error itself where it is ours: its bytes will never come.
        """
        self._queue(chunk)
        error = self._error
        if error is not None:
            if isinstance(error, AdapterCacheError):
                raise error
            raise LoadFailed("the adapter's copy to the GPU failed under a step") from error
        if (event := self._landed[chunk]) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def chunks_of_layers(self) -> list[int]:
        """For each layer, the last chunk that it needs: with it and those before, all layers up to
        this one are in place. (The table's row comes with the first.)"""
        ends, layout = self._ends_of_chunks(), self._layout
        return [bisect_left(ends, end) for end in _ends_of_layers(layout, self._spec.ranks)]

    def _ends_of_chunks(self) -> list[int]:
        """In elements; the last one's may be behind the vector's."""
        shape = self._shape
        return [(first + count) * shape.rows * shape.page_elems for first, count in self._chunks]


def _chunk_by_chunk(
    way: Way,
    slot: int,
    spec: VectorSpec,
    pages: Sequence[int],
    pieces: Callable[[], Iterable[Tensor]],
    after: int,
) -> Iterator[Landed]:
    """No method: where it is not exhausted it would hold its transfer, and so the arena, until
    garbage is collected. The pieces are asked for with the first chunk."""
    yield from way.queue(slot, spec, pages, pieces(), after)


@lru_cache(maxsize=256)
def _ends_of_layers(layout: LoraLayout, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Where in the vector each layer's last matrix ends; the one before's where it has none.

    Kept, because a step waits for it, and adapters of one kind have the same ranks.
    """
    ends = [0] * layout.num_layers
    for site, start, rank in zip(layout.sites, layout.starts(ranks)[0], ranks, strict=True):
        if rank:
            end = start + align(rank * site.in_features) + align(rank * site.out_features)
            ends[site.layer] = max(ends[site.layer], end)
    return tuple(accumulate(ends, max))


class Arrivals:
    """What a step has to wait for: adapters of its batch that are still on their way.

    Used by the thread that launches the step.
    """

    def __init__(self, device: torch.device, transfers: Iterable[Transfer]) -> None:
        self._device = device
        self._waits = [(transfer, transfer.chunks_of_layers()) for transfer in transfers]
        self._past = [-1] * len(self._waits)  # the last chunk that was waited for
        self.was_awaited = False

    def end(self) -> None:
        """The step has made its last launch."""
        for transfer, _ in self._waits:
            transfer.led()

    def wait(self, layer: int) -> None:
        """Make the current stream wait for a layer; nothing while a CUDA graph is captured."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self.was_awaited = True
        for index, (transfer, chunks) in enumerate(self._waits):
            chunk = chunks[layer]
            if chunk > self._past[index]:
                transfer.wait(chunk)
                self._past[index] = chunk
