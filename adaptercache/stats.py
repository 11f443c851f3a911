"""Tiers, and what the cache counts.

Counters are plain numbers that the cache's lock guards; a scrape or a log line reads a frozen
`Stats`. Nothing here grows with the number of adapters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Counters", "Histogram", "HistogramData", "Stats", "Tier"]


class Tier(Enum):
    """Where an adapter can be, top to bottom. HOST is pinned CPU memory."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


# 100 µs to 5 minutes, a factor of about 2 apart: a copy takes ms, a first load up to minutes.
SECONDS_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)


@dataclass(frozen=True, slots=True)
class HistogramData:
    """A histogram as it stood: ``counts`` has one more entry than ``bounds`` (above them all)."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(slots=True)
class Histogram:
    """Durations in seconds. Not thread-safe: the cache's lock guards it."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.sum += seconds

    def snapshot(self) -> HistogramData:
        return HistogramData(SECONDS_BOUNDS, tuple(self.counts), self.sum)


class Counters:
    """What has happened since the start. Not thread-safe: the cache's lock guards it."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (tier found in, result)
        self.loads: Counter[tuple[Tier, Tier, str]] = Counter()  # (from, to, result)
        self.load_bytes: Counter[tuple[Tier, Tier]] = Counter()
        self.evictions: Counter[tuple[Tier, str]] = Counter()  # (tier, reason)
        self.deferred: Counter[str] = Counter()  # reason
        self.errors: Counter[str] = Counter()  # type
        self.prefetch_wasted = 0
        self.load_seconds: dict[tuple[Tier, Tier], Histogram] = {}
        self.ready_seconds: dict[str, Histogram] = {}  # tier found in

    def load_took(self, source: Tier, to: Tier, seconds: float) -> None:
        self.load_seconds.setdefault((source, to), Histogram()).observe(seconds)

    def ready_took(self, found_in: str, seconds: float) -> None:
        self.ready_seconds.setdefault(found_in, Histogram()).observe(seconds)


@dataclass(frozen=True, slots=True)
class Stats:
    """The cache at one moment: counters since the start, and gauges.

    Byte gauges count what the adapters occupy, whole pages and blocks included. ``pages`` maps
    ``adapter``, ``kv`` and ``free`` to numbers of pages, which add up to the arena; ``slots``
    maps ``used`` and ``free``; ``queue_depth`` maps a hop such as ``"disk->host"`` to the loads
    that wait for a thread. ``found`` tiers are a `Tier` value, or ``"none"`` for a failure.
    """

    requests: Mapping[tuple[str, str], int]
    loads: Mapping[tuple[Tier, Tier, str], int]
    load_bytes: Mapping[tuple[Tier, Tier], int]
    load_seconds: Mapping[tuple[Tier, Tier], HistogramData]
    ready_seconds: Mapping[str, HistogramData]
    evictions: Mapping[tuple[Tier, str], int]
    deferred: Mapping[str, int]
    errors: Mapping[str, int]
    prefetch_wasted: int
    resident_adapters: Mapping[Tier, int]
    resident_bytes: Mapping[Tier, int]
    capacity_bytes: Mapping[Tier, int]
    pages: Mapping[str, int]
    slots: Mapping[str, int]
    leases: int
    in_flight_loads: int
    queue_depth: Mapping[str, int]
