"""DISK → HOST → GPU: the hops of what is packed, and what their ends mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from adaptercache.arena import HostPlace
from adaptercache.blocks import Run
from adaptercache.errors import (
    AdapterInvalid,
    CacheClosed,
    CapacityError,
    LoadFailed,
    as_load_error,
)
from adaptercache.identity import Digest
from adaptercache.journal import Journal
from adaptercache.layout import LoraLayout
from adaptercache.ledger import Ledger
from adaptercache.movers import Hop, Job, Movers
from adaptercache.packing import VectorSpec, read_packed_header
from adaptercache.residency import Copy
from adaptercache.standing import Load
from adaptercache.stats import Tier
from adaptercache.tiers.disk import DiskTier
from adaptercache.tiers.gpu import GpuTier
from adaptercache.tiers.host import HostTier
from adaptercache.tiers.transfer import Transfer
from adaptercache.tiers.ways import Wait

__all__ = ["Hops"]


@dataclass(slots=True)
class _Read:
    """An adapter that is being read, and its copy to the GPU, if that goes ahead meanwhile.

    ``ahead`` is set with the cache's lock held; the thread that reads sees it at the next piece.
    """

    ahead: tuple[Load, Transfer] | None = None

    def arrived(self, nbytes: int) -> None:
        """So many bytes have come; whether they are right is not known yet."""
        if self.ahead is not None:
            self.ahead[1].arrived(nbytes)

    def abandon(self) -> None:
        """It has failed: wait for what went ahead. Nothing more does from now on."""
        if self.ahead is not None:
            self.ahead[1].abandon()


class Hops:
    """Starts loads out of the disk and of CPU memory. Its methods are called with the lock held.

    Args:
        delete: has a mover delete the files of content that nobody names any more.
    """

    def __init__(
        self,
        ledger: Ledger,
        movers: Movers,
        layout: LoraLayout,
        disk: DiskTier,
        host: HostTier,
        gpu: GpuTier,
        delete: Callable[[Digest], None],
    ) -> None:
        self._ledger = ledger
        self._journal = Journal(ledger)
        self._movers = movers
        self._layout = layout
        self._disk, self._host, self._gpu = disk, host, gpu
        self._delete = delete
        self._broken: set[Digest] = set()  # on disk; fetched again, and not read since
        self._reads: dict[Digest, _Read] = {}

    # -- DISK → HOST

    def read(self, copy: Copy[HostPlace]) -> None:
        """Start reading a packed file into blocks that are reserved.

        As soon as its header has been read it may be given pages on the GPU (`copy`); then pieces
        that have come are copied there while others are still being read.
        """
        digest = copy.digest
        read = self._reads[digest] = _Read()

        def work() -> int:
            try:
                return self._read(digest, copy.place.runs, read)
            except BaseException:
                read.abandon()
                raise

        done, failed = partial(self._was_read, digest), partial(self._not_read, digest)
        self._movers.submit(Job(Hop.READ, digest, work, done, failed, not copy.prefetched))

    def _read(self, digest: Digest, runs: Sequence[Run], read: _Read) -> int:
        """Returns how many bytes have been read, and checked."""
        path = self._disk.packed_path(digest, self._layout.digest)
        with self._disk.reading(digest), self._disk.rejecting(path):
            packed = read_packed_header(path, self._layout)
            if packed.content != digest:
                raise AdapterInvalid("the packed file is of other content", where=str(path))
            views = self._host.views(runs, packed.nbytes)
            begun = partial(self._ledger.host.begin, digest, packed.spec)
            self._movers.report(Hop.READ, begun)
            self._disk.read_into(packed, views, read.arrived)
        return packed.nbytes

    def _was_read(self, digest: Digest, nbytes: int, seconds: float) -> None:
        self._journal.ended(Hop.READ, seconds, nbytes, digest)
        self._broken.discard(digest)
        self._ledger.host_loaded(digest)
        if (ahead := self._reads.pop(digest).ahead) is not None:
            self._bring(*ahead)
        if (copy := self._ledger.disk.get(digest)) is not None and copy.doomed:
            self._delete(digest)

    def _not_read(self, digest: Digest, caught: BaseException, seconds: float) -> None:
        """Forget the copy on disk, so that it is fetched again: packed anew from the files as they
        were published, or downloaded. The first time at once, and while those who wait go on
        waiting; if it fails again, after a back-off."""
        self._free(digest, caught)
        if isinstance(caught, (CapacityError, CacheClosed)):  # the disk is not to blame
            self._journal.failed(Hop.READ, self._ledger.catalog.ids_of(digest), caught, seconds)
            return
        if isinstance(caught, FileNotFoundError):  # another process has evicted it: fetched again
            self._ledger.give_up_on_disk(digest, "gone")
            return
        error = LoadFailed("the copy on disk can't be read; it will be fetched again")
        error.__cause__ = caught
        is_first = digest not in self._broken
        ids = [] if is_first else self._ledger.catalog.ids_of(digest)
        (self._broken.add if is_first else self._broken.discard)(digest)
        self._journal.failed(Hop.READ, ids, error, seconds)
        copy = self._ledger.disk.get(digest)
        if copy is not None and copy.idle:
            self._ledger.evict(Tier.DISK, digest, "broken")

    def _free(self, digest: Digest, caught: BaseException) -> None:
        """The blocks, and the pages into which copies went ahead: these have ended."""
        if (ahead := self._reads.pop(digest).ahead) is not None:
            load, _ = ahead
            self._gpu.give_up(load.slot)
            self._ledger.gpu_failed(digest, as_load_error(caught))
        self._ledger.host_failed(digest)

    # -- HOST → GPU

    def copy(self, loads: Iterable[Load], led: Collection[Digest] = ()) -> None:
        """Start copies whose slots, pages and copies in CPU memory are reserved. What is being
        read still goes ahead piece by piece, and is done once all has been read and checked.

        ``led``: steps are about to read these while they come.
        """
        for load in loads:
            self._copy(load, load.digest in led)

    def _copy(self, load: Load, is_led: bool) -> None:
        place = self._ledger.host[load.digest].place
        spec: VectorSpec = place.spec
        pieces = partial(self._host.views, place.runs, spec.elements * self._layout.itemsize)
        after = self._ledger.gpu[load.digest].place.after
        wait = Wait.A_STEP if is_led else Wait.NOBODY if load.hint else Wait.SOMEBODY
        transfer = self._gpu.expect(load.slot, load.pages, spec, pieces, after, wait)
        if is_led:
            self._ledger.outbox.append(transfer.start)
        if (read := self._reads.get(load.digest)) is not None:
            read.ahead = load, transfer
        else:
            self._bring(load, transfer)

    def _bring(self, load: Load, transfer: Transfer) -> None:
        def work() -> None:
            self._gpu.write(load.slot, transfer)

        done = partial(self._copied, load.digest, transfer.nbytes)
        failed = partial(self._not_copied, load.digest)
        self._movers.submit(Job(Hop.COPY, load.digest, work, done, failed, not load.hint))

    def _copied(self, digest: Digest, nbytes: int, result: None, seconds: float) -> None:
        self._journal.ended(Hop.COPY, seconds, nbytes, digest)
        self._ledger.gpu_loaded(digest)

    def _not_copied(self, digest: Digest, caught: BaseException, seconds: float) -> None:
        error = as_load_error(caught)
        self._ledger.gpu_failed(digest, error)
        self._journal.failed(Hop.COPY, self._ledger.catalog.ids_of(digest), error, seconds)
