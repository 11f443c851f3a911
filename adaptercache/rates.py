"""How often each key comes, by counts that fade: what happened last counts most.

A key that comes at time t adds exp(t / memory) to its count, so that nothing has to be faded one
by one: dividing by the same weight of today does it for all.

Plain Python; the time is passed in. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import exp, isfinite

__all__ = ["Rates"]

OLD = 200.0  # times memory_s: from then on weights begin anew, for exp has an end
SOON_S = 1e-3  # rates over less time than this are not told


class Rates:
    """Counts by key, fading.

    Args:
        memory_s: how long it takes until a count is down to 1/e.
        capacity: keys remembered at most. One that doesn't come while half as many others do may
            be forgotten, so that nothing is ever searched for what could go.
    """

    def __init__(self, memory_s: float, capacity: int = 65536) -> None:
        self._memory_s = memory_s
        self._half = max(1, capacity // 2)
        self._counts: dict[str | None, float] = {}
        self._before: dict[str | None, float] = {}  # not come since `_counts` was begun
        self._total = 0.0
        self._origin: float | None = None  # where the weight is 1
        self._first = 1.0  # the weight of the first moment

    def __len__(self) -> int:
        return len(self._counts) + len(self._before)

    def add(self, key: str | None, now: float) -> None:
        """It came once more.

        Raises:
            ValueError: ``now`` is no time.
        """
        if not isfinite(now):  # kept, it would be in every sum from now on
            raise ValueError(f"the time is {now}: give seconds")
        if self._origin is None:
            self._origin = now
        age = self._age(now)
        if age > OLD:
            self._rescale(now, exp(-age))
            age = 0.0
        weight = exp(age)
        count = self._counts.get(key)
        if count is None:
            count = self._before.pop(key, 0.0)
        self._counts[key] = count + weight
        self._total += weight
        if len(self._counts) >= self._half:
            self._before, self._counts = self._counts, {}

    def count(self, key: str | None, now: float) -> float:
        """How often it came, as far as that is not forgotten."""
        return self._count(key) / self._weight(now)

    def share(self, key: str | None) -> float:
        """Its part of all that came, 0 to 1."""
        return self._count(key) / self._total if self._total else 0.0

    def largest(self, share: float) -> Iterator[tuple[str | None, float]]:
        """The keys that have at least this share (over 0), and theirs; the largest first."""
        least = share * self._total
        counts = chain(self._counts.items(), self._before.items())
        found = [(key, count) for key, count in counts if count >= least]
        for key, count in sorted(found, key=lambda item: -item[1]):
            yield key, count / self._total

    def total_per_s(self, now: float) -> float:
        """How many come a second, of all keys; 0 in the first moment."""
        weight = self._weight(now)
        seconds = self._memory_s * (weight - self._first) / weight
        return self._total / weight / seconds if seconds > SOON_S else 0.0

    def _count(self, key: str | None) -> float:
        return self._counts.get(key) or self._before.get(key, 0.0)

    def _weight(self, now: float) -> float:
        if self._origin is None:
            return 1.0
        return exp(min(self._age(now), 3 * OLD))

    def _age(self, now: float) -> float:
        """In times of the memory. A clock that was set back far gives no weight of 0."""
        assert self._origin is not None
        return max((now - self._origin) / self._memory_s, -OLD)

    def _rescale(self, now: float, factor: float) -> None:
        self._counts = {key: count * factor for key, count in self._counts.items()}
        self._before = {key: count * factor for key, count in self._before.items()}
        self._total *= factor
        self._first *= factor
        self._origin = now
