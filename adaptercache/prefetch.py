"""Lifts adapters towards the GPU, one tier at a time: single flight, demand before hint.

Whenever something changes (somebody asks, a load ends, room is freed), `advance` looks at
everyone who waits, in order of arrival, and starts what can be started. Each load that ends
calls it again, so an adapter climbs tier by tier while nobody holds a thread for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from adaptercache.decision import Decision
from adaptercache.disk_room import DiskRoom
from adaptercache.errors import (
    AdapterCacheError,
    CacheClosed,
    as_load_error,
)
from adaptercache.fetch import Fetched, Fetcher
from adaptercache.hops import Hops
from adaptercache.identity import AdapterKey, Digest, check_own_id
from adaptercache.journal import Journal
from adaptercache.layout import LoraLayout
from adaptercache.ledger import Ledger
from adaptercache.lifts import Lifts
from adaptercache.movers import Hop, Job, Movers
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
        self.hops = Hops(ledger, movers, layout, disk, host, gpu, self._delete)
        self._refreshes: dict[str, list[Future[AdapterKey]]] = {}
        self._removed: set[str] = set()  # while they were being fetched
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
            self.hops.copy(loads)
        self._lifts.end_promise(0)  # there may be room for hits that yielded
        self._lifts.fairness.look(placement.no_room[0] if placement.no_room else None)

    def lift_to_host(self) -> None:
        """The same, as far as CPU memory."""
        self._ask_again()
        for adapter_id, hint in self._lifts.absent():
            if self._movers.queued(Hop.FETCH) >= MAX_FETCHES:
                break
            if hint:
                self._ledger.waiting.note_fetch(adapter_id, self._ledger.clock())
            self._fetch(adapter_id, demand=not hint)
        for copy in self._lifts.take_host_loads():
            self.hops.read(copy)
        self._raise_hints()

    def _raise_hints(self) -> None:
        """What began as a hint, and somebody waits for by now, stands behind no other hint."""
        hops = [hop for hop in (Hop.READ, Hop.COPY) if self._movers.has_hints(hop)]
        for adapter_id in self._ledger.waiting.order() if hops else ():
            if (known := self._ledger.catalog.get(adapter_id)) is not None:
                for hop in hops:
                    self._movers.join(hop, known.digest, demand=True)

    def look_for(self, adapter_id: str) -> None:
        """Somebody has joined the end of the line for this adapter: start what that changes.

        A flood of them costs little each: nothing is looked at twice for its sake.
        """
        waiting = self._ledger.waiting
        if self._ledger.lacks(adapter_id):
            if self._movers.queued(Hop.FETCH) < MAX_FETCHES:
                self._fetch(adapter_id, demand=True)
        elif waiting.is_within_sight(adapter_id):
            self.advance()

    def close(self) -> None:
        """Nobody's refresh will be answered any more, and no download goes on."""
        self._fetcher.close()
        for futures in self._refreshes.values():
            self._tell(futures, lambda future: future.set_exception(CacheClosed()))
        self._refreshes.clear()

    # -- REMOTE → DISK

    def refresh(self, adapter_id: str) -> Future[AdapterKey]:
        """Look at the source again; the future has the key that the id stands for then."""
        check_own_id(adapter_id)
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
        orphan = self._ledger.forget(check_own_id(adapter_id))
        if self._movers.join(Hop.FETCH, adapter_id, demand=False):
            self._removed.add(adapter_id)
        self._forget(adapter_id)
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
            self._forget(key.adapter_id)
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
        if (unasked := fetched.unasked) is not None:  # nobody fails: the disk's copy is served
            self._journal.failed(Hop.FETCH, [], unasked, seconds)
            self._ledger.catalog.doubt(key.adapter_id)
            self._tell(refreshes, lambda future: future.set_exception(unasked))
        else:
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
        try:
            self._journal.failed(Hop.FETCH, concerned, error, seconds)
        finally:  # whatever goes wrong there: nobody waits for ever
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

    def _forget(self, adapter_id: str) -> None:
        """Have a mover see to it that the disk doesn't say any more what this id was."""
        self._fetcher.removed(adapter_id)
        name = ("forget", adapter_id)
        if not self._movers.join(Hop.FETCH, name, demand=False):
            work = partial(self._fetcher.forget_removed, adapter_id)
            job = Job(Hop.FETCH, name, work, _nothing, self._not_deleted, False, is_load=False)
            self._movers.submit(job)

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


def _nothing(result: None, seconds: float) -> None:
    """Comes of its end."""
