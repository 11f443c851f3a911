"""Room for who was passed too often: the least used adapters get no new leases until it fits.

That is a request that a decision kept things for (`turns`, `batch`), and a pending lease past which
others were served. What runs goes on; so room comes when the requests that run have ended.

Plain Python. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from adaptercache.identity import Digest
from adaptercache.ledger import Ledger
from adaptercache.standing import Need
from adaptercache.turns import MAX_BYPASSES

__all__ = ["Fairness"]


@dataclass(frozen=True, slots=True)
class _Claim:
    """What somebody needs: pages for its adapter, 0 where that is up, and pages for KV. ``ahead``:
    adapter ids that others wait for who came before."""

    digest: Digest | None
    pages: int
    kv_pages: int
    ahead: tuple[str, ...]


class Fairness:
    """Decides which adapters are drained: `WaitingList.draining`.

    Args:
        need_of: what an adapter still needs to be up; None while it is far away.
    """

    def __init__(self, ledger: Ledger, need_of: Callable[[str | None], Need | None]) -> None:
        self._ledger, self._need_of = ledger, need_of

    def look(self, refused: Digest | None) -> None:
        """Drain what has to be drained now, and nothing else.

        Args:
            refused: the adapter that is first in line for room and finds none.
        """
        waiting, line = self._ledger.waiting, list[str]()
        if refused is not None or waiting.bypasses:
            line = waiting.order()
        waiting.refused = None
        if refused is not None:
            waiting.refused = next(
                (each for each in line if self._digest_of(each) == refused), None
            )
        waiting.bypasses = {each: n for each, n in waiting.bypasses.items() if each in line}
        claims = self._claim_of_request()
        for place, adapter_id in enumerate(line):
            if waiting.bypasses.get(adapter_id, 0) >= MAX_BYPASSES:
                need = self._need_of(adapter_id)
                if need is not None and not self._is_up(need):
                    claim = _Claim(need.digest, need.pages, 0, tuple(line[:place]))
                    claims.setdefault(adapter_id, claim)
                    break
        if tuple(claims) != waiting.drained_for:
            self.stop()
            waiting.drained_for = tuple(claims)
        if claims:
            self._drain(claims.values(), refused)

    def withdraw(self, request_ids: Collection[str]) -> None:
        """Only these requests wait now: for the others nothing is kept any more."""
        waiting = self._ledger.waiting
        waiting.turns.forget_others(request_ids)
        if waiting.kept is not None and waiting.kept.request.request_id not in request_ids:
            waiting.kept = None
            self.stop()

    def stop(self) -> None:
        """Whoever met an adapter that was drained may have it now."""
        waiting = self._ledger.waiting
        drained, waiting.draining, waiting.drained_for = waiting.draining, set(), ()
        self._settle(drained)

    def _settle(self, digests: Collection[Digest]) -> None:
        for digest in digests:
            for adapter_id in self._ledger.catalog.ids_of(digest):
                self._ledger.settle(adapter_id)

    def _claim_of_request(self) -> dict[str, _Claim]:
        """That of the request for which things are kept, by its adapter's id if it has one."""
        kept = self._ledger.waiting.kept
        need = self._need_of(kept.request.adapter_id) if kept is not None else None
        if kept is None or need is None:
            return {}
        request = kept.request
        pages = 0 if self._is_up(need) else need.pages
        claim = _Claim(need.digest, pages, request.kv_pages, kept.ahead)
        return {request.adapter_id or request.request_id: claim}

    def _drain(self, claims: Collection[_Claim], refused: Digest | None) -> None:
        """As many as are missing now, and none that somebody ahead waits for: it would neither be
        leased nor make room."""
        gpu, waiting = self._ledger.gpu, self._ledger.waiting
        ahead = {self._digest_of(adapter_id) for claim in claims for adapter_id in claim.ahead}
        spared = ahead | {claim.digest for claim in claims}
        missing = self._missing(claims, spared)
        needs_one = any(claim.digest == refused for claim in claims if claim.pages)
        candidates = sorted(
            (copy for copy in gpu if copy.digest not in spared),
            key=lambda copy: (copy.digest not in waiting.draining, copy.leases),
        )
        chosen: set[Digest] = set()
        for copy in candidates:  # those that are drained already first: idle ones are to stay that
            is_drained = copy.digest in waiting.draining
            if (missing > 0 or needs_one) and (copy.leases or is_drained):
                chosen.add(copy.digest)
                missing -= copy.size
                needs_one = needs_one and not copy.leases
        let_go, waiting.draining = waiting.draining - chosen, chosen
        self._settle(let_go)

    def _missing(self, claims: Collection[_Claim], spared: Collection[Digest | None]) -> int:
        """Pages that adapters have to give up: beside what is free and what is idle, but for what
        is idle because it is drained; and beside what KV has to give back anyway."""
        gpu, waiting = self._ledger.gpu, self._ledger.waiting
        pages = sum(claim.pages for claim in claims)
        kv_pages = sum(claim.kv_pages for claim in claims)
        kv = gpu.kv_room()
        from_kv = max(0, kv_pages - max(0, kv.limit - kv.used))
        idle = sum(
            copy.size
            for copy in gpu.coldest()
            if copy.digest not in spared and copy.digest not in waiting.draining
        )
        missing = pages + kv_pages - from_kv - gpu.pages.num_free - idle
        if pages:
            missing = max(missing, pages - gpu.adapter_room(waiting.kv_pages) - idle)
        return missing

    def _is_up(self, need: Need) -> bool:
        return need.digest is None or self._ledger.gpu.get(need.digest) is not None

    def _digest_of(self, adapter_id: str) -> Digest | None:
        known = self._ledger.catalog.get(adapter_id)
        return known.digest if known is not None else None
