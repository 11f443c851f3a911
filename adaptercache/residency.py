"""Which adapters have a copy in one tier, and who holds it.

A copy's life is a table::

    absent   --reserve-->  LOADING    room is taken, bytes are on their way
    LOADING  --loaded--->  RESIDENT   whole; may be leased and read
    LOADING  --drop----->  absent     the load failed
    RESIDENT --drop----->  absent     evicted; only while nobody holds it

A lease may be taken in either state, so that nobody waits for a load only to find the copy gone
again. Copies that are resident and held by nobody are *idle*: they stand in the eviction policy's
order, and nowhere else are there victims.

Plain Python. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Generic, TypeVar

from adaptercache.errors import AdapterCacheError
from adaptercache.identity import Digest
from adaptercache.policy import EvictionPolicy

__all__ = ["Copy", "Residency", "State"]

PlaceT = TypeVar("PlaceT")


class State(Enum):
    """Of a copy that is not absent."""

    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class Copy(Generic[PlaceT]):
    """One adapter in one tier.

    ``size`` is in the tier's unit (pages, blocks or bytes), ``place`` says where it lies;
    ``prefetched`` until its first use; ``doomed`` once no adapter id names it any more: it goes
    as soon as nobody holds it. ``error``: its load failed while it was held already.
    """

    digest: Digest
    size: int
    place: PlaceT
    state: State = State.LOADING
    leases: int = 0
    prefetched: bool = False
    doomed: bool = False
    error: AdapterCacheError | None = None

    @property
    def idle(self) -> bool:
        """Whole, and held by nobody."""
        return self.leases == 0 and self.state is State.RESIDENT


class Residency(Generic[PlaceT]):
    """The copies of one tier.

    Args:
        new_policy: makes an empty order of evictable digests. Two are made: one for all, one for
            the copies that are given up last (see `shield`).
    """

    def __init__(self, new_policy: Callable[[], EvictionPolicy[Digest]]) -> None:
        self._copies: dict[Digest, Copy[PlaceT]] = {}
        self._order = new_policy()
        self._last = new_policy()
        self._shielded: set[Digest] = set()
        self.used = 0
        """Sum of the sizes of all copies."""
        self.num_resident = 0
        """Copies that are whole."""
        self.num_leases = 0
        """Holds on all copies."""
        self.idle_size = 0
        """Sum of the sizes of the idle ones: what eviction could free."""
        self.hinted_size = 0
        """Sum of the sizes of those that were prefetched, and not used since."""
        self.hints_coming = 0
        """Of these, the sizes of those that are still being loaded."""

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[Copy[PlaceT]]:
        return iter(self._copies.values())

    def __reversed__(self) -> Iterator[Copy[PlaceT]]:
        """The copies, the one that came last first."""
        return reversed(self._copies.values())

    def get(self, digest: Digest) -> Copy[PlaceT] | None:
        """The copy, in either state, or None."""
        return self._copies.get(digest)

    def __getitem__(self, digest: Digest) -> Copy[PlaceT]:
        """The copy, which must be there."""
        return self._copies[digest]

    def resident(self, digest: Digest) -> Copy[PlaceT] | None:
        """The copy if it is whole, else None."""
        copy = self._copies.get(digest)
        return copy if copy is not None and copy.state is State.RESIDENT else None

    @property
    def num_idle(self) -> int:
        """How many copies eviction could free."""
        return len(self._order) + len(self._last)

    def coldest(self) -> Iterator[Copy[PlaceT]]:
        """The idle copies, the first to be evicted first, shielded ones last. Changes nothing."""
        return (self._copies[digest] for digest in chain(self._order, self._last))

    def reserve(
        self, digest: Digest, size: int, place: PlaceT, *, prefetched: bool = False
    ) -> Copy[PlaceT]:
        """Absent → LOADING."""
        assert digest not in self._copies, "one load at a time"
        copy = Copy(digest, size, place, prefetched=prefetched)
        self._copies[digest] = copy
        self.used += size
        self._count_hint(copy, size)
        return copy

    def loaded(self, copy: Copy[PlaceT]) -> None:
        """LOADING → RESIDENT."""
        assert copy.state is State.LOADING
        self._count_hint(copy, -copy.size)
        copy.state = State.RESIDENT
        self._count_hint(copy, copy.size)
        self.num_resident += 1
        if not copy.leases:
            self._into_order(copy)

    def resize(self, copy: Copy[PlaceT], size: int) -> None:
        """It takes more, or less, than before."""
        self.used += size - copy.size
        self._count_hint(copy, size - copy.size)
        if copy.idle:
            self.idle_size += size - copy.size
        copy.size = size

    def drop(self, copy: Copy[PlaceT]) -> None:
        """Either state → absent. Its place is free for others from now on.

        A leased copy may be dropped only while it loads: then the load failed, and its holders
        are told so.
        """
        assert copy.idle or copy.state is State.LOADING, "a leased copy is never evicted"
        if copy.idle:
            self._out_of_order(copy)
        self._shielded.discard(copy.digest)
        self._count_hint(copy, -copy.size)
        del self._copies[copy.digest]
        self.used -= copy.size
        self.num_leases -= copy.leases
        self.num_resident -= copy.state is State.RESIDENT

    def lease(self, copy: Copy[PlaceT]) -> None:
        """Hold it: until `release` it cannot be evicted. A use, for the policy."""
        if copy.idle:
            self._out_of_order(copy)
        copy.leases += 1
        self.num_leases += 1
        self._count_hint(copy, -copy.size)
        copy.prefetched = False
        self._policy_of(copy.digest).touch(copy.digest)

    def release(self, copy: Copy[PlaceT]) -> None:
        """Give one hold back."""
        assert copy.leases > 0, "released more often than leased"
        copy.leases -= 1
        self.num_leases -= 1
        if copy.idle:
            self._into_order(copy)

    def shield(self, digest: Digest, shielded: bool) -> None:
        """Say whether the copy, if there is one, is to be given up only after all others."""
        copy = self._copies.get(digest)
        if copy is None or shielded == (digest in self._shielded):
            return
        if copy.idle:
            self._out_of_order(copy)
        (self._shielded.add if shielded else self._shielded.discard)(digest)
        if copy.idle:
            self._into_order(copy)

    def _count_hint(self, copy: Copy[PlaceT], size: int) -> None:
        if copy.prefetched:
            self.hinted_size += size
            if copy.state is State.LOADING:
                self.hints_coming += size

    def _policy_of(self, digest: Digest) -> EvictionPolicy[Digest]:
        return self._last if digest in self._shielded else self._order

    def _into_order(self, copy: Copy[PlaceT]) -> None:
        self._policy_of(copy.digest).add(copy.digest)
        self.idle_size += copy.size

    def _out_of_order(self, copy: Copy[PlaceT]) -> None:
        self._policy_of(copy.digest).discard(copy.digest)
        self.idle_size -= copy.size
