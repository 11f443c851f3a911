"""The two ways in which an adapter's bytes get from CPU memory into its cells.

*Staged*: in large chunks into staging buffers, from where a kernel lays them out. Within 2 or 3 %
of a plain copy's speed; the kernel moves the bytes once more, which steps notice.

*Strided*: the copy engine lays out each page by itself (see `strided`). At 93 % of a plain copy's
speed, and steps notice no more of it; a chunk is queued in less of the host's time. Only where
cells are large: it is a copy a page.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from adaptercache.kernels.stack import LoraStack
from adaptercache.layout import ArenaShape
from adaptercache.packing import VectorSpec
from adaptercache.tiers.rows import TableRows
from adaptercache.tiers.staging import Source, Staging
from adaptercache.tiers.streams import Lane, Streams
from adaptercache.tiers.strided import Bytes, copy_rows_of, lay_page

__all__ = ["Landed", "Staged", "Strided", "Wait", "Way", "Ways", "is_strided"]

FIRST_BYTES = 4 << 20
"""Of an adapter's first chunk: a step that waits for its first layers waits for little else."""

STRIDED_BYTES = 8 << 20
"""Of the others, where a chunk is a pair of events and nothing else."""

STAGED_BYTES = 16 << 20
"""Of the others, where a chunk is a copy and a kernel, too."""

MIN_CELL_BYTES = 32 << 10
"""Of a strided copy's rows."""

MAX_PITCH = (1 << 31) - 1
"""CUDA's, between a strided copy's rows."""

Landed: TypeAlias = "torch.cuda.Event | None"
"""When it has come, a chunk and those before it are in place; None: it has."""


class Way(ABC):
    """Queues transfers, chunk by chunk.

    ``lock`` is held by whoever queues a chunk, so that one is queued at a time; ``turn`` by a
    mover for a whole transfer, so that transfers come one after the other, and not all at the end.
    """

    chunk_bytes: int

    def __init__(self, streams: Streams, stack: LoraStack) -> None:
        self.lock, self.turn = threading.Lock(), threading.Lock()
        self.stack = stack
        self._streams = streams
        self._rows = TableRows(stack)
        self._page_bytes = stack.shape.rows * stack.shape.page_bytes

    def chunks(self, num_pages: int) -> list[tuple[int, int]]:
        """``(first page, number of pages)`` of each chunk of an adapter of as many pages."""
        found: list[tuple[int, int]] = []
        first, most = 0, max(1, min(FIRST_BYTES, self.chunk_bytes) // self._page_bytes)
        while first < num_pages:
            count = min(most, num_pages - first)
            found.append((first, count))
            first, most = first + count, self._chunk_pages
        return found

    @property
    def _chunk_pages(self) -> int:
        return max(1, self.chunk_bytes // self._page_bytes)

    @abstractmethod
    def queue(
        self,
        slot: int,
        spec: VectorSpec,
        pages: Sequence[int],
        pieces: Iterable[Tensor],
        after: int,
    ) -> Iterator[Landed]:
        """Queue copies of all chunks, one after the other; yields what tells each one's end. Any
        thread may go on with it.

        The slot's row of the table is in place with the first chunk.

        Args:
            pieces: the flat vector's bytes, in order: ``uint8 [n]`` tensors in CPU memory.
            after: the last step that may use what was in these pages, or read the slot's row.
        """


class Strided(Way):
    """Page after page. ``lane``: `Streams.direct`, or another."""

    def __init__(self, streams: Streams, stack: LoraStack, lane: Lane | None = None) -> None:
        super().__init__(streams, stack)
        self.chunk_bytes = STRIDED_BYTES
        self._lane = lane or streams.direct

    def queue(
        self,
        slot: int,
        spec: VectorSpec,
        pages: Sequence[int],
        pieces: Iterable[Tensor],
        after: int,
    ) -> Iterator[Landed]:
        stack, lane = self.stack, self._lane
        arena, shape = stack.arena.data_ptr(), stack.shape
        lane.wait(self._streams.fence(after))
        source, left = Bytes(iter(pieces)), spec.elements * shape.itemsize
        for first, count in self.chunks(len(pages)):
            with lane.use():  # the driver's calls are for this thread's current device
                copy_rows = copy_rows_of(stack.device)
                for page in pages[first : first + count]:
                    nbytes = min(left, self._page_bytes)
                    lay_page(copy_rows, arena, shape, page, source.take(nbytes))
                    left -= nbytes
                if not first:
                    row = self._rows.write(slot, spec, pages)
                    to = stack.table.data_ptr() + slot * row.nbytes
                    copy_rows(to, row.nbytes, row.data_ptr(), row.nbytes, 1)  # sooner than torch's
            yield lane.mark()


class Staged(Way):
    """Copies on one stream, a kernel for each on another."""

    def __init__(self, streams: Streams, stack: LoraStack) -> None:
        super().__init__(streams, stack)
        self.chunk_bytes = STAGED_BYTES
        self.staging = Staging(stack, self._chunk_pages)
        self._page_ids = torch.zeros_like(stack.table)  # rows of the table, on their way

    def queue(
        self,
        slot: int,
        spec: VectorSpec,
        pages: Sequence[int],
        pieces: Iterable[Tensor],
        after: int,
    ) -> Iterator[Landed]:
        copy, scatter = self._streams.copy, self._streams.scatter
        row, table = self._page_ids[slot], self.stack.table[slot]
        scatter.wait(self._streams.fence(after))
        source, left = Source(pieces), spec.elements * self.stack.shape.itemsize
        for first, count in self.chunks(len(pages)):
            buffer = self.staging.next()
            nbytes = min(left, count * self._page_bytes)
            copy.wait(buffer.emptied)
            with copy.use():
                source.copy_into(buffer.bytes[:nbytes])
                if not first:  # made while the first chunk is under way
                    row.copy_(self._rows.write(slot, spec, pages), non_blocking=True)
            left -= nbytes
            scatter.wait(copy.mark())
            with scatter.use():
                if not first:
                    table.copy_(row, non_blocking=True)
                self.staging.lay(buffer, row[first : first + count])
            buffer.emptied = scatter.mark()
            yield buffer.emptied


class Wait(Enum):
    """Who waits for an adapter that comes."""

    NOBODY = auto()
    SOMEBODY = auto()
    A_STEP = auto()
    """Layer by layer; its own thread queues the chunks (`Transfer.lead`)."""


class Ways(NamedTuple):
    """For loads that somebody waits for; for those that a step waits for; and for hints, which
    have time."""

    demand: Way
    led: Way
    hint: Way

    def of_wait(self, wait: Wait) -> Way:
        """The one for who waits."""
        ways = {Wait.NOBODY: self.hint, Wait.SOMEBODY: self.demand, Wait.A_STEP: self.led}
        return ways[wait]

    @classmethod
    def of(cls, streams: Streams, stack: LoraStack) -> Ways:
        """The fastest one for who waits; else the one that takes least of a step's time, on the GPU
        and on the thread that queues it."""
        staged = Staged(streams, stack)
        if not is_strided(stack.shape):
            return cls(staged, staged, staged)
        return cls(staged, Strided(streams, stack), Strided(streams, stack, streams.hinted))


def is_strided(shape: ArenaShape) -> bool:
    """Whether the copy engine lays out pages of this shape at full speed."""
    pitch = shape.num_pages * shape.page_bytes
    return shape.rows > 1 and shape.page_bytes >= MIN_CELL_BYTES and pitch <= MAX_PITCH
