"""Tensor parallelism: rank 0's cache leads, the caches of the other ranks follow.

Each step, on rank 0::

    admission, orders = leader.admit(waiting, running=running)
    broadcast(orders)                                    # by whatever the engine has
    ... the step ...
    for report in gather(): leader.hear(report)

and on every other rank::

    admitted = follower.obey(received)                   # [(request, lease)]: ready
    ... the step, with the same leases released as on rank 0 ...
    send(follower.report())
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from cachetools import LRUCache

from adaptercache.assembly import Parts
from adaptercache.cache import AdapterCache
from adaptercache.decision import Decision
from adaptercache.errors import LoadFailed
from adaptercache.identity import AdapterKey, Digest
from adaptercache.lease import Admission, Lease
from adaptercache.peers import Evict, Orders, Peers, Report
from adaptercache.request import Request
from adaptercache.residency import State
from adaptercache.stats import Tier
from adaptercache.waiting import Grant

__all__ = ["Follower", "Leader", "Orders", "Report"]

POLL_S = 0.001
LOOK_AGAIN_S = 0.5  # at a source, where ranks read different content
MOST_LOOKS = 4096
COPY_TRIES = 3


class Leader:
    """Rank 0. Its cache decides for all ranks from now on. Thread-safe.

    Args:
        cache: of rank 0; nothing is on its GPU yet.
        followers: the numbers of the other ranks.

    Raises:
        ValueError: something is on the GPU already, which the others don't have; or this cache
            leads or follows already.
    """

    def __init__(self, cache: AdapterCache, followers: Iterable[int]) -> None:
        self._cache, self._parts = cache, cache._parts
        self._peers = Peers(followers)
        self._looker = _Looker(cache._parts)
        self._tries: LRUCache[Digest, int] = LRUCache(MOST_LOOKS)  # copies that failed on one
        with self._parts.deciding.lock:
            _check_fresh(cache)
            self._parts.ledger.gpu.peers = self._peers

    def admit(self, waiting: Iterable[Request], **options: Any) -> tuple[Admission, Orders]:
        """`AdapterCache.admit`, and what the other ranks have to do before the step."""
        admission = self._cache.admit(waiting, **options)
        admitted = [
            (request.request_id, request.adapter_id, lease.digest, *_sizes(request))
            for request, lease in admission.admitted
        ]
        with self._parts.deciding.lock:
            return admission, self._peers.orders(admitted, self._parts.lifts.wanted())

    def hear(self, report: Report) -> None:
        """What another rank says after a step."""
        ledger = self._parts.ledger
        with self._parts.deciding:
            everywhere, broken = self._peers.hear(report)
            for digest in everywhere:
                for adapter_id in ledger.catalog.ids_of(digest):
                    ledger.settle(adapter_id)
                ledger.unhold(Tier.GPU, digest)  # it was held for them
                self._tries.pop(digest, None)
            for digest in broken:
                if ledger.gpu.resident(digest) is not None:  # else it is told again
                    ledger.unhold(Tier.GPU, digest)
                    if ledger.gpu.get(digest) is not None:
                        ledger.evict(Tier.GPU, digest, "broken")
                    self._try_again(digest, report.rank)
            for adapter_id, why in report.failed.items():
                self._fail(adapter_id, f"rank {report.rank} can't load it: {why}")
            for adapter_id in report.other:
                self._looker.look(adapter_id)

    def _try_again(self, digest: Digest, rank: int) -> None:
        """It is copied anew, but not for ever: meanwhile others wait for what is kept for it."""
        tries = self._tries[digest] = self._tries.get(digest, 0) + 1
        if tries >= COPY_TRIES:
            del self._tries[digest]
            error = LoadFailed(f"its copy onto the GPU of rank {rank} has failed {tries} times")
            self._parts.ledger.load_failed(self._parts.ledger.catalog.ids_of(digest), error)

    def _fail(self, adapter_id: str, why: str) -> None:
        """Whoever waits for it now is told; the other rank remembers it as long as it does."""
        ledger, error = self._parts.ledger, LoadFailed(why)
        ledger.waiting.note_failed(adapter_id, error)
        for grant in ledger.waiting.grants(adapter_id):
            ledger.fail(grant, error)


class _Looker:
    """Looks at the source again where ranks disagree on what an adapter is, now and then."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._next: dict[str, float] = {}

    def look(self, adapter_id: str) -> None:
        """Call with the lock held."""
        now = self._parts.ledger.clock()
        if now >= self._next.get(adapter_id, now):
            if len(self._next) > MOST_LOOKS:
                self._next.clear()
            self._next[adapter_id] = now + LOOK_AGAIN_S
            self._parts.lifter.refresh(adapter_id)


