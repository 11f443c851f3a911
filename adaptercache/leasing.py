"""Gives leases out and takes them back: to who asks for one, to admitted requests, to batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Literal

from adaptercache.arena import GpuPlace
from adaptercache.batch import Decision, Request, plan
from adaptercache.deciding import Deciding
from adaptercache.identity import Digest, check_id
from adaptercache.kernels.segments import BASE_SLOT
from adaptercache.lease import Admission, Lease
from adaptercache.ledger import Ledger
from adaptercache.lifts import Lifts
from adaptercache.prefetch import Lifter
from adaptercache.residency import Copy
from adaptercache.stats import Tier
from adaptercache.waiting import Grant

__all__ = ["Leasing"]

log = logging.getLogger(__name__)
PROMISE_S = 1.0  # how long pages stay promised to a request that doesn't take them
LOOK_AT_PROMISE: Final = "look at the promise"
GPU = Tier.GPU.value


class Leasing:
    """See the module's docstring; `AdapterCache` has the contract of each verb.

    Thread-safe. Owns one thread, which takes back leases that were garbage-collected, and ends a
    promise of KV pages that nobody takes up while a lease waits for room.
    """

    def __init__(self, ledger: Ledger, lifts: Lifts, lifter: Lifter, deciding: Deciding) -> None:
        self._ledger = ledger
        self._lifts = lifts
        self._lifter = lifter
        self._deciding = deciding
        self._told: SimpleQueue[Grant | Literal["look at the promise"] | None] = SimpleQueue()
        self._janitor = threading.Thread(
            target=self._tidy_up, name="adaptercache-janitor", daemon=True
        )
        self._janitor.start()

    def acquire(self, adapter_id: str | None) -> Lease:
        check_id(adapter_id)
        if adapter_id is None:
            return Lease(None, None, None)
        ledger = self._ledger
        grant = Grant(adapter_id, ledger.clock(), GPU)
        with self._deciding.lock:  # a hit changes nothing that anybody waits for
            self._deciding.check_open()
            if ledger.lease(grant):
                ledger.counters.requests[GPU, "hit"] += 1
                ledger.waiting.bypasses += 1
                hit = Lease(adapter_id, grant, self)
                if not ledger.stale:
                    return hit
        if grant.key is None:
            return self._acquire_later(grant)
        with self._deciding:  # the source is asked again
            return hit

    def _acquire_later(self, grant: Grant) -> Lease:
        lease = Lease.pending(grant.adapter_id, grant, self)
        with self._deciding:
            self._deciding.check_open()
            error = self._ledger.standing(grant.adapter_id).error
            if error is not None:
                self._ledger.fail(grant, error)
            else:
                grant.found = self._ledger.found_in(grant.adapter_id)
                self._ledger.waiting.join(grant)
                if self._ledger.waiting.kv_promised:
                    self._told.put(LOOK_AT_PROMISE)
                self._ledger.settle(grant.adapter_id)
        return lease

    def admit(
        self,
        waiting: Sequence[Request],
        running: Iterable[tuple[Request, Lease]],
        max_adapters: int | None,
    ) -> Admission:
        digests = {lease.digest for _, lease in running}
        with self._deciding.lock:
            self._deciding.check_open()
            decision = plan(
                waiting,
                self._lifts,
                running={digest for digest in digests if digest is not None},
                max_adapters=max_adapters,
            )
            admitted = [self._admitted(*pair) for pair in decision.admitted]
            self._lifts.apply(decision)
            self._lifter.copy(decision.loads)
            self._note_waiting(decision)
            self._ledger.waiting.bypasses += bool(decision.admitted)
            self._lifts.be_fair(decision.refused)
            self._lifter.lift_to_host()
        self._deciding.tell()
        return Admission(
            admitted,
            list(decision.deferred),
            dict(decision.reasons),
            list(decision.failed),
            decision.pages_wanted,
        )

    def _admitted(self, request: Request, digest: Digest | None) -> tuple[Request, Lease]:
        if request.adapter_id is None:
            return request, Lease(None, None, None)
        ledger = self._ledger
        now = ledger.clock()
        since, found = ledger.waiting.first_seen(request.request_id) or (now, GPU)
        ledger.counters.requests[found, "hit" if found == GPU else "miss"] += 1
        if found != GPU:
            ledger.counters.ready_took(found, now - since)
        grant = Grant(request.adapter_id, now, found)
        is_served = ledger.lease(grant)
        assert is_served and grant.digest == digest, "planned on this very state"
        return request, Lease(request.adapter_id, grant, self)

    def _note_waiting(self, decision: Decision) -> None:
        ledger = self._ledger
        ledger.waiting.replace_requests(decision.deferred, ledger.clock(), ledger.found_in)
        ledger.waiting.kv_promised = sum(request.kv_pages for request, _ in decision.admitted)
        ledger.waiting.starved = True  # perhaps: the next that frees room finds out
        ledger.counters.deferred.update(Counter(decision.reasons.values()))
        if decision.failed:
            ledger.counters.requests["none", "failed"] += len(decision.failed)

    @contextmanager
    def hold(
        self, pairs: Sequence[tuple[Lease, int]]
    ) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """Hold the adapters of a batch once more, whatever becomes of their leases.

        Yields ``(segments, largest rank)``, where a segment is ``(slot, number of tokens)``.
        """
        segments: list[tuple[int, int]] = []
        copies: dict[Digest, Copy[GpuPlace]] = {}
        gpu = self._ledger.gpu
        with self._deciding.lock:
            self._deciding.check_open()
            self._ledger.waiting.kv_promised = 0
            for lease, tokens in pairs:
                grant = lease.served()
                if grant is None:
                    segments.append((BASE_SLOT, tokens))
                    continue
                segments.append((grant.slot, tokens))
                if grant.digest not in copies:
                    copies[grant.digest] = gpu[grant.digest]
            for copy in copies.values():
                gpu.lease(copy)
        try:
            yield segments, max((copy.place.max_rank for copy in copies.values()), default=0)
        finally:
            with self._deciding.freeing():
                for copy in copies.values():
                    self._ledger.unhold(Tier.GPU, copy.digest)

    def take_back(self, grant: Grant) -> None:
        """A lease is released; whoever waits for room may get it now."""
        with self._deciding.lock:
            self._ledger.release(grant)
            if not self._ledger.waiting.needs_room and not self._ledger.outbox:
                return
        with self._deciding.freeing():
            pass

    def abandon(self, grant: Grant) -> None:
        """A lease was garbage-collected. Takes no lock, so a finalizer may call it anywhere."""
        self._told.put(grant)

    def _tidy_up(self) -> None:
        lapses: float | None = None
        while True:
            try:
                told = self._told.get(timeout=lapses and max(0.0, lapses - time.monotonic()))
            except Empty:
                lapses = None
                with suppress(BaseException), self._deciding:
                    self._ledger.waiting.kv_promised = 0
                continue
            if told is None:
                return
            if isinstance(told, Grant):
                self._take_back_abandoned(told)
            elif lapses is None:
                lapses = time.monotonic() + PROMISE_S

    def _take_back_abandoned(self, grant: Grant) -> None:
        text = "a lease on %r was dropped unreleased"
        fields = {"adapter_id": grant.adapter_id}
        line = partial(log.warning, text, grant.adapter_id, extra=fields)
        with suppress(BaseException), self._deciding.freeing():
            self._ledger.release(grant)
            self._ledger.outbox.append(line)

    def close(self) -> None:
        """Stop the thread. Without the lock."""
        self._told.put(None)
        if self._janitor is not threading.current_thread():
            self._janitor.join()
