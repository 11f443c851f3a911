"""Lifts adapters towards the GPU, one tier at a time: single flight, demand before hint.

Whenever something changes (somebody asks, a load ends, room is freed), `advance` looks at
everyone who waits, in order of arrival, and starts what can be started. Each load that ends
calls it again, so an adapter climbs tier by tier while nobody holds a thread for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from adaptercache.arena import HostPlace
from adaptercache.batch import Decision, Load
from adaptercache.disk_room import DiskRoom
from adaptercache.errors import (
    AdapterCacheError,
    AdapterInvalid,
    CacheClosed,
    CapacityError,
    LoadFailed,
    as_load_error,
)
from adaptercache.fetch import Fetched, Fetcher
from adaptercache.identity import AdapterKey, Digest
from adaptercache.journal import Journal
from adaptercache.layout import LoraLayout
from adaptercache.ledger import Ledger
from adaptercache.lifts import Lifts
from adaptercache.movers import Hop, Job, Movers
from adaptercache.packing import VectorSpec, read_packed_header
from adaptercache.residency import Copy
from adaptercache.stats import Tier
from adaptercache.tiers.disk import DiskTier
from adaptercache.tiers.gpu import GpuTier
from adaptercache.tiers.host import HostTier

__all__ = ["Lifter"]

MAX_FETCHES = 1024  # queued at once; the rest of a longer line is queued as these end


class Lifter:
    """Starts loads and takes note of their ends. Its methods are called with the lock held."""

    def __init__(
        self,
        ledger: Ledger,
        lifts: Lifts,
        movers: Movers,
        fetcher: Fetcher,
        room: DiskRoom,
        layout: LoraLayout,
        disk: DiskTier,
        host: HostTier,
        gpu: GpuTier,
    ) -> None:
        self._ledger = ledger
        self._journal = Journal(ledger)
        self._lifts = lifts
        self._movers = movers
        self._fetcher, self._room = fetcher, room
        self._layout = layout
        self._disk, self._host, self._gpu = disk, host, gpu
        self._refreshes: dict[str, list[Future[AdapterKey]]] = {}
        self._removed: set[str] = set()  # while they were being fetched
        self._broken: set[Digest] = set()  # on disk; fetched again, and not read since
        self.on_revision: Callable[[str, Digest, Digest], None] | None = None

    def advance(self) -> None:
        """Start whatever can be started for those who wait, and serve those who can be served."""
        waiting = self._ledger.waiting
        if not waiting:
            self._ask_again()
            return
        self.lift_to_host()
        placement = self._lifts.place_on_gpu()
        waiting.starved = bool(placement.no_room)
        if placement.loads:
            loads = self._lifts.number(placement)
            self._lifts.apply(Decision(evictions=placement.evictions, loads=loads))
            self.copy(loads)
        self._lifts.be_fair(placement.no_room[0] if placement.no_room else None)

    def lift_to_host(self) -> None:
        """The same, as far as CPU memory."""
        self._ask_again()
        for adapter_id, hint in self._lifts.absent():
            if self._movers.queued(Hop.FETCH) >= MAX_FETCHES:
                break
            self._fetch(adapter_id, demand=not hint)
        for copy in self._lifts.take_host_loads():
            self._read(copy)

    def close(self) -> None:
        """Nobody's refresh will be answered any more, and no download goes on."""
        self._fetcher.close()
        for futures in self._refreshes.values():
            self._tell(futures, lambda future: future.set_exception(CacheClosed()))
        self._refreshes.clear()

    # -- REMOTE → DISK

    def refresh(self, adapter_id: str) -> Future[AdapterKey]:
        """Look at the source again; the future has the key that the id stands for then."""
        future: Future[AdapterKey] = Future()
        self._ledger.failures.clear(adapter_id)
        self._fetcher.look_again(adapter_id)
        self._refreshes.setdefault(adapter_id, []).append(future)
        self._fetch(adapter_id, demand=True)
        return future

    def _ask_again(self) -> None:
        """Look at the source for what is in use and was last looked at long ago, in the background;
        what is here goes on serving."""
        while self._ledger.stale:
            adapter_id = self._ledger.stale.pop()
            self._ledger.catalog.check(adapter_id, self._ledger.clock())
            self._fetch(adapter_id, demand=False)

    def remove(self, adapter_id: str) -> None:
        """Forget the local copies. A fetch that is under way is forgotten when it ends."""
        orphan = self._ledger.forget(adapter_id)
        if self._movers.join(Hop.FETCH, adapter_id, demand=False):
            self._removed.add(adapter_id)
        self._delete(orphan)

    def _fetch(self, adapter_id: str, *, demand: bool) -> None:
        if self._movers.join(Hop.FETCH, adapter_id, demand=demand):
            return  # a refresh may mean a newer revision than it reads: see _fetch_again
        refreshes = self._refreshes.pop(adapter_id, [])
        # What a tier has needn't be on the disk where the source hasn't changed.
        known = None if self._ledger.lacks(adapter_id) else self._ledger.catalog.get(adapter_id)
        self._movers.submit(
            Job(
                Hop.FETCH,
                adapter_id,
                partial(self._fetcher.fetch, adapter_id, known),
                partial(self._fetched, refreshes),
                partial(self._not_fetched, adapter_id, refreshes),
                demand,
            )
        )

    def _fetched(
        self, refreshes: list[Future[AdapterKey]], fetched: Fetched, seconds: float
    ) -> None:
        key, digest = fetched.key, fetched.digest
        if key.adapter_id in self._removed:
            self._removed.remove(key.adapter_id)
            self._ledger.retire(digest)
            self._delete(digest)
        else:
            before = self._ledger.catalog.get(key.adapter_id)
            try:
                self._delete(self._ledger.learn(key, digest, fetched.elements))
            except AdapterCacheError as error:
                self._not_fetched(key.adapter_id, refreshes, error, seconds)
                return
            if fetched.nbytes:
                self._journal.ended(Hop.FETCH, seconds, fetched.nbytes, digest)
            if before is not None and before.digest != digest and self.on_revision is not None:
                changed = partial(self.on_revision, key.adapter_id, before.digest, digest)
                self._ledger.outbox.append(changed)
        self._tell(refreshes, lambda future: future.set_result(key))
        self._fetch_again(key.adapter_id)

    def _not_fetched(
        self,
        adapter_id: str,
        refreshes: list[Future[AdapterKey]],
        caught: BaseException,
        seconds: float,
    ) -> None:
        error = as_load_error(caught, adapter_id)
        self._removed.discard(adapter_id)
        # Where a refresh fails, what is here goes on serving: nobody who waits is told.
        concerned = [adapter_id] if self._ledger.lacks(adapter_id) else []
        self._journal.failed(Hop.FETCH, concerned, error, seconds)
        self._tell(refreshes, lambda future: future.set_exception(error))
        self._fetch_again(adapter_id)

    def _fetch_again(self, adapter_id: str) -> None:
        if adapter_id in self._refreshes:
            self._fetch(adapter_id, demand=True)

    def _tell(
        self, futures: Iterable[Future[AdapterKey]], how: Callable[[Future[AdapterKey]], None]
    ) -> None:
        for future in futures:
            if future.set_running_or_notify_cancel():
                self._ledger.outbox.append(partial(how, future))

    def _delete(self, digest: Digest | None) -> None:
        """Have a mover delete the files of content that nobody names any more."""
        if digest is None or self._movers.join(Hop.FETCH, digest, demand=False):
            return

        def work() -> None:
            self._room.drop(digest)

        done = partial(self._deleted, digest)
        self._movers.submit(
            Job(Hop.FETCH, digest, work, done, self._not_deleted, False, is_load=False)
        )

    def _deleted(self, digest: Digest, result: None, seconds: float) -> None:
        copy = self._ledger.disk.get(digest)
        if copy is not None and copy.doomed and copy.idle:  # it was being read meanwhile
            self._delete(digest)

    def _not_deleted(self, error: BaseException, seconds: float) -> None:
        self._journal.warn(Hop.FETCH, seconds, f"deleting files failed: {error}")

    # -- DISK → HOST

    def _read(self, copy: Copy[HostPlace]) -> None:
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

    def copy(self, loads: Iterable[Load]) -> None:
        """Start copies whose slots, pages and copies in CPU memory are reserved."""
        for load in loads:
            self._copy(load)

    def _copy(self, load: Load) -> None:
        place = self._ledger.host[load.digest].place
        spec: VectorSpec = place.spec
        nbytes = spec.elements * self._layout.itemsize

        def work() -> None:
            self._gpu.write(load.slot, load.pages, spec, self._host.views(place.runs, nbytes))

        done = partial(self._copied, load.digest, nbytes)
        failed = partial(self._not_copied, load.digest)
        self._movers.submit(Job(Hop.COPY, load.digest, work, done, failed, not load.hint))

    def _copied(self, digest: Digest, nbytes: int, result: None, seconds: float) -> None:
        self._journal.ended(Hop.COPY, seconds, nbytes, digest)
        self._ledger.gpu_loaded(digest)

    def _not_copied(self, digest: Digest, caught: BaseException, seconds: float) -> None:
        self._ledger.gpu_failed(digest)
        error = as_load_error(caught)
        self._journal.failed(Hop.COPY, self._ledger.catalog.ids_of(digest), error, seconds)
