"""What the replicas of a deployment say of their adapters, and the router that reads it.

Nothing here knows the serving framework: a replica's stats are a plain dict of strings and lists,
which it publishes by whatever way there is, and a name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from adaptercache.cache import AdapterCache
from adaptercache.routing import AffinityRouter, Costs, Instance
from adaptercache.stats import Tier

__all__ = ["Replicas", "published"]

log = logging.getLogger(__name__)

KEY = "adaptercache"
"""Of a replica's stats, where ours are; the others are the deployment's own."""

TIERS = ("gpu", "copying", "host", "disk")
MOST = 1024
"""Adapters of a tier that a replica tells of: stats go to every router, and more often than they
change."""


def published(cache: AdapterCache) -> dict[str, dict[str, list[str]]]:
    """Where a replica's adapters are, the latest 1,024 of each tier: equal while nothing changes.

    ``{"adaptercache": {"gpu": [ids], "copying": [...], "host": [...], "disk": [...]}}``
    """
    found = {
        "gpu": cache.resident(Tier.GPU, most=MOST),
        "copying": cache.resident(Tier.GPU, coming=True, most=MOST),
        "host": cache.resident(Tier.HOST, most=MOST),
        "disk": cache.resident(Tier.DISK, most=MOST),
    }
    return {KEY: {tier: sorted(ids) for tier, ids in found.items()}}


def residency(stats: object) -> dict[str, frozenset[str]] | None:
    """What `published` gave, as sets by tier; None where this is something else."""
    ours = stats.get(KEY) if isinstance(stats, Mapping) else None
    if not isinstance(ours, Mapping):
        return None
    return {tier: _ids(ours.get(tier)) for tier in TIERS}


def _ids(listed: object) -> frozenset[str]:
    if not isinstance(listed, list | tuple | set | frozenset):
        return frozenset()
    return frozenset(adapter_id for adapter_id in listed if isinstance(adapter_id, str))


class Replicas:
    """The replicas that there are, and an `AffinityRouter` over them.

    Not thread-safe.

    Args:
        costs: a `Costs`, or a dict of what is to be other than its defaults.
        options: more of the router's.

    Raises:
        TypeError, ValueError: an option that the router doesn't have, or a value that it refuses.
    """

    def __init__(self, *, costs: Costs | Mapping[str, float] | None = None, **options: Any) -> None:
        if not isinstance(costs, Costs):
            costs = Costs(**(costs or {}))
        self.router = AffinityRouter(costs=costs, **options)
        self._stats: dict[str, object] = {}
        self._strange: set[str] = set()

    @property
    def names(self) -> Collection[str]:
        """Those that there are."""
        return self._stats.keys()

    def update(self, stats: Mapping[str, object]) -> None:
        """These replicas there are now, by name, each with the stats that it published last."""
        for name in self._stats.keys() - stats.keys():
            self.left(name)
        for name, said in stats.items():
            if name not in self._stats or said != self._stats[name]:
                self._report(name, said)

    def left(self, name: str) -> None:
        """One is gone; that of one who has gone already changes nothing."""
        if name in self._stats:
            del self._stats[name]
            self._strange.discard(name)
            self.router.leave(name)

    def order(
        self,
        adapter_id: str | None,
        loads: Iterable[tuple[str, int]],
        now: float,
        *,
        again: bool = False,
    ) -> Collection[str]:
        """The replicas to try a request at, in this order: see `AffinityRouter.rank`.

        Args:
            loads: of the replicas, by name: requests that each has.
        """
        for name, load in loads:
            if name not in self._stats:
                self._report(name, {})
            self.router.weigh(name, load)
        return self.router.rank(adapter_id, now, again=again) if self._stats else ()

    def _report(self, name: str, stats: object) -> None:
        """Stats that tell nothing (of another version, of a replica without a cache, or none yet)
        are those of one that has no adapters: requests go to their homes all the same."""
        self._stats[name] = stats
        tiers = residency(stats)
        if tiers is None and stats and name not in self._strange:
            self._strange.add(name)  # once a replica: they come again every few seconds
            log.warning("replica %s publishes stats, but none of its adapters", name)
        self.router.join(name)
        self.router.report(Instance(name, self.router.load(name), **(tiers or {})))
