"""What a batch may hold at most: adapters, the sum of their ranks, their pages, and tokens.

A step reads the A and B of every distinct adapter in its batch once, so its cost grows with the
pages of these adapters, and where it computes on them with their ranks. An adapter that is in the
batch already adds nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from adaptercache.identity import Digest

__all__ = ["CAP_REASONS", "NO_CAPS", "Caps", "Footprint", "Roster"]

RANK_CLASSES = (16, 64, 128, 256, 512)
"""What a batch's largest rank is rounded up to: the kernels do ranks up to one of these alike."""
UNCAPPED = 1 << 60
CAP_REASONS = frozenset(("max_adapters", "max_rank_sum", "max_pages"))


class Footprint(NamedTuple):
    """What an adapter adds to a batch: its largest rank, and its pages of the arena."""

    rank: int
    pages: int


NOTHING = Footprint(0, 0)


@dataclass(frozen=True, slots=True)
class Caps:
    """Bounds of one batch, running requests included; None: none.

    Args:
        adapters: distinct adapters.
        rank_sum: sum of the distinct adapters' ranks.
        pages: that these adapters take.
        tokens: of all its requests in one step.
        near_ranks: fill what the caps leave with adapters of the batch's own rank class first.
    """

    adapters: int | None = None
    rank_sum: int | None = None
    pages: int | None = None
    tokens: int | None = None
    near_ranks: bool = False

    def __post_init__(self) -> None:
        for name in ("adapters", "rank_sum", "pages", "tokens"):
            value = getattr(self, name)
            if not isinstance(value, (int, type(None))):
                raise TypeError(f"{name} is {value!r:.80}: give an int, or None")
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}: give 0 or more, or None")


NO_CAPS = Caps()


class Roster:
    """The distinct adapters of a batch that grows, against its caps.

    Args:
        running: how many running requests each of the batch's adapters has.
        footprint: of an adapter that is on the GPU.
    """

    def __init__(
        self,
        caps: Caps,
        running: Mapping[Digest, int],
        footprint: Callable[[Digest], Footprint],
    ) -> None:
        self._caps = caps
        self._running = running
        self._footprint = footprint
        self._members = set(running)
        self.measures = caps.rank_sum is not None or caps.pages is not None or caps.near_ranks
        """Whether what an adapter takes matters, and not only how many they are."""
        self._ranks = self._pages = self._largest = 0
        if self.measures:
            for digest in running:
                self._count(footprint(digest))
        self._leaving: set[Digest] = set()
        self._kept: Digest | None = None  # whose place is kept, and what it takes
        self._kept_size = NOTHING

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._members

    @property
    def room(self) -> int:
        """How many more adapters may join, as far as their number is capped."""
        if self._caps.adapters is None:
            return UNCAPPED
        return max(0, self._caps.adapters - len(self._members))

    def refuses(self, digest: Digest) -> str | None:
        """The cap for which this adapter's request has to wait; None: it may join."""
        caps = self._caps
        if digest in self._members:
            return self._tightest if digest in self._leaving else None
        is_another = self._kept is not None and digest != self._kept
        if caps.adapters is not None and len(self._members) + is_another >= caps.adapters:
            return "max_adapters"
        if self.measures:
            rank, pages = self._footprint(digest)
            if is_another:
                rank, pages = rank + self._kept_size.rank, pages + self._kept_size.pages
            if caps.rank_sum is not None and self._ranks + rank > caps.rank_sum:
                return "max_rank_sum"
            if caps.pages is not None and self._pages + pages > caps.pages:
                return "max_pages"
        return None

    @property
    def _tightest(self) -> str:
        """The cap for which members have to leave."""
        if self._caps.adapters is not None:
            return "max_adapters"
        return "max_rank_sum" if self._caps.rank_sum is not None else "max_pages"

    def never_fits(self, digest: Digest) -> tuple[str, int, int] | None:
        """The cap that this adapter is over by itself: its unit, what is needed, the limit."""
        if self._caps.adapters == 0:
            return "adapters", 1, 0
        if not self.measures:
            return None
        rank, pages = self._footprint(digest)
        if self._caps.rank_sum is not None and rank > self._caps.rank_sum:
            return "ranks", rank, self._caps.rank_sum
        if self._caps.pages is not None and pages > self._caps.pages:
            return "pages", pages, self._caps.pages
        return None

    def is_near(self, digest: Digest) -> bool:
        """Whether it leaves the batch in its rank class; the first adapter of a batch does."""
        if digest in self._members or not self._members:
            return True
        return _rank_class(self._footprint(digest).rank) <= _rank_class(self._largest)

    def add(self, digest: Digest) -> bool:
        """It joins; whether it is new to the batch."""
        if digest in self._members:
            return False
        self._members.add(digest)
        if digest == self._kept:
            self._kept, self._kept_size = None, NOTHING
        if self.measures:
            self._count(self._footprint(digest))
        return True

    def keep(self, digest: Digest) -> None:
        """This one has waited long enough: whoever comes behind it leaves it its place, and as many
        of the running adapters as it needs, those with the fewest requests, get no more of them."""
        if digest in self._members:
            return
        self._kept = digest
        if self.measures:
            self._kept_size = self._footprint(digest)
        caps, need = self._caps, self._kept_size
        adapters, ranks, pages = len(self._members), self._ranks, self._pages
        for member in sorted(self._running, key=self._running.__getitem__):
            fits = (
                (caps.adapters is None or adapters < caps.adapters)
                and (caps.rank_sum is None or ranks + need.rank <= caps.rank_sum)
                and (caps.pages is None or pages + need.pages <= caps.pages)
            )
            if fits:
                break
            self._leaving.add(member)
            rank, size = self._footprint(member) if self.measures else NOTHING
            adapters, ranks, pages = adapters - 1, ranks - rank, pages - size

    def _count(self, footprint: Footprint) -> None:
        self._ranks += footprint.rank
        self._pages += footprint.pages
        self._largest = max(self._largest, footprint.rank)


def _rank_class(rank: int) -> int:
    return bisect_left(RANK_CLASSES, rank)
