"""Which adapter to forget next: an order of the evictable keys, from the coldest to the hottest.

A policy does not know sizes, tiers or leases. The cache tells it what can be evicted (`add`,
`discard`) and what was used (`touch`); a planner reads it from the cold end for as many victims
as it needs. A leased key is out of the order and comes back at its release, so a victim costs
the same however many leases there are.

`LRU` follows a change of popularity at once. `LFU` keeps what is used often; its counts age, for
a plain LFU keeps yesterday's favourite for ever.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["LFU", "LRU", "EvictionPolicy", "new_policy"]

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An order of the keys that can be evicted.

    Not thread-safe: the cache's lock guards it. Nothing blocks. Every verb takes O(log n) at most,
    and so does each key that an iteration yields.
    """

    @abstractmethod
    def add(self, key: K) -> None:
        """``key`` can be evicted from now on: it was loaded, or its last lease was released."""

    @abstractmethod
    def discard(self, key: K) -> None:
        """``key`` can't be evicted any more: it is leased, or gone. An absent key is fine."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """``key`` was used. It need not be in the order: a leased key isn't, and is used."""

    @abstractmethod
    def __iter__(self) -> Iterator[K]:
        """The keys from the coldest to the hottest, lazily, changing nothing.

        The order must not change while it is being read.
        """

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def pop(self) -> K:
        """Takes the coldest key out of the order. KeyError where there is none."""
        for key in self:
            self.discard(key)
            return key
        raise KeyError("no key can be evicted")


class LRU(EvictionPolicy[K]):
    """The least recently used key is the coldest. A release counts as a use. All verbs O(1)."""

    def __init__(self) -> None:
        # Not a dict: finding the first key of a dict walks over all that were deleted before it.
        self._order: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def discard(self, key: K) -> None:
        self._order.pop(key, None)

    def touch(self, key: K) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)


Heat: TypeAlias = tuple[float, int]
"""How hot a key is: the logarithm of its aged count of uses, then the number of its last use."""


class LFU(EvictionPolicy[K]):
    """The key with the lowest aged count of uses is the coldest; between equals, the older one.

    A use counts 1 when it happens, 1/2 one half-life later, and so on: LRFU's combined recency and
    frequency (Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and
    Least Frequently Used Policies", IEEE Transactions on Computers 50(12), 2001). As all counts
    fade at one rate, two keys change places only when one of them is used. So we keep the
    logarithm of what a count would be had it not faded, on a clock that counts half-lives; it
    changes at a use only, and never overflows.

    Counts outlive evictions and leases: the last ``history`` keys that left the order are
    remembered. A key that is added without a use (a prefetch) starts as if used once, just now.

    A half-life is ``half_life`` uses for each key that is remembered: long enough to tell
    apart keys that are used a few times in that span, short enough to forget a popularity that
    has passed.
    """

    def __init__(self, *, half_life: float = 2.0, history: int = 1024) -> None:
        if not half_life > 0 or history < 0:
            raise ValueError(f"half_life {half_life} must be > 0 and history {history} >= 0")
        self._half_life = half_life
        self._history = history
        self._now = 0.0  # in half-lives
        self._uses = 0
        self._order: _Heap[K] = _Heap()
        self._left: OrderedDict[K, Heat] = OrderedDict()  # out of the order; last left or used last

    def add(self, key: K) -> None:
        if key not in self._order:
            heat = self._left.pop(key, None)
            self._order.put(key, self._first_use() if heat is None else heat)

    def discard(self, key: K) -> None:
        if key in self._order:
            self._remember(key, self._order.remove(key))

    def touch(self, key: K) -> None:
        self._now += 1 / (self._half_life * max(1, len(self._order) + len(self._left)))
        if key in self._order:
            self._order.put(key, self._another_use(self._order.remove(key)))
        elif key in self._left:
            self._remember(key, self._another_use(self._left.pop(key)))
        else:
            self._remember(key, self._first_use())

    def __iter__(self) -> Iterator[K]:
        return iter(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def _first_use(self) -> Heat:
        self._uses += 1
        return self._now, self._uses

    def _another_use(self, heat: Heat) -> Heat:
        new, number = self._first_use()
        low, high = sorted((heat[0], new))
        return high + math.log2(1 + 2.0 ** (low - high)), number  # log2 of 2**low + 2**high

    def _remember(self, key: K, heat: Heat) -> None:
        self._left[key] = heat
        if len(self._left) > self._history:
            self._left.popitem(last=False)


class _Heap(Generic[K]):
    """Keys in a binary heap that knows where each key lies, so that any key can be removed.

    (With `heapq` alone, what was removed would have to stay as a dead entry, and they gather at
    the cold end, where every look for a victim would walk over them.)
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Heat, K]] = []
        self._index: dict[K, int] = {}

    def put(self, key: K, heat: Heat) -> None:
        """Puts a key that is not here. No two heats are equal, so keys are never compared."""
        self._entries.append((heat, key))
        self._settle(len(self._entries) - 1, (heat, key))

    def remove(self, key: K) -> Heat:
        hole = self._index.pop(key)
        heat = self._entries[hole][0]
        last = self._entries.pop()
        if hole < len(self._entries):
            self._settle(hole, last)
        return heat

    def _settle(self, hole: int, entry: tuple[Heat, K]) -> None:
        """Puts ``entry`` where it belongs: above or below the hole."""
        entries, index = self._entries, self._index
        while hole > 0 and entry < entries[parent := (hole - 1) // 2]:
            entries[hole] = entries[parent]
            index[entries[hole][1]] = hole
            hole = parent
        while (child := 2 * hole + 1) < len(entries):
            if child + 1 < len(entries) and entries[child + 1] < entries[child]:
                child += 1
            if entry < entries[child]:
                break
            entries[hole] = entries[child]
            index[entries[hole][1]] = hole
            hole = child
        entries[hole] = entry
        index[entry[1]] = hole

    def __iter__(self) -> Iterator[K]:
        """In ascending order: only children of what was yielded can be next."""
        entries = self._entries
        frontier = [(entry, 0) for entry in entries[:1]]
        while frontier:
            (_, key), index = heappop(frontier)
            yield key
            for child in range(2 * index + 1, min(2 * index + 3, len(entries))):
                heappush(frontier, (entries[child], child))

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._entries)


_POLICIES: dict[str, type[EvictionPolicy[Any]]] = {"lru": LRU, "lfu": LFU}


def new_policy(name: str) -> EvictionPolicy[K]:
    """An empty policy by its name: ``"lru"`` or ``"lfu"``."""
    if name not in _POLICIES:
        raise ValueError(f"no eviction policy is called {name!r}; there are {sorted(_POLICIES)}")
    return _POLICIES[name]()
