"""Which waiting requests join the next batch, and which adapters are brought up for the rest.

`plan` is pure: it reads the state and answers with a `Decision`. Nothing changes until that is
applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from adaptercache.caps import CAP_REASONS, NO_CAPS, Caps, Roster
from adaptercache.decision import Decision, Kept
from adaptercache.errors import AdapterCacheError, CapacityError
from adaptercache.identity import Digest
from adaptercache.request import Request
from adaptercache.standing import Load, Standing, State
from adaptercache.step_room import StepRoom

__all__ = ["Batch", "plan"]

LINES = {
    "cap": CAP_REASONS,
    "room": frozenset({"room", "kv_pages"}),
    "tokens": frozenset({"max_tokens"}),
}
"""What makes up each line of those that wait. Who waits for a load is passed by all."""
MANY_AHEAD = 256  # adapters: those behind aren't loaded yet


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch as it runs, and what it may become.

    Args:
        adapters: those of the running requests, one entry a request.
        tokens: that the running requests bring into a step.
        overdue: ids of requests that others have been admitted past too often: until they are in,
            nobody behind them takes what they wait for.
    """

    adapters: Collection[Digest] = ()
    tokens: int = 0
    caps: Caps = NO_CAPS
    overdue: Collection[str] = ()


NO_BATCH = Batch()


def plan(waiting: Sequence[Request], state: State, batch: Batch = NO_BATCH) -> Decision:
    """Decide on a batch.

    Requests are looked at in order. One whose adapter is resident is admitted, also past others
    whose adapter isn't or for whom a cap leaves no room; base-model requests are never held back
    by adapters.

    Args:
        waiting: in order of arrival, with distinct ids.
        state: only read.
        batch: what runs already, and the caps.
    """
    walk = _Admissions(state, batch)
    walk.look_at_all(waiting)
    placement = state.place_on_gpu(walk.newcomers, walk.cold, walk.room.kv_promised)
    if placement.no_room:
        walk.tell_no_room(set(placement.no_room))
    loads = state.number(placement)
    if loads and any(request.pipelined for request in walk.deferred):
        walk.admit_coming(loads, {load.digest for load in loads if state.can_pipeline(load)})
        places = {request.request_id: place for place, request in enumerate(waiting)}
        walk.admitted.sort(key=lambda pair: places[pair[0].request_id])
    return Decision(
        admitted=tuple(walk.admitted),
        deferred=tuple(walk.deferred),
        reasons=walk.reasons,
        failed=tuple(walk.failed),
        evictions=placement.evictions,
        loads=loads,
        pages_wanted=state.kv_pages_wanted(placement, max(1, walk.room_for_adapters())),
        refused=placement.no_room[0] if placement.no_room else None,
        first=walk.first_in_line(),
        kept=walk.kept,
        cold=walk.cold,
    )