class Follower:
    """Another rank. Its cache brings adapters as far as CPU memory, and does as it is told with its
    GPU: `acquire`, `admit` and `pages.allocate` are for rank 0. Thread-safe.

    Args:
        cache: of this rank, of the same sizes as that of rank 0.
        rank: its number.
    """

    def __init__(self, cache: AdapterCache, rank: int) -> None:
        self._cache, self._parts = cache, cache._parts
        self._rank = rank
        self._begun = self._number = 0
        self._wanted: dict[str, Digest | None] = {}
        self._held: set[Digest] = set()
        self._told: set[Digest] = set()  # to bring onto the GPU
        self._looker = _Looker(cache._parts)
        with self._parts.deciding.lock:
            _check_fresh(cache)
            self._parts.ledger.gpu.follows = True

    def obey(self, orders: Orders) -> list[tuple[Request, Lease]]:
        """Do what rank 0 has decided; call it before the step. Waits for nothing, but where a copy
        of rank 0 has failed.

        Returns:
            The requests that join, with leases that are ready and yours to release.

        Raises:
            ValueError: orders were left out, or come twice.
            CacheClosed: the cache is closed.
            RuntimeError: an adapter is leased here that rank 0 has evicted: its leases are to be
                released when rank 0's are.
        """
        with self._parts.deciding.lock:
            self._parts.deciding.check_open()
            number, before = orders.number, self._begun
            if number != before + 1:
                raise ValueError(f"orders {number} after {before}: each once, in order")
            self._begun = number
        for act in orders.acts:
            if isinstance(act, Evict):
                self._let_end(act.digest)
            with self._parts.deciding.lock:
                if isinstance(act, Evict):
                    self._told.discard(act.digest)
                    self._evict(act.digest)
                else:
                    self._told.add(act.digest)
                    # Its pages may have been KV's: rank 0 alone counts these.
                    self._parts.ledger.gpu.was_in_use(act, self._parts.gpu.streams.last_opened)
                    self._parts.lifts.apply(Decision(loads=(act,)))
                    self._parts.lifter.hops.copy([act])
        with self._parts.deciding:
            self._number = orders.number
            admitted = [self._admitted(*request) for request in orders.admitted]
            self._want(dict(orders.wanted))
        return admitted

    def report(self) -> Report:
        """What this rank has now: for rank 0, after each step."""
        ledger = self._parts.ledger
        with self._parts.deciding.lock:
            self._parts.deciding.check_open()
            self._hold()
            now, known = ledger.clock(), ledger.catalog.get
            errors = {key: ledger.failures.get(key, now) for key in self._wanted}
            other = {
                key: mine.digest
                for key, digest in self._wanted.items()
                if digest is not None and (mine := known(key)) is not None and mine.digest != digest
            }
            on_gpu = (copy.digest for copy in ledger.gpu if copy.state is State.RESIDENT)
            return Report(
                self._rank,
                self._number,
                held=frozenset(self._held),
                on_gpu=frozenset(on_gpu),
                broken=frozenset(digest for digest in self._told if ledger.gpu.get(digest) is None),
                failed={key: str(error) for key, error in errors.items() if error is not None},
                other=other,
            )

    def _let_end(self, digest: Digest) -> None:
        """A copy that is under way writes where others are to be: let it end."""
        while True:
            with self._parts.deciding.lock:
                copy = self._parts.ledger.gpu.get(digest)
                if copy is None or copy.state is State.RESIDENT:
                    return
            time.sleep(POLL_S)

    def _evict(self, digest: Digest) -> None:
        copy = self._parts.ledger.gpu.get(digest)
        if copy is None:  # its copy to the GPU has failed here
            return
        if copy.leases:
            raise RuntimeError("rank 0 has evicted an adapter that is leased here")
        self._parts.ledger.evict(Tier.GPU, digest, "room")

    def _admitted(
        self,
        request_id: str,
        adapter_id: str | None,
        digest: Digest | None,
        num_tokens: int,
        kv_pages: int,
    ) -> tuple[Request, Lease]:
        request = Request(request_id, adapter_id, num_tokens, kv_pages)
        if adapter_id is None or digest is None:
            return request, Lease(None, None, None)
        ledger = self._parts.ledger
        copy = ledger.gpu.resident(digest)
        assert copy is not None, "rank 0 admits what every rank has reported on its GPU"
        ledger.gpu.lease(copy)
        known = ledger.catalog.get(adapter_id)
        grant = Grant(adapter_id, ledger.clock(), Tier.GPU.value)
        grant.digest, grant.slot = digest, copy.place.slot
        grant.key = AdapterKey(adapter_id, known.revision if known is not None else "")
        return request, Lease(adapter_id, grant, self._parts.leasing)

    def _want(self, wanted: dict[str, Digest | None]) -> None:
        """From now on these, in order of arrival. What was held makes way for who is ahead."""
        ledger = self._parts.ledger
        self._wanted = wanted
        for held in self._held:
            ledger.unhold(Tier.HOST, held)
        self._held.clear()
        requests = [Request(adapter_id, adapter_id) for adapter_id in wanted]
        ledger.waiting.replace_requests(
            requests,
            dict.fromkeys(wanted, "").keys(),
            {adapter_id: adapter_id for adapter_id in wanted},
            ledger.clock(),
            ledger.found_in,
        )
        self._parts.lifter.lift_to_host()
        self._hold()
        for adapter_id, theirs in wanted.items():
            mine = ledger.catalog.get(adapter_id)
            if theirs is not None and mine is not None and mine.digest != theirs:
                self._looker.look(adapter_id)

    def _hold(self) -> None:
        """What is wanted and in CPU memory stays there."""
        host = self._parts.ledger.host
        for digest in self._wanted.values():
            if digest is not None and digest not in self._held:
                copy = host.resident(digest)
                if copy is not None:
                    host.lease(copy)
                    self._held.add(digest)


def _check_fresh(cache: AdapterCache) -> None:
    cache._parts.deciding.check_open()
    gpu = cache._parts.ledger.gpu
    if len(gpu):
        raise ValueError("something is on the GPU already: lead and follow from the start")
    if gpu.peers is not None or gpu.follows:
        raise ValueError("this cache leads or follows already")


def _sizes(request: Request) -> tuple[int, int]:
    return request.num_tokens, request.kv_pages
