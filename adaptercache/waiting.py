"""Who waits for which adapter, in order of arrival: pending leases, waiting requests, hints.

Plain Python; the time is passed in. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from adaptercache.decision import Kept
from adaptercache.errors import AdapterCacheError
from adaptercache.identity import AdapterKey, Digest
from adaptercache.request import Request
from adaptercache.stats import Tier
from adaptercache.turns import Turns

__all__ = ["Grant", "WaitingList"]

_kv_pages = attrgetter("kv_pages")

HINT_LASTS_S = 10.0
MAX_HINTS = 1024
LOOK_AHEAD = 256  # distinct adapters: whoever is further behind is not looked at yet


@dataclass(slots=True, eq=False)
class Grant:
    """What the cache knows of one lease.

    ``key``, ``digest`` and ``slot`` are set when it is ready, ``error`` when it has failed.
    ``settled`` is called, without the lock, when either comes after a wait. ``found`` is the tier
    in which the adapter was when it was asked for.
    """

    adapter_id: str
    since: float
    found: str
    settled: Callable[[], None] | None = None
    key: AdapterKey | None = None
    digest: Digest = b""
    slot: int = -1
    error: AdapterCacheError | None = None
    released: bool = False
    pipelined: bool = False  # it may be served while the copy to the GPU is still coming
    seq: int = -1  # its place in the order of arrival, while it waits


@dataclass(slots=True)
class _Hint:
    """Where an adapter will be wanted, when that lapses, and from when on it may be fetched."""

    to: Tier
    until: float
    fetch_from: float = 0.0


class _Seen(NamedTuple):
    """When a waiting request was first seen, in which tier its adapter was then, and its place in
    the order of arrival."""

    at: float
    found: str
    seq: int


class WaitingList:
    """Pending leases and the requests of the last `admit`, merged in order of arrival."""

    def __init__(self) -> None:
        self._seq = 0
        self._grants: dict[int, Grant] = {}
        self._by_id: dict[str, dict[int, Grant]] = {}
        self._wanted: Mapping[str, str] = {}  # by adapter id, the first request for it
        self._seen: dict[str, _Seen] = {}  # by request id
        self._hints: dict[str, _Hint] = {}
        self._lapsed_at: float | None = None  # when lapsed hints were last looked for to make room
        self.failed: dict[str, AdapterCacheError] = {}
        """Loads for waiting requests that failed since the last decision: its next one tells them,
        however late it comes."""
        self.kv_pages = 0
        """The most KV pages that one waiting request asks for."""
        self.kv_promised = 0
        """KV pages of requests that were just admitted and have not taken them yet. The promise
        holds until the next decision or batch, and not for long (see `Janitor`)."""
        self.refused: str | None = None
        """The adapter id that is first in line for room, and found none when last looked at."""
        self.bypasses: dict[str, int] = {}
        """How often others were served while an adapter id was that; for as long as it waits."""
        self.kept: Kept | None = None
        """For whom things were kept in the last decision."""
        self.turns = Turns()
        """Which requests were passed too often."""
        self.draining: set[Digest] = set()
        """Adapters that get no new leases, so that who was passed too often finds room at last."""
        self.drained_for: tuple[str, ...] = ()
        """Who these are: ids of a request, of a pending lease's adapter."""
        self.yielding: set[str] = set()
        """Adapter ids whose leases wait, because their pages are promised to KV."""
        self.starved = False
        """Somebody was refused room when loads were last decided on."""

    def __bool__(self) -> bool:
        return bool(self._grants or self._wanted or self._hints or self.draining)

    @property
    def needs_room(self) -> bool:
        """Whether room that is freed now would serve a pending lease. (Waiting requests are looked
        at in the next `admit`.)"""
        return bool(self.draining or self.yielding) or (self.starved and bool(self._grants))

    def passed_by(self) -> None:
        """Somebody else was served."""
        if self.refused is not None:
            self.bypasses[self.refused] = self.bypasses.get(self.refused, 0) + 1

    def grants(self, adapter_id: str | None = None) -> list[Grant]:
        """The pending leases, all or those on one adapter, the oldest first."""
        found = self._grants if adapter_id is None else self._by_id.get(adapter_id, {})
        return list(found.values())

    def join(self, grant: Grant) -> None:
        """A lease begins to wait."""
        self._seq += 1
        grant.seq = self._seq
        self._grants[grant.seq] = grant
        self._by_id.setdefault(grant.adapter_id, {})[grant.seq] = grant

    def leave(self, grant: Grant) -> None:
        """It is served, has failed, or was given up."""
        if self._grants.pop(grant.seq, None) is not None:
            same = self._by_id[grant.adapter_id]
            del same[grant.seq]
            if not same:
                del self._by_id[grant.adapter_id]

    def is_within_sight(self, adapter_id: str) -> bool:
        """Whether one who has just joined is looked at: not where the line ahead is longer than
        that, nor where somebody waits for the same adapter already."""
        return len(self._by_id) <= LOOK_AHEAD and len(self._by_id.get(adapter_id, ())) == 1

    def first_seen(self, request_id: str) -> tuple[float, str] | None:
        """When a waiting request was first seen, and the tier that its adapter was in then."""
        seen = self._seen.get(request_id)
        return (seen.at, seen.found) if seen is not None else None

    def replace_requests(
        self,
        requests: Sequence[Request],
        request_ids: KeysView[str],
        wanted: Mapping[str, str],
        now: float,
        found_in: Callable[[str], str],
    ) -> None:
        """These requests wait now, in order of arrival; all others are gone.

        Thousands may wait for long, so what has not changed is not touched one by one.

        Args:
            requests: those that wait.
            request_ids: theirs.
            wanted: their distinct adapters, in order; with each, the first request's id.
            now: seconds.
            found_in: says in which tier an adapter is.
        """
        self.failed = {}
        self.kv_pages = max(map(_kv_pages, requests), default=0)
        self._wanted = wanted
        if self._seen.keys() != request_ids:
            for gone in self._seen.keys() - request_ids:
                del self._seen[gone]
            self._note_new(requests, set(request_ids - self._seen.keys()), now, found_in)

    def _note_new(
        self, requests: Sequence[Request], new: set[str], now: float, found_in: Callable[[str], str]
    ) -> None:
        if not new:
            return
        if len(new) < len(requests) // 2:  # the new ones have come last
            last, requests, left = reversed(requests), [], len(new)
            for request in last:
                requests.append(request)
                left -= request.request_id in new
                if not left:
                    break
        self._seq += 1
        found = {
            adapter_id: _Seen(
                now, found_in(adapter_id) if adapter_id is not None else Tier.GPU.value, self._seq
            )
            for adapter_id in {request.adapter_id for request in requests}
        }
        self._seen.update(
            (request.request_id, found[request.adapter_id])
            for request in requests
            if request.request_id in new
        )

    def note_failed(self, adapter_id: str, error: AdapterCacheError) -> None:
        """A load that waiting requests may want has failed."""
        if adapter_id in self._wanted:
            self.failed[adapter_id] = error

    def hint(self, adapter_id: str, to: Tier, now: float) -> None:
        """Somebody will want it soon. Lapses, unless it is said again."""
        if len(self._hints) >= MAX_HINTS and now != self._lapsed_at:  # once a call of `prefetch`
            self._lapsed_at = now
            self.hints(now)  # drops those that have lapsed
        if (said := self._hints.get(adapter_id)) is not None:
            said.to, said.until = to, now + HINT_LASTS_S
        elif len(self._hints) < MAX_HINTS:
            self._hints[adapter_id] = _Hint(to, now + HINT_LASTS_S)

    def forget_hint(self, adapter_id: str) -> None:
        """What was hinted at has come, or has failed."""
        if self._hints:
            self._hints.pop(adapter_id, None)

    def hints(self, now: float) -> list[tuple[str, Tier]]:
        """The first hints that have not lapsed, the oldest first."""
        for adapter_id in [key for key, hint in self._hints.items() if hint.until <= now]:
            del self._hints[adapter_id]
        return [(key, hint.to) for key, hint in islice(self._hints.items(), LOOK_AHEAD)]

    def may_fetch(self, adapter_id: str, now: float) -> bool:
        """Whether it may be fetched for a hint's sake: not again so soon. Where the disk can't hold
        all that is hinted at, each would go as the next comes, and be fetched again."""
        hint = self._hints.get(adapter_id)
        return hint is not None and now >= hint.fetch_from

    def note_fetch(self, adapter_id: str, now: float) -> None:
        """It is being fetched for a hint's sake."""
        if (hint := self._hints.get(adapter_id)) is not None:
            hint.fetch_from = now + HINT_LASTS_S

    def order(self, waiting: Mapping[str, str] | None = None) -> list[str]:
        """The first distinct adapter ids that somebody waits for, in order of arrival.

        Args:
            waiting: the distinct adapters of a new list of waiting requests, in its order, and
                their first requests; None: of the last one. Among requests the list's order is the
                order of arrival; a pending lease comes before the first one that was first seen
                later.
        """
        queue = self._wanted if waiting is None else waiting
        if not self._grants:
            return list(islice(queue, LOOK_AHEAD))
        distinct: dict[str, None] = {}
        for adapter_id in self._merge(queue):
            distinct[adapter_id] = None
            if len(distinct) == LOOK_AHEAD:
                break
        return list(distinct)

    def _merge(self, queue: Mapping[str, str]) -> Iterator[str]:
        grants = iter(self._grants.values())
        grant = next(grants, None)
        for adapter_id, request_id in queue.items():
            seen = self._seen.get(request_id)
            while grant is not None and (seen is None or grant.seq < seen.seq):
                yield grant.adapter_id
                grant = next(grants, None)
            yield adapter_id
        while grant is not None:
            yield grant.adapter_id
            grant = next(grants, None)
