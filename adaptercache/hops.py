"""DISK → HOST → GPU: the hops of what is packed, and what their ends mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from adaptercache.arena import HostPlace
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

__all__ = ["Hops"]


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

    # -- DISK → HOST

    def read(self, copy: Copy[HostPlace]) -> None:
        """Start reading a packed file into blocks that are reserved."""
        digest, runs = copy.digest, copy.place.runs

        def work() -> VectorSpec:
            path = self._disk.packed_path(digest, self._layout.digest)
            with self._disk.reading(digest), self._disk.rejecting(path):
                packed = read_packed_header(path, self._layout)
                if packed.content != digest:
                    raise AdapterInvalid("the packed file is of other content", where=str(path))
                self._disk.read_into(packed, self._host.views(runs, packed.nbytes))
            return packed.spec

        done, failed = partial(self._was_read, digest), partial(self._not_read, digest)
        self._movers.submit(Job(Hop.READ, digest, work, done, failed, not copy.prefetched))

    def _was_read(self, digest: Digest, spec: VectorSpec, seconds: float) -> None:
        self._journal.ended(Hop.READ, seconds, spec.elements * self._layout.itemsize, digest)
        self._broken.discard(digest)
        self._ledger.host_loaded(digest, spec)
        if (copy := self._ledger.disk.get(digest)) is not None and copy.doomed:
            self._delete(digest)

    def _not_read(self, digest: Digest, caught: BaseException, seconds: float) -> None:
        """Forget the copy on disk, so that it is fetched again: packed anew from the files as they
        were published, or downloaded. The first time at once, and while those who wait go on
        waiting; if it fails again, after a back-off."""
        if isinstance(caught, (CapacityError, CacheClosed)):  # the disk is not to blame
            self._ledger.host_failed(digest)
            self._journal.failed(Hop.READ, self._ledger.catalog.ids_of(digest), caught, seconds)
            return
        if isinstance(caught, FileNotFoundError):  # another process has evicted it: fetched again
            self._ledger.host_failed(digest)
            self._ledger.give_up_on_disk(digest, "gone")
            return
        error = LoadFailed("the copy on disk can't be read; it will be fetched again")
        error.__cause__ = caught
        is_first = digest not in self._broken
        self._ledger.host_failed(digest)
        ids = [] if is_first else self._ledger.catalog.ids_of(digest)
        (self._broken.add if is_first else self._broken.discard)(digest)
        self._journal.failed(Hop.READ, ids, error, seconds)
        copy = self._ledger.disk.get(digest)
        if copy is not None and copy.idle:
            self._ledger.evict(Tier.DISK, digest, "broken")

    # -- HOST → GPU

    def copy(self, loads: Iterable[Load], led: Collection[Digest] = ()) -> None:
        """Start copies whose slots, pages and copies in CPU memory are reserved.

        ``led``: steps are about to read these while they come.
        """
        for load in loads:
            self._copy(load, load.digest in led)

    def _copy(self, load: Load, is_led: bool) -> None:
        place = self._ledger.host[load.digest].place
        spec: VectorSpec = place.spec
        nbytes = spec.elements * self._layout.itemsize

        pieces = partial(self._host.views, place.runs, nbytes)
        after = self._ledger.gpu[load.digest].place.after
        transfer = self._gpu.expect(load.slot, load.pages, spec, pieces, after, hint=load.hint)
        if is_led:
            transfer.lead()
            self._ledger.outbox.append(transfer.start)

        def work() -> None:
            self._gpu.write(load.slot, transfer)

        done = partial(self._copied, load.digest, nbytes)
        failed = partial(self._not_copied, load.digest)
        self._movers.submit(Job(Hop.COPY, load.digest, work, done, failed, not load.hint))

    def _copied(self, digest: Digest, nbytes: int, result: None, seconds: float) -> None:
        self._journal.ended(Hop.COPY, seconds, nbytes, digest)
        self._ledger.gpu_loaded(digest)

    def _not_copied(self, digest: Digest, caught: BaseException, seconds: float) -> None:
        error = as_load_error(caught)
        self._ledger.gpu_failed(digest, error)
        self._journal.failed(Hop.COPY, self._ledger.catalog.ids_of(digest), error, seconds)
