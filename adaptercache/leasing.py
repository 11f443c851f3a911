"""Gives leases out and takes them back: to who asks for one, to admitted requests, to batches."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from adaptercache.arena import GpuPlace
from adaptercache.batch import Batch, plan
from adaptercache.caps import Caps
from adaptercache.deciding import Deciding
from adaptercache.decision import Decision
from adaptercache.given import all_of, check_distinct, no_pair, requests_of
from adaptercache.identity import Digest, check_id
from adaptercache.janitor import Janitor
from adaptercache.kernels.segments import BASE_SLOT
from adaptercache.lease import Admission, Lease
from adaptercache.ledger import Ledger
from adaptercache.lifts import Lifts
from adaptercache.prefetch import Lifter
from adaptercache.request import Request
from adaptercache.residency import Copy, State
from adaptercache.stats import Tier
from adaptercache.waiting import Grant

__all__ = ["Leasing"]

GPU = Tier.GPU.value


@dataclass(slots=True)
class Held:
    """The adapters of a batch: ``segments`` are ``(slot, number of tokens)``, ``ranks`` the largest
    of each slot, ``modules`` what one of them has at least; the slots ``coming`` are still being
    copied to the GPU. ``step``: the number of the step that reads them, once it has one."""

    segments: list[tuple[int, int]]
    ranks: dict[int, int]
    modules: frozenset[str]
    coming: list[int]
    step: int = 0


class Leasing:
    """See the module's docstring; `AdapterCache` has the contract of each verb.

    Thread-safe. Owns a `Janitor`.
    """

    def __init__(self, ledger: Ledger, lifts: Lifts, lifter: Lifter, deciding: Deciding) -> None:
        self._ledger = ledger
        self._lifts = lifts
        self._lifter = lifter
        self._deciding = deciding
        self._janitor = Janitor(deciding, ledger, lifts)

    def acquire(self, adapter_id: str | None) -> Lease:
        check_id(adapter_id)
        if adapter_id is None:
            return Lease(None, None, None)
        ledger = self._ledger
        grant = Grant(adapter_id, ledger.clock(), GPU)
        with self._deciding.lock:  # a hit changes nothing that anybody waits for
            self._deciding.check_open()
            if not ledger.gpu.follows and ledger.lease(grant):
                ledger.counters.requests[GPU, "hit"] += 1
                ledger.waiting.passed_by()
                hit = Lease(adapter_id, grant, self)
                if not ledger.stale:
                    return hit
        if grant.key is None:
            return self._acquire_later(grant)
        with self._deciding:  # the source is asked again
            return hit

    def _acquire_later(self, grant: Grant) -> Lease:
        lease = Lease.pending(grant.adapter_id, grant, self)
        with self._deciding.lock:
            self._deciding.check_open()
            self._ledger.gpu.check_leads()
            # Who waits is never in a back-off, whatever the GPU has: nothing would end the wait.
            error = self._ledger.standing(grant.adapter_id).error
            error = error or self._ledger.failures.get(grant.adapter_id, grant.since)
            if error is not None:
                self._ledger.fail(grant, error)
            else:
                grant.found = self._ledger.found_in(grant.adapter_id)
                self._ledger.waiting.join(grant)
                if self._ledger.waiting.kv_promised:
                    self._janitor.watch_promise()
                self._ledger.settle(grant.adapter_id)
                self._lifter.look_for(grant.adapter_id)
        self._deciding.tell()
        return lease

    def admit(
        self, waiting: Iterable[Request], running: Iterable[tuple[Request, Lease]], caps: Caps
    ) -> Admission:
        waiting = requests_of(waiting)
        pairs = all_of("running", running)
        try:
            grants = [lease.served_by(self) for _, lease in pairs]
            tokens = sum(request.num_tokens for request, _ in pairs)
        except (TypeError, ValueError, AttributeError):
            raise no_pair("running", pairs, (Request, Lease), "(Request, Lease)") from None
        digests = [grant.digest for grant in grants if grant is not None]
        line = self._ledger.waiting
        with self._deciding.telling():
            self._deciding.check_open()
            self._ledger.gpu.check_leads()
            if line.turns.overdue:
                self._lifts.fairness.withdraw({request.request_id for request in waiting})
            batch, floor = Batch(digests, tokens, caps, line.turns.overdue), line.kv_pages
            decision = plan(waiting, self._lifts, batch)
            check_distinct(decision, [request.request_id for request, _ in pairs])
            line.kv_promised = 0
            coming = {load.digest for load in decision.loads}
            leases = [None if d in coming else self._admitted(r, d) for r, d in decision.admitted]
            self._lifts.apply(decision)
            self._lifter.hops.copy(
                decision.loads, {digest for _, digest in decision.admitted if digest}
            )
            admitted = [
                (request, lease or self._admitted(request, digest))
                for lease, (request, digest) in zip(leases, decision.admitted, strict=True)
            ]
            self._note_waiting(decision)
            if decision.admitted:
                line.passed_by()
            self._lifts.end_promise(0)
            self._lifts.fairness.look(decision.refused)
            if line.kv_pages < floor and line.needs_room:  # there is more than was decided on
                self._lifter.advance()
            else:
                self._lifter.lift_to_host()
        return Admission(
            admitted,
            list(decision.deferred),
            dict(decision.reasons),
            list(decision.failed),
            decision.pages_wanted,
        )

    def _admitted(self, request: Request, digest: Digest | None) -> Lease:
        ledger = self._ledger
        now = ledger.clock()
        if request.adapter_id is None:
            ledger.traffic.add(None, now)
            return Lease(None, None, None)
        since, found = ledger.waiting.first_seen(request.request_id) or (now, GPU)
        ledger.counters.requests[found, "hit" if found == GPU else "miss"] += 1
        if found != GPU:
            ledger.counters.ready_took(found, now - since)
        grant = Grant(request.adapter_id, now, found, pipelined=request.pipelined)
        is_served = ledger.lease(grant)
        assert is_served and grant.digest == digest, "planned on this very state"
        return Lease(request.adapter_id, grant, self)

    def _note_waiting(self, decision: Decision) -> None:
        ledger = self._ledger
        ledger.waiting.replace_requests(
            decision.deferred,
            decision.reasons.keys(),
            decision.cold,
            ledger.clock(),
            ledger.found_in,
        )
        kept = decision.kept.request.request_id if decision.kept is not None else None
        others = bool(decision.admitted)
        ledger.waiting.turns.note(decision.first, decision.reasons.keys(), others, kept)
        ledger.waiting.kept = decision.kept
        ledger.waiting.kv_promised = sum(request.kv_pages for request, _ in decision.admitted)
        self._janitor.has_promised()
        ledger.waiting.starved = True  # perhaps: the next that frees room finds out
        if ledger.waiting.kv_promised and ledger.waiting.needs_room:
            self._janitor.watch_promise()
        ledger.counters.deferred.update(Counter(decision.reasons.values()))
        if decision.failed:
            ledger.counters.requests["none", "failed"] += len(decision.failed)

    @contextmanager
    def hold(self, pairs: Iterable[tuple[Lease, int]]) -> Iterator[Held]:
        """Hold the adapters of a batch once more, whatever becomes of their leases.

        Raises:
            RuntimeError: a lease that is not ready, was released, or is of another cache.
            TypeError, ValueError: no such pairs.
            AdapterCacheError: the copy that a pipelined lease waits for has failed.
        """
        pairs = all_of("pairs", pairs)
        with self._deciding.lock:
            self._deciding.check_open()
            try:
                segments, copies = self._segments_of(pairs)
            except (TypeError, ValueError, AttributeError):
                meant = "(Lease, number of tokens)"
                raise no_pair("pairs", pairs, (Lease, int), meant) from None
            for copy in copies.values():
                if copy.error is not None:
                    raise copy.error.copy_for(None)
            for copy in copies.values():
                self._ledger.gpu.lease(copy)
            self._lifts.end_promise()
        held = Held(
            segments,
            {copy.place.slot: copy.place.spec.max_rank for copy in copies.values()},
            frozenset().union(*(copy.place.spec.modules for copy in copies.values())),
            [copy.place.slot for copy in copies.values() if copy.state is State.LOADING],
        )
        try:
            self._deciding.tell()  # of leases that yielded to a promise
            yield held
        finally:
            with self._deciding.freeing():
                for copy in copies.values():
                    self._ledger.gpu.used_in(copy, held.step)
                    self._ledger.unhold(Tier.GPU, copy.digest)

    def _segments_of(
        self, pairs: Iterable[tuple[Lease, int]]
    ) -> tuple[list[tuple[int, int]], dict[Digest, Copy[GpuPlace]]]:
        segments: list[tuple[int, int]] = []
        copies: dict[Digest, Copy[GpuPlace]] = {}
        gpu = self._ledger.gpu
        for lease, tokens in pairs:
            grant = lease.served_by(self)
            if grant is None:
                segments.append((BASE_SLOT, tokens))
                continue
            segments.append((grant.slot, tokens))
            if grant.digest not in copies:
                copies[grant.digest] = gpu[grant.digest]
        operator.index(sum(tokens for _, tokens in segments))
        return segments, copies

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
        self._janitor.abandon(grant)

    def close(self) -> None:
        """Stop the thread. Without the lock."""
        self._janitor.close()
