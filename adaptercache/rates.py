"""How often each key comes, by counts that fade: what happened last counts most.

A key that comes at time t adds exp(t / memory) to its count, so that nothing has to be faded one
by one: dividing by the same weight of today does it for all.

Plain Python; the time is passed in. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from math import exp

__all__ = ["Rates"]

RESCALE_AT = 1e100
SOON_S = 1e-3  # rates over less time than this are not told


class Rates:
    """Counts by key, fading.

    Args:
        memory_s: how long it takes until a count is down to 1/e.
        capacity: keys remembered at most: half of them, the rarest, go when they are more.
    """

    def __init__(self, memory_s: float, capacity: int = 65536) -> None:
        self._memory_s = memory_s
        self._capacity = capacity
        self._counts: dict[str | None, float] = {}
        self._total = 0.0
        self._origin: float | None = None  # where the weight is 1
        self._first = 1.0  # the weight of the first moment

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, key: str | None, now: float) -> None:
        """It came once more."""
        if self._origin is None:
            self._origin = now
        weight = exp((now - self._origin) / self._memory_s)
        if weight > RESCALE_AT:
            weight = self._rescale(now, weight)
        self._counts[key] = self._counts.get(key, 0.0) + weight
        self._total += weight
        if len(self._counts) > self._capacity:
            kept = nlargest(self._capacity // 2, self._counts.items(), key=lambda item: item[1])
            self._counts = dict(kept)

    def count(self, key: str | None, now: float) -> float:
        """How often it came, as far as that is not forgotten."""
        return self._counts.get(key, 0.0) / self._weight(now)

    def share(self, key: str | None) -> float:
        """Its part of all that came, 0 to 1."""
        return self._counts.get(key, 0.0) / self._total if self._total else 0.0

    def largest(self, share: float) -> Iterator[tuple[str | None, float]]:
        """The keys that have at least this share (over 0), and theirs; the largest first."""
        least = share * self._total
        found = [(key, count) for key, count in self._counts.items() if count >= least]
        for key, count in sorted(found, key=lambda item: -item[1]):
            yield key, count / self._total

    def total_per_s(self, now: float) -> float:
        """How many come a second, of all keys; 0 in the first moment."""
        weight = self._weight(now)
        seconds = self._memory_s * (weight - self._first) / weight
        return self._total / weight / seconds if seconds > SOON_S else 0.0

    def _weight(self, now: float) -> float:
        return exp((now - self._origin) / self._memory_s) if self._origin is not None else 1.0

    def _rescale(self, now: float, weight: float) -> float:
        self._counts = {key: count / weight for key, count in self._counts.items()}
        self._total /= weight
        self._first /= weight
        self._origin = now
        return 1.0