class _Admissions:
    """One walk over the waiting requests."""

    def __init__(self, state: State, batch: Batch) -> None:
        self._state = state
        self._overdue = batch.overdue
        self._roster = Roster(batch.caps, Counter(batch.adapters), state.footprint)
        self.room = StepRoom(state.kv_room(), batch.caps.tokens, batch.tokens)
        self._standings: dict[str, Standing] = {}
        self._waits: dict[str | None, str] = {}  # adapters whose requests all wait, and why
        self._far: list[Request] = []  # of another rank class than the batch's: looked at again
        self._is_last_look = not batch.caps.near_ranks
        self.kept: Kept | None = None
        self.cold: dict[str, str] = {}  # by adapter id, the first of those that wait, in order
        self.newcomers: list[Digest] = []  # adapters that this decision adds to the batch
        self.admitted: list[tuple[Request, Digest | None]] = []
        self.deferred: list[Request] = []
        self.reasons: dict[str, str] = {}
        self.failed: list[tuple[Request, AdapterCacheError]] = []

    def look_at_all(self, waiting: Sequence[Request]) -> None:
        self._look_at_each(waiting)
        if self._far:
            far, self._is_last_look = self._far, True
            self._look_at_each(far)
            place = {request.request_id: index for index, request in enumerate(waiting)}
            self.admitted.sort(key=lambda pair: place[pair[0].request_id])
            self.deferred.sort(key=lambda request: place[request.request_id])
            self.cold = {}
            for request in self.deferred:
                if request.adapter_id is not None:
                    self.cold.setdefault(request.adapter_id, request.request_id)

    def _look_at_each(self, requests: Sequence[Request]) -> None:
        waits, standings, standing_of = self._waits, self._standings, self._state.standing
        settled = self._state.settled()
        deferred, reasons, cold = self.deferred, self.reasons, self.cold
        for request in requests:
            adapter_id = request.adapter_id
            reason = waits.get(adapter_id)
            if reason is None and adapter_id is not None and adapter_id not in standings:
                if settled is not None and adapter_id not in settled:
                    reason = "loading"
                else:
                    standing = standings[adapter_id] = standing_of(adapter_id)
                    reason = None if standing.ready or standing.error else standing.reason
                if reason is not None:
                    waits[adapter_id] = reason
            if reason is None or (request.pipelined and self._is_coming(adapter_id)):
                self._look_at(request)
            else:
                deferred.append(request)
                reasons[request.request_id] = reason
                if adapter_id is not None:
                    cold.setdefault(adapter_id, request.request_id)
                if request.request_id in self._overdue:
                    self._keep_for(request)

    def _keep_for(self, request: Request) -> None:
        """It was passed too often: whoever comes behind it leaves it all that it needs, whatever it
        waits for just now. One at a time, and none whose adapter is still far away."""
        need = self._state.need_of(request.adapter_id) if self.kept is None else None
        if need is None or self._never_fits(request, need.digest):
            return
        ahead = tuple(islice((key for key in self.cold if key != request.adapter_id), MANY_AHEAD))
        self.kept = Kept(request, need, ahead)
        self.room.keep(request.num_tokens, request.kv_pages, need.pages)
        if need.digest is not None:
            self._roster.keep(need.digest)

    def _never_fits(self, request: Request, digest: Digest | None) -> bool:
        """Whether it fails once its adapter is up: nothing is kept for it."""
        if self.room.never_fits(request.num_tokens, request.kv_pages) is not None:
            return True
        return digest is not None and self._roster.never_fits(digest) is not None

    def _is_coming(self, adapter_id: str | None) -> bool:
        standing = self._standings.get(adapter_id) if adapter_id is not None else None
        return standing is not None and standing.coming

    def _look_at(self, request: Request) -> None:
        """One whose adapter is ready, or can be waited for, or failed, or the base model."""
        digest = None
        if request.adapter_id is not None:
            standing = self._standings[request.adapter_id]
            if standing.error is not None:
                self.failed.append((request, standing.error.copy_for(request.adapter_id)))
                return
            digest = standing.digest
            assert digest is not None, "ready, so its content is known"
            if not self._may_join(request, request.adapter_id, digest):
                return
        idle_pages = 0
        if digest is not None and digest not in self._roster:
            idle_pages = self._state.idle_pages(digest)
        if over := self.room.never_fits(request.num_tokens, request.kv_pages):
            self._fail(request, f"request {request.request_id!r} fits no step", over)
            return
        reason = self.room.refuses(request.num_tokens, request.kv_pages, idle_pages)
        if reason is not None:
            self._defer(request, reason)
            return
        self._admit(request, digest)

    def admit_coming(self, loads: Sequence[Load], coming: Collection[Digest]) -> None:
        """Admit those of whose loads the ones ``coming`` can be waited for in a step."""
        self.room.hold_back(sum(len(load.pages) for load in loads))
        ids = self._state.names_of(coming)
        deferred, self.deferred = self.deferred, []
        self.cold.clear()
        for request in deferred:
            adapter_id, reason = request.adapter_id, self.reasons.pop(request.request_id)
            is_coming = request.pipelined and reason == "loading"
            if is_coming and adapter_id is not None and adapter_id in ids:
                self._look_at_coming(request, self._state.standing(adapter_id).digest)
            else:
                self._defer(request, reason)

    def _look_at_coming(self, request: Request, digest: Digest | None) -> None:
        if digest is None or self._roster.measures:
            # What its load adds to such caps is known once it has begun: in the next step.
            self._defer(request, "loading")
            return
        is_kept_for = self.kept is not None and request == self.kept.request
        if self.kept is not None and not is_kept_for and self.room.is_overdrawn:
            self._defer(request, "loading")  # admitted, its pages could not be had back
            return
        reason = self._roster.refuses(digest)
        if reason is None and self.kept is not None and request == self.kept.request:
            pages = self.kept.need.pages
            reason = self.room.refuses_kept(request.num_tokens, request.kv_pages, pages)
        elif reason is None:
            reason = self.room.refuses(request.num_tokens, request.kv_pages, 0)
        if reason is not None:
            self._defer(request, reason)
            return
        self._admit(request, digest)
        if is_kept_for:
            self.kept = None

    def _admit(self, request: Request, digest: Digest | None) -> None:
        if digest is not None and self._roster.add(digest):
            self.newcomers.append(digest)
        self.admitted.append((request, digest))

    def _may_join(self, request: Request, adapter_id: str, digest: Digest) -> bool:
        """Whether the caps let its adapter in, and it isn't put aside for its rank."""
        is_overdue = request.request_id in self._overdue
        if not (self._is_last_look or is_overdue or self._roster.is_near(digest)):
            self._far.append(request)
            return False
        reason = self._roster.refuses(digest)
        if reason is None:
            return True
        if reason != "max_adapters" and (over := self._roster.never_fits(digest)):
            self._fail(request, "the adapter is over a cap of the batch by itself", over)
            return False
        self._waits[adapter_id] = reason  # caps only get tighter in one walk
        self._defer(request, reason)
        return False

    def _fail(self, request: Request, what: str, over: tuple[str, int, int]) -> None:
        unit, needed, limit = over
        error = CapacityError(what, needed=needed, limit=limit, unit=unit)
        self.failed.append((request, error.copy_for(request.adapter_id)))

    def _defer(self, request: Request, reason: str) -> None:
        self.deferred.append(request)
        self.reasons[request.request_id] = reason
        if request.adapter_id is not None:
            self.cold.setdefault(request.adapter_id, request.request_id)
        if request.request_id in self._overdue:
            self._keep_for(request)

    def tell_no_room(self, no_room: Collection[Digest]) -> None:
        """Those that wait for room, not for a load."""
        ids = self._state.names_of(no_room)
        for request in self.deferred:
            if request.adapter_id in ids and self.reasons[request.request_id] == "loading":
                self.reasons[request.request_id] = "room"

    def room_for_adapters(self) -> int:
        """How many more distinct ones the caps let in."""
        return self._roster.room

    def first_in_line(self) -> dict[str, Request]:
        """By what they wait for."""
        met = set(self.reasons.values())
        return {
            line: next(r for r in self.deferred if self.reasons[r.request_id] in reasons)
            for line, reasons in LINES.items()
            if not met.isdisjoint(reasons)
        }
