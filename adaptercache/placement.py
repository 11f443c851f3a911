"""Which adapters are brought into a tier next, and which ones make room for them.

A pure function on one tier's table. The order of arrival decides, so that nobody starves and no
two adapters evict each other for ever:

- what an adapter ahead needs is never taken by one behind, whether it is there already, is being
  loaded, or can't start yet because the tier below doesn't have it;
- the first one for which there is no room stops everyone behind it from taking room;
- victims are idle copies that nobody waits for, coldest first; then those that somebody further
  behind waits for, the last in the queue first;
- hints come last, and evict neither what anyone waits for nor what another hint brought; they are
  bounded in what is on its way for them and in what they may evict (`HintBounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adaptercache.identity import Digest
from adaptercache.residency import Copy, Residency

__all__ = ["HintBounds", "Placement", "Want", "place"]

UNBOUNDED = 1 << 60


@dataclass(frozen=True, slots=True)
class Want:
    """An adapter that somebody waits for, or a hint.

    ``size`` is in the tier's unit; ``ready``: the tier below has it whole, so that its load can
    start now.
    """

    digest: Digest
    size: int
    ready: bool
    hint: bool = False


@dataclass(frozen=True, slots=True)
class HintBounds:
    """What hints may take of a tier, in its unit.

    Args:
        coming: on its way for hints at one time; one load is always let through.
        unused: while what hints brought and nobody has used yet is more than this, hints evict
            nothing.
    """

    coming: int = UNBOUNDED
    unused: int = UNBOUNDED


@dataclass(frozen=True, slots=True)
class Placement:
    """What `place` found.

    ``no_room`` holds the wants, but for hints, that room was refused to, in order; ``short`` says
    how many units more the first of them needs (0 where a slot is what it lacks), and ``behind``
    what each of those behind it takes.
    """

    loads: tuple[Want, ...]
    evictions: tuple[Digest, ...]
    no_room: tuple[Digest, ...]
    short: int
    behind: tuple[int, ...] = ()


def place(
    wants: Sequence[Want],
    tier: Residency[Any],
    *,
    free: int,
    free_slots: int = UNBOUNDED,
    hints: HintBounds = HintBounds(),
) -> Placement:
    """Decide on loads into ``tier`` for ``wants``, given in order of arrival, hints last.

    Args:
        wants: distinct digests.
        tier: only read.
        free: units that may be taken without eviction; negative where floors are undercut.
        free_slots: slots likewise, one an adapter.
        hints: their bounds.
    """
    walk = _Walk(wants, tier, free, free_slots, hints)
    for want in wants:
        copy = tier.get(want.digest)
        if copy is not None and want.digest not in walk.evicted:
            walk.place_resident(copy)
        elif want.hint:
            walk.place_hint(want)
        else:
            walk.place_demand(want)
    return Placement(
        tuple(walk.loads), tuple(walk.evicted), tuple(walk.no_room), walk.short, tuple(walk.behind)
    )


class _Walk:
    """The state of one `place`: what is free, promised, protected and given up so far."""

    def __init__(
        self,
        wants: Sequence[Want],
        tier: Residency[Any],
        free: int,
        free_slots: int,
        hints: HintBounds,
    ) -> None:
        self._tier = tier
        self._free, self._free_slots = free, free_slots
        self._spare, self._spare_slots = tier.idle_size, tier.num_idle
        self._promised = self._promised_slots = 0
        self._behind = {want.digest: index for index, want in enumerate(wants)}
        assert len(self._behind) == len(wants), "each takes its room once"
        self._ahead: set[Digest] = set()
        self._coldest = tier.coldest()
        self._wanted_behind: list[Copy[Any]] = []  # idle; given up last, the last in line first
        self.evicted: dict[Digest, None] = {}
        self.loads: list[Want] = []
        self.no_room: dict[Digest, None] = {}
        self._hints_find_none = False
        self._hints = hints
        self._hints_coming, self._hints_unused = tier.hints_coming, tier.hinted_size
        self.short = 0
        self.behind: list[int] = []

    def place_resident(self, copy: Copy[Any]) -> None:
        """It is there or on its way: nobody behind may evict it."""
        self._pass_by(copy.digest)
        if copy.idle:
            self._spare -= copy.size
            self._spare_slots -= 1

    def place_demand(self, want: Want) -> None:
        self._pass_by(want.digest)
        room = self._free - self._promised + self._spare
        slots = self._free_slots - self._promised_slots + self._spare_slots
        if self.no_room:
            self.no_room[want.digest] = None
            self.behind.append(want.size)
        elif want.size > room or slots < 1:
            self.no_room[want.digest] = None
            self.short = max(0, want.size - room)
        elif want.ready:
            self._take(want, self._enough(want, self._victims()))
        else:
            self._promised += want.size
            self._promised_slots += 1

    def place_hint(self, want: Want) -> None:
        self._pass_by(want.digest)
        if self.no_room or self._hints_find_none or not want.ready:
            return
        unwanted = (c for c in self._tier.coldest() if not self._is_wanted(c.digest))
        victims = self._enough(want, unwanted)
        coming, unused = self._hints_coming + want.size, self._hints_unused + want.size
        is_too_much = (self._hints_coming and coming > self._hints.coming) or (
            victims and unused > self._hints.unused
        )
        if is_too_much or not self._fits(want, victims):
            self._hints_find_none = True
            return
        self._hints_coming, self._hints_unused = coming, unused
        self._take(want, victims)

    def _pass_by(self, digest: Digest) -> None:
        self._behind.pop(digest, None)
        self._ahead.add(digest)

    def _is_wanted(self, digest: Digest) -> bool:
        return digest in self._ahead or digest in self._behind or digest in self.evicted

    def _victims(self) -> Iterator[Copy[Any]]:
        for copy in self._coldest:
            if copy.digest in self._behind:
                self._wanted_behind.append(copy)
            elif not self._is_wanted(copy.digest):
                yield copy
        self._wanted_behind.sort(key=lambda copy: self._behind.get(copy.digest, -1))
        while self._wanted_behind:
            copy = self._wanted_behind.pop()
            if copy.digest in self._behind and copy.digest not in self.evicted:
                yield copy

    def _fits(self, want: Want, victims: Sequence[Copy[Any]]) -> bool:
        freed = sum(copy.size for copy in victims)
        room = self._free - self._promised + freed
        return want.size <= room and self._free_slots - self._promised_slots + len(victims) >= 1

    def _enough(self, want: Want, candidates: Iterator[Copy[Any]]) -> list[Copy[Any]]:
        """As many of the candidates as ``want`` needs, or all of them."""
        victims: list[Copy[Any]] = []
        free, slots = self._free, self._free_slots
        while want.size > free or slots < 1:
            copy = next(candidates, None)
            if copy is None:
                break
            victims.append(copy)
            free, slots = free + copy.size, slots + 1
        return victims

    def _take(self, want: Want, victims: Sequence[Copy[Any]]) -> None:
        for copy in victims:
            self.evicted[copy.digest] = None
            self._free += copy.size
            self._free_slots += 1
            self._spare -= copy.size
            self._spare_slots -= 1
        self._free -= want.size
        self._free_slots -= 1
        self.loads.append(want)
