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


def residency(said: object) -> dict[str, frozenset[str]]:
    """What `published` gave under its key, as sets by tier; of anything else, nothing."""
    if not isinstance(said, Mapping):
        return {}
    return {tier: _ids(said.get(tier)) for tier in TIERS}


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
        self._said: dict[str, object] = {}
        self._strange: set[str] = set()

    @property
    def names(self) -> Collection[str]:
        """Those that there are."""
        return self._said.keys()

    def update(self, stats: Mapping[str, object]) -> None:
        """These replicas there are now, by name, each with the stats that it published last."""
        for name in self._said.keys() - stats.keys():
            self.left(name)
        for name, whole in stats.items():
            said = whole.get(KEY) if isinstance(whole, Mapping) else None
            if name not in self._said or said != self._said[name]:
                self._report(name, said)
            if whole and not isinstance(said, Mapping) and name not in self._strange:
                self._strange.add(name)  # once a replica: they come again every few seconds
                log.warning("replica %s publishes stats, but none of its adapters", name)

    def left(self, name: str) -> None:
        """One is gone; that of one who has gone already changes nothing."""
        if name in self._said:
            del self._said[name]
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
            if name not in self._said:
                self._report(name, None)
            self.router.weigh(name, load)
        return self.router.rank(adapter_id, now, again=again) if self._said else ()

    def _report(self, name: str, said: object) -> None:
        """One that tells nothing (of another version, without a cache, or just started) has no
        adapters: those that it is at home for come to it all the same."""
        self._said[name] = said
        self.router.join(name)
        self.router.report(Instance(name, self.router.load(name), **residency(said)))
