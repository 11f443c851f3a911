"""Which waiting requests join the next batch, and which adapters are brought up for the rest.

`plan` is pure: it reads the state and answers with a `Decision`, a value that names requests,
slots, pages and evictions, and that can be logged, replayed, or applied by other ranks. Nothing
changes until the decision is applied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from adaptercache.errors import AdapterCacheError, CapacityError
from adaptercache.identity import Digest, check_id
from adaptercache.placement import Placement

__all__ = ["Decision", "Load", "Request", "Standing", "plan"]

UNCAPPED = 1 << 60


@dataclass(frozen=True, slots=True)
class Request:
    """A request that waits, or runs.

    Args:
        request_id: yours; unique among the requests of one `admit`.
        adapter_id: its adapter; None is the base model.
        num_tokens: how many tokens it brings into a step.
        kv_pages: KV pages that it will take when it is admitted (0 where KV doesn't share the
            arena). Admission holds it back until they can be had; take them before the next
            call, for a load that ends meanwhile may need the room.
        pipelined: admit it while its adapter is still being copied to the GPU. The step then
            waits layer by layer: `add_lora` does, outside of CUDA graphs; between the pieces of a
            piecewise captured model call ``lora.wait(layer)``.
    """

    request_id: str
    adapter_id: str | None = None
    num_tokens: int = 1
    kv_pages: int = 0
    pipelined: bool = False

    def __post_init__(self) -> None:
        check_id(self.adapter_id)
        for name in ("num_tokens", "kv_pages"):
            if not hasattr(value := getattr(self, name), "__index__"):
                raise TypeError(f"{name} is {value!r:.80}: give an int")
        if self.num_tokens < 0 or self.kv_pages < 0:
            raise ValueError(f"{self}: num_tokens and kv_pages are not negative")


@dataclass(frozen=True, slots=True)
class Load:
    """Bring ``digest`` into ``slot`` and these pages; ``hint``: nobody waits for it yet."""

    digest: Digest
    slot: int
    pages: tuple[int, ...]
    hint: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """How an adapter id stands: ``digest`` None until its files have been seen once."""

    digest: Digest | None = None
    ready: bool = False  # on the GPU, and not being kept for somebody ahead
    coming: bool = False  # being copied there, in a way that a step can wait for
    reason: str = "loading"  # why it isn't
    error: AdapterCacheError | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: first the evictions, then the loads, then the admissions.

    ``reasons`` says for each deferred request id why it waits: ``loading`` (its adapter is on its
    way), ``room`` (no pages or slot for it yet), ``max_adapters`` (the batch's cap), ``kv_pages``.
    ``pages_wanted``: how many idle KV pages freed would let something cold in. ``refused``: the
    adapter that is first in line for room and finds none.
    """

    admitted: tuple[tuple[Request, Digest | None], ...] = ()
    deferred: tuple[Request, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    failed: tuple[tuple[Request, AdapterCacheError], ...] = ()
    evictions: tuple[Digest, ...] = ()
    loads: tuple[Load, ...] = ()
    pages_wanted: int = 0
    refused: Digest | None = None


class State(Protocol):
    """What `plan` reads."""

    def standing(self, adapter_id: str) -> Standing:
        """How an adapter id stands now."""

    def kv_room(self) -> KVRoom:
        """What the KV cache can still take."""

    def can_pipeline(self, load: Load) -> bool:
        """Whether a step can wait for this load, decided on now."""

    def idle_pages(self, digest: Digest) -> int:
        """Pages that can't be reclaimed any more once this adapter is leased."""

    def place_on_gpu(
        self, admitted: Collection[Digest], waiting: Sequence[str], kv_promised: int
    ) -> Placement:
        """Loads for the adapters of the requests that go on waiting, in order of arrival."""

    def kv_pages_wanted(self, placement: Placement) -> int:
        """KV pages that, given back, would let the first in who was refused room."""

    def number(self, placement: Placement) -> tuple[Load, ...]:
        """The slots and pages that the loads of ``placement`` get once its evictions are done."""


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Pages that the KV cache has, can get by eviction, and may ever have."""

    used: int
    reclaimable: int
    limit: int


def plan(
    waiting: Sequence[Request],
    state: State,
    *,
    running: Collection[Digest] = (),
    max_adapters: int | None = None,
) -> Decision:
    """Decide on a batch.

    Requests are looked at in order. One whose adapter is resident is admitted, also past others
    whose adapter isn't; base-model requests are never held back by adapters.

    Args:
        waiting: in order of arrival.
        state: only read.
        running: the distinct adapters of the requests that run already.
        max_adapters: cap on the distinct adapters of the batch, running ones included.
    """
    walk = _Admissions(state, set(running), max_adapters)
    for request in waiting:
        walk.look_at(request)
    cold = list(dict.fromkeys(r.adapter_id for r in walk.deferred if r.adapter_id is not None))
    placement = state.place_on_gpu(walk.newcomers, cold, walk.kv_promised)
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
        pages_wanted=state.kv_pages_wanted(placement),
        refused=placement.no_room[0] if placement.no_room else None,
    )


class _Admissions:
    """One walk over the waiting requests."""

    def __init__(self, state: State, batch: set[Digest], max_adapters: int | None) -> None:
        self._state = state
        self._batch = batch
        self._room = UNCAPPED if max_adapters is None else max_adapters  # adapters of the batch
        self._standings: dict[str, Standing] = {}
        self.kv = state.kv_room()
        self._kv_left = self.kv.reclaimable
        self._kv_blocked = False
        self.kv_promised = 0
        self.newcomers: list[Digest] = []  # adapters that this decision adds to the batch
        self.admitted: list[tuple[Request, Digest | None]] = []
        self.deferred: list[Request] = []
        self.reasons: dict[str, str] = {}
        self.failed: list[tuple[Request, AdapterCacheError]] = []

    def look_at(self, request: Request) -> None:
        adapter_id = request.adapter_id
        digest = None
        if adapter_id is not None:
            standing = self._standings.get(adapter_id)
            if standing is None:
                standing = self._standings[adapter_id] = self._state.standing(adapter_id)
            if standing.error is not None:
                self.failed.append((request, standing.error.copy_for(adapter_id)))
                return
            if not standing.ready and not (request.pipelined and standing.coming):
                self._defer(request, standing.reason)
                return
            digest = standing.digest
            if len(self._batch) >= self._room and digest not in self._batch:
                self._defer(request, "max_adapters")
                return
        idle_pages = 0
        if digest is not None and digest not in self._batch:
            idle_pages = self._state.idle_pages(digest)
        if request.kv_pages and not self._kv_fits(request, idle_pages):
            return
        if idle_pages and idle_pages > self._kv_left:  # KV is to get them, by eviction
            self._defer(request, "kv_pages")
            return
        self._kv_left -= idle_pages + request.kv_pages
        self._admit(request, digest)

    def admit_coming(self, loads: Sequence[Load], coming: Collection[Digest]) -> None:
        """Admit those of whose loads the ones ``coming`` can be waited for in a step."""
        self._kv_left -= sum(len(load.pages) for load in loads)
        deferred, self.deferred = self.deferred, []
        for request in deferred:
            adapter_id, reason = request.adapter_id, self.reasons[request.request_id]
            digest = self._standings[adapter_id].digest if adapter_id is not None else None
            if not request.pipelined or reason != "loading" or digest not in coming:
                self.deferred.append(request)
            elif len(self._batch) >= self._room and digest not in self._batch:
                self._defer(request, "max_adapters")
            elif not request.kv_pages or self._kv_fits(request, 0):
                del self.reasons[request.request_id]
                self._kv_left -= request.kv_pages
                self._admit(request, digest)

    def _admit(self, request: Request, digest: Digest | None) -> None:
        self.kv_promised += request.kv_pages
        if digest is not None and digest not in self._batch:
            self._batch.add(digest)
            self.newcomers.append(digest)
        self.admitted.append((request, digest))

    def _kv_fits(self, request: Request, idle_pages: int) -> bool:
        """Whether its KV pages can be had; once one can't, nobody behind takes any."""
        if request.kv_pages > self.kv.limit:
            error = CapacityError(
                f"request {request.request_id!r} asks for more KV pages than there can be",
                needed=request.kv_pages,
                limit=self.kv.limit,
                unit="pages",
                adapter_id=request.adapter_id,
            )
            self.failed.append((request, error))
            return False
        quota = self.kv.limit - self.kv.used - self.kv_promised
        room = min(self._kv_left - idle_pages, quota)
        self._kv_blocked = self._kv_blocked or request.kv_pages > room
        if self._kv_blocked:
            self._defer(request, "kv_pages")
        return not self._kv_blocked

    def _defer(self, request: Request, reason: str) -> None:
        self.deferred.append(request)
        self.reasons[request.request_id] = reason

    def tell_no_room(self, no_room: Collection[Digest]) -> None:
        """Those that wait for room, not for a load."""
        for request in self.deferred:
            if request.adapter_id is not None:
                digest = self._standings[request.adapter_id].digest
                if digest in no_room and self.reasons[request.request_id] == "loading":
                    self.reasons[request.request_id] = "room"
