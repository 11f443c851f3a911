"""Who is where, who holds it, who waits for it: all that the cache's lock guards.

The ledger decides what moves up and what goes; it moves nothing itself. Its methods take
microseconds, and none does I/O, waits, or calls a user's code: what has to be told to the world
outside is put on `outbox`, for the caller to run once the lock is released.

Plain Python; the clock is passed in. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from adaptercache.arena import DiskShelf, GpuArena, HostArena
from adaptercache.catalog import Catalog, Failures, Known
from adaptercache.errors import AdapterCacheError, CapacityError
from adaptercache.identity import AdapterKey, Digest
from adaptercache.rates import Rates
from adaptercache.residency import Copy, Residency
from adaptercache.standing import Standing
from adaptercache.stats import Counters, Tier
from adaptercache.waiting import Grant, WaitingList

__all__ = ["Ledger"]

PlaceT = TypeVar("PlaceT")
TRAFFIC_MEMORY_S = 600.0
REMOTE = Tier.REMOTE.value  # looked up for thousands at once
UNKNOWN = Standing()  # of every id that was never seen: not to be changed


class Ledger:
    """See the module's docstring.

    Args:
        gpu, host, disk: the tables of the tiers.
        itemsize: bytes an element of a flat vector.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        gpu: GpuArena,
        host: HostArena,
        disk: DiskShelf,
        *,
        itemsize: int,
        clock: Callable[[], float],
    ) -> None:
        self.gpu, self.host, self.disk = gpu, host, disk
        self._tiers: dict[Tier, Residency[Any]]
        self._tiers = {Tier.GPU: gpu, Tier.HOST: host, Tier.DISK: disk}
        self.clock = clock
        self.catalog = Catalog()
        self.failures = Failures()
        self.waiting = WaitingList()
        self.counters = Counters()
        self.traffic = Rates(TRAFFIC_MEMORY_S)
        """Leases served by adapter id, and base-model requests admitted."""
        self.gpu_up = True
        self.have_ended: Callable[[int], bool] = lambda step: True
        """Whether a step, and all before it, have made their last launch."""
        self.outbox: list[Callable[[], None]] = []
        self.stale: set[str] = set()
        """Ids that were leased though the source was last asked long ago."""
        self.on_evict: Callable[[Tier, Digest], None] | None = None
        self.itemsize = itemsize

    # -- what is known

    def standing(self, adapter_id: str) -> Standing:
        """How an adapter id stands: ready on the GPU, failed a short while ago, or neither."""
        known = self.catalog.get(adapter_id)
        digest = known.digest if known is not None else None
        if digest is not None and (copy := self.gpu.get(digest)) is not None:
            if digest in self.waiting.draining:
                return Standing(digest, reason="room")
            ready = self.gpu_up and self.gpu.is_ready(copy)
            coming = self.gpu_up and not ready and self.may_pipeline(digest) and copy.error is None
            coming = coming and self.have_ended(copy.place.after)
            return Standing(digest, ready=ready, coming=coming)
        error = self.waiting.failed.get(adapter_id)
        if error is None and adapter_id in self.failures:
            error = self.failures.get(adapter_id, self.clock())
        return UNKNOWN if digest is None and error is None else Standing(digest, error=error)

    def may_pipeline(self, digest: Digest) -> bool:
        """Whether a step may read it layer by layer, as it is copied: not before all its bytes have
        been checked, in CPU memory."""
        return self.gpu.may_pipeline and self.host.resident(digest) is not None

    def found_in(self, adapter_id: str) -> str:
        """The top tier that has it whole, for the metrics."""
        known = self.catalog.get(adapter_id)
        if known is not None:
            for tier, residency in self._tiers.items():
                if residency.resident(known.digest) is not None:
                    return tier.value
        return REMOTE

    def learn(self, key: AdapterKey, digest: Digest, elements: int) -> Digest | None:
        """An id stands for this content from now on; what nobody names any more goes.

        Returns:
            The content that nobody names any more, if that came of it.

        Raises:
            CapacityError: it can never fit; the id stands for what it stood for before.
        """
        pages, most = self.gpu.shape.pages_for(elements), self.gpu.adapter_limit
        if pages > most:
            raise CapacityError("gpu_bytes can't hold it", needed=pages, limit=most, unit="pages")
        size, limit = elements * self.itemsize, self.host.blocks.num_blocks * self.host.block_bytes
        if self.host.blocks_for(size) > self.host.blocks.num_blocks:
            raise CapacityError("host_bytes can't hold it", needed=size, limit=limit)
        orphan = self.catalog.learn(
            key.adapter_id, Known(key.revision, digest, elements, self.clock())
        )
        self.failures.clear(key.adapter_id)
        self._doom(digest, False)
        if orphan is not None:
            self._doom(orphan, True)
        self.settle(key.adapter_id)
        return orphan

    def forget(self, adapter_id: str) -> Digest | None:
        """An id stands for nothing from now on. Returns what `learn` returns."""
        self.failures.clear(adapter_id)
        orphan = self.catalog.forget(adapter_id)
        if orphan is not None:
            self._doom(orphan, True)
        return orphan

    def lacks(self, adapter_id: str) -> bool:
        """Whether no local tier has it, not even in part, and it may be fetched."""
        known = self.catalog.get(adapter_id)
        if known is not None:
            digest = known.digest
            if self.gpu.get(digest) or self.host.get(digest) or self.disk.get(digest):
                return False
        return self.failures.get(adapter_id, self.clock()) is None

    def retire(self, digest: Digest) -> None:
        """Content that came too late: drop it, unless an id stands for it."""
        if not self.catalog.is_named(digest):
            self._doom(digest, True)

    def _doom(self, digest: Digest, doomed: bool) -> None:
        """Mark the copies of what nobody names any more. Idle ones in the arenas go at once,
        held ones at their release; the files on disk are for a mover to delete."""
        for tier, residency in self._tiers.items():
            is_ours = tier is not Tier.GPU or not self.gpu.follows  # else rank 0 decides
            if is_ours and (copy := residency.get(digest)) is not None:
                copy.doomed = doomed
        self._sweep(self.gpu.get(digest), Tier.GPU)
        self._sweep(self.host.get(digest), Tier.HOST)

    def _sweep(self, copy: Copy[Any] | None, tier: Tier) -> None:
        if copy is not None and copy.doomed and copy.idle:
            self.evict(tier, copy.digest, "superseded")

    # -- leases

    def lease(self, grant: Grant) -> bool:
        """Serve a lease if its adapter is on the GPU; one that is pipelined, if it is coming."""
        known = self.catalog.get(grant.adapter_id)
        copy = self.gpu.get(known.digest) if known is not None else None
        if known is None or copy is None or not self.gpu_up:
            return False
        is_coming = grant.pipelined and self.may_pipeline(known.digest) and copy.error is None
        if not (self.gpu.is_ready(copy) or is_coming):
            return False
        if known.digest in self.waiting.draining or self._is_promised(grant.adapter_id, copy):
            return False
        self.traffic.add(grant.adapter_id, grant.since)
        self.gpu.lease(copy)
        if self.catalog.is_old(known, self.clock):
            self.stale.add(grant.adapter_id)
        self.waiting.forget_hint(grant.adapter_id)
        grant.digest = known.digest
        grant.slot = copy.place.slot
        grant.key = AdapterKey(grant.adapter_id, known.revision)  # last: it is ready from now on
        return True

    def _is_promised(self, adapter_id: str, copy: Copy[Any]) -> bool:
        """Whether KV may need these pages to get what was promised to it."""
        promised = self.waiting.kv_promised if copy.idle else 0
        if not promised or self.gpu.kv_room().reclaimable - copy.size >= promised:
            return False
        self.waiting.yielding.add(adapter_id)
        return True

    def fail(self, grant: Grant, error: AdapterCacheError) -> None:
        """A lease gets an error of its own."""
        grant.error = error.copy_for(grant.adapter_id)
        self.counters.requests["none", "failed"] += 1
        self._settled(grant)

    def settle(self, adapter_id: str) -> None:
        """Serve the pending leases on an adapter if they can be served."""
        for grant in self.waiting.grants(adapter_id):
            if self.lease(grant):
                self.counters.requests[grant.found, "miss"] += 1
                self.counters.ready_took(grant.found, self.clock() - grant.since)
                self._settled(grant)

    def _settled(self, grant: Grant) -> None:
        self.waiting.leave(grant)
        if grant.settled is not None:
            self.outbox.append(grant.settled)

    def release(self, grant: Grant) -> None:
        """A lease is given back, in whatever state it is. Idempotent."""
        if grant.released:
            return
        grant.released = True
        if grant.digest:
            self.unhold(Tier.GPU, grant.digest)
        elif grant.error is None:
            self._settled(grant)  # whoever waits for it is told that it was released

    def unhold(self, tier: Tier, digest: Digest) -> None:
        """A lease, a batch or a load lets a copy go."""
        copy = (residency := self._tiers[tier])[digest]
        residency.release(copy)
        if copy.error is not None and not copy.leases:
            residency.drop(copy)
            self.waiting.starved = True  # perhaps: who waits for it waited for this
        elif tier is not Tier.DISK:
            self._sweep(copy, tier)

    # -- what has moved

    def gpu_loaded(self, digest: Digest) -> None:
        """The copy to the GPU is whole."""
        copy = self.gpu[digest]
        self.gpu.loaded(copy)
        self.host.shield(digest, True)
        self.unhold(Tier.HOST, digest)
        for adapter_id in self.catalog.ids_of(digest):
            self.settle(adapter_id)
        self._sweep(copy, Tier.GPU)

    def gpu_failed(self, digest: Digest, error: AdapterCacheError) -> None:
        """The copy to the GPU failed: its pages are free once nobody holds it."""
        copy = self.gpu[digest]
        if copy.leases:
            copy.error = error
        else:
            self.gpu.drop(copy)
        self.unhold(Tier.HOST, digest)

    def host_loaded(self, digest: Digest) -> None:
        """The adapter is whole in CPU memory, and has been checked."""
        copy = self.host[digest]
        self.host.loaded(copy)
        self.unhold(Tier.DISK, digest)
        self._sweep(copy, Tier.HOST)

    def host_failed(self, digest: Digest) -> None:
        """Reading it failed: its blocks are free. What went ahead to the GPU has failed before."""
        self.host.drop(self.host[digest])
        self.unhold(Tier.DISK, digest)

    def load_failed(self, adapter_ids: Iterable[str], error: AdapterCacheError) -> None:
        """Remember a failure for these ids, and fail the leases that wait for them."""
        now = self.clock()
        self.counters.errors[type(error).__name__] += 1
        for adapter_id in adapter_ids:
            self.failures.add(adapter_id, error, now)
            self.waiting.note_failed(adapter_id, error)
            self.waiting.forget_hint(adapter_id)
            for grant in self.waiting.grants(adapter_id):
                self.fail(grant, error)

    def give_up_on_disk(self, digest: Digest, reason: str) -> bool:
        """Forget a copy on disk, if there is one and nobody holds it.

        Returns:
            Whether its files may go.
        """
        may_go = self.disk.evictable(digest)
        if may_go and self.disk.get(digest) is not None:
            self.evict(Tier.DISK, digest, reason)
        return may_go

    def evict(self, tier: Tier, digest: Digest, reason: str) -> None:
        """Forget an idle copy."""
        residency = self._tiers[tier]
        copy = residency[digest]
        residency.drop(copy)
        if tier is Tier.GPU:
            self.host.shield(digest, False)
            self.waiting.draining.discard(digest)
        self.counters.evictions[tier, reason] += 1
        self.counters.prefetch_wasted += copy.prefetched
        if self.on_evict is not None:
            self.outbox.append(partial(self.on_evict, tier, digest))
