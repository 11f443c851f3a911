"""What `AdapterFiles` counts: the same words as a cache's, of the disk tier alone."""

from __future__ import annotations

import threading
from collections import Counter

from adaptercache.stats import Counters, Stats, Tier

__all__ = ["OpenCounts"]


class OpenCounts:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()
        self._opening = self._held = 0

    def began(self) -> None:
        """Somebody opens an adapter; `opened` or `failed` follows."""
        with self._lock:
            self._opening += 1

    def opened(self, nbytes: int | None, seconds: float) -> None:
        """It is open: ``nbytes`` were brought for it; None: it was here."""
        found_in, result = ("disk", "hit") if nbytes is None else ("remote", "miss")
        with self._lock:
            self._opening -= 1
            self._held += 1
            self._counters.requests[found_in, result] += 1
            self._counters.ready_took(found_in, seconds)
            if nbytes is not None:
                self._counters.loads[Tier.REMOTE, Tier.DISK, "ok"] += 1
                self._counters.load_bytes[Tier.REMOTE, Tier.DISK] += nbytes
                self._counters.load_took(Tier.REMOTE, Tier.DISK, seconds)

    def failed(self, error: BaseException) -> None:
        """It can't be opened."""
        with self._lock:
            self._opening -= 1
            self._counters.requests["none", "failed"] += 1
            self._counters.loads[Tier.REMOTE, Tier.DISK, "failed"] += 1
            self._counters.errors[type(error).__name__] += 1

    def released(self) -> None:
        """A folder isn't held any more."""
        with self._lock:
            self._held -= 1

    def evicted(self, number: int) -> None:
        """So many contents made room."""
        with self._lock:
            self._counters.evictions[Tier.DISK, "room"] += number

    def stats(self, adapters: int, nbytes: int, budget: int) -> Stats:
        """All that was counted, and what is on the disk; what no disk tier has is empty."""
        with self._lock:
            counted = self._counters
            return Stats(
                requests=Counter(counted.requests),
                loads=Counter(counted.loads),
                load_bytes=Counter(counted.load_bytes),
                load_seconds={hop: took.snapshot() for hop, took in counted.load_seconds.items()},
                ready_seconds={at: took.snapshot() for at, took in counted.ready_seconds.items()},
                evictions=Counter(counted.evictions),
                deferred={},
                errors=Counter(counted.errors),
                prefetch_wasted=0,
                resident_adapters={Tier.DISK: adapters},
                resident_bytes={Tier.DISK: nbytes},
                capacity_bytes={Tier.DISK: budget},
                pages={},
                slots={},
                leases=self._held,
                in_flight_loads=self._opening,
                queue_depth={},
            )
