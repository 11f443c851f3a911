"""How adapters and the GPU stand when a batch is decided on, and the loads that it starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from adaptercache.caps import Footprint
from adaptercache.errors import AdapterCacheError
from adaptercache.identity import Digest
from adaptercache.placement import Placement
from adaptercache.step_room import KVRoom

__all__ = ["Load", "Need", "Standing", "State"]


@dataclass(frozen=True, slots=True)
class Load:
    """Bring ``digest`` into ``slot`` and these pages; ``hint``: nobody waits for it yet."""

    digest: Digest
    slot: int
    pages: tuple[int, ...]
    hint: bool = False


class Need(NamedTuple):
    """Pages that an adapter is still to get, or could still lose, until it is leased; ``digest``
    None: of the base model, which needs none."""

    digest: Digest | None
    pages: int


@dataclass(slots=True)  # not frozen: a step makes thousands, and freezing takes four times as long
class Standing:
    """How an adapter id stands: ``digest`` None until its files have been seen once."""

    digest: Digest | None = None
    ready: bool = False  # on the GPU, and not being kept for somebody ahead
    coming: bool = False  # being copied there, in a way that a step can wait for
    reason: str = "loading"  # why it isn't
    error: AdapterCacheError | None = None


class State(Protocol):
    """What `plan` reads."""

    def standing(self, adapter_id: str) -> Standing:
        """How an adapter id stands now."""

    def settled(self) -> Collection[str] | None:
        """The ids whose adapter is on the GPU, or on its way there, or failed a short while ago:
        all others are below. None: too many to list, so that each has to be asked for."""

    def names_of(self, digests: Collection[Digest]) -> Collection[str]:
        """The ids that stand for any of these."""

    def footprint(self, digest: Digest) -> Footprint:
        """Of an adapter that is on the GPU, or needed there."""

    def kv_room(self) -> KVRoom:
        """What the KV cache can still take."""

    def can_pipeline(self, load: Load) -> bool:
        """Whether a step can wait for this load, decided on now."""

    def idle_pages(self, digest: Digest) -> int:
        """Pages that can't be reclaimed any more once this adapter is leased."""

    def need_of(self, adapter_id: str | None) -> Need | None:
        """What this adapter needs; None while a tier further down is all that has it."""

    def place_on_gpu(
        self, admitted: Collection[Digest], waiting: Mapping[str, str], kv_promised: int
    ) -> Placement:
        """Loads for the adapters of the requests that go on waiting, in order of arrival; with
        each, the id of the first request for it."""

    def kv_pages_wanted(self, placement: Placement, most: int) -> int:
        """KV pages that, given back, would let the first ``most`` in who were refused room; at
        least one."""

    def number(self, placement: Placement) -> tuple[Load, ...]:
        """The slots and pages that the loads of ``placement`` get once its evictions are done."""
