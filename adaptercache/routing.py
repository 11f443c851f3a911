"""Which instance of a fleet serves a request, so that few load its adapter and none is overrun.

Every adapter has a home: the instance that rendezvous hashing ranks first for it (Thaler and
Ravishankar, 1998). An instance that joins or leaves changes the homes of its own share of the
adapters, and of no others. One that is asked for more than an instance can serve has several
homes, the first in the same ranking. No instance gets more than a bound over the mean (Mirrokni,
Thorup and Zadimoghaddam, 2018): what is over goes down the ranking, always to the same ones.

Plain Python; the time is passed in. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nlargest, nsmallest
from math import ceil

from adaptercache.rates import Rates

__all__ = ["AffinityRouter", "Costs", "Instance"]

_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_MASK = (1 << 64) - 1
_SHORT_RANKING = 8
_MOST_RANKINGS = 1 << 18
_ENOUGH = 100  # requests that tell a rate from chance
_AMPLE = 1.1  # homes are added with some to spare, so that the next wobble adds none


@dataclass(frozen=True, slots=True)
class Instance:
    """What an instance says of itself, now and then.

    Args:
        name: its own, stable: it decides on the homes.
        load: requests that it has, waiting and running.
        gpu, copying, host, disk: ids of the adapters that are on the GPU, on their way there, in
            CPU memory, on disk. Anything with ``in``; it is looked at when a request is routed.
    """

    name: str
    load: int = 0
    gpu: Container[str] = ()
    copying: Container[str] = ()
    host: Container[str] = ()
    disk: Container[str] = ()


@dataclass(frozen=True, slots=True)
class Costs:
    """What it costs to serve a request where its adapter is not on the GPU, in requests ahead of
    it in the queue. ``away``: more, where it is not at home."""

    copying: float = 0.5
    host: float = 1.0
    disk: float = 4.0
    absent: float = 8.0
    away: float = 4.0


DEFAULT_COSTS = Costs()


class AffinityRouter:
    """Routes requests by adapter.

    Args:
        instances: names; more may `join`.
        bound: no instance gets a request that would lift its load over ``bound`` times the mean.
        costs: see `Costs`.
        hot_share: an adapter has as many homes as it takes for none to get more of it than this
            share of an instance's mean traffic.
        calm: a home is given up only when that leaves the others below ``calm`` times that share.
        memory_s: over which time rates are measured.
        slack: whatever the mean is, an instance takes so many requests: as many as it runs at once.

    Raises:
        ValueError: a bound or a share that makes no sense.
    """

    def __init__(
        self,
        instances: Iterable[str] = (),
        *,
        bound: float = 1.2,
        costs: Costs = DEFAULT_COSTS,
        hot_share: float = 0.5,
        calm: float = 0.7,
        memory_s: float = 60.0,
        slack: int = 0,
    ) -> None:
        if bound <= 1.0 or not 0.0 < hot_share <= 1.0 or not 0.0 < calm < 1.0:
            raise ValueError(f"{bound=} must be over 1, {hot_share=} and {calm=} between 0 and 1")
        if slack < 0 or memory_s <= 0.0:
            raise ValueError(f"{slack=} must be 0 or more, {memory_s=} over 0")
        self._bound, self._costs, self._slack = bound, costs, slack
        self._hot_share, self._calm = hot_share, calm
        self._instances: dict[str, Instance] = {}
        self._loads: dict[str, int] = {}
        self._total_load = 0
        self._seeds: dict[str, int] = {}
        self._rates = Rates(memory_s)
        self._copies: dict[str, int] = {}  # homes, of those that have several
        self._rankings: dict[str, list[str]] = {}
        self.rehomed = 0
        """How often the number of an adapter's homes has changed."""
        for name in instances:
            self.join(name)

    def join(self, name: str) -> None:
        """An instance is there. Nothing but its own share of the adapters moves."""
        if name not in self._seeds:
            self._seeds[name] = _hash(name)
            self._instances[name] = Instance(name)
            self._loads[name] = 0
            self._rankings.clear()

    def leave(self, name: str) -> None:
        """It is gone, and what it had with it."""
        if self._seeds.pop(name, None) is not None:
            del self._instances[name]
            self._total_load -= self._loads.pop(name)
            self._rankings.clear()

    def report(self, instance: Instance) -> None:
        """What an instance says of itself takes the place of what was counted here. Joins it."""
        self.join(instance.name)
        self._instances[instance.name] = instance
        self.weigh(instance.name, instance.load)

    def weigh(self, name: str, load: int) -> None:
        """The load of an instance that has joined, for who counts it elsewhere."""
        self._total_load += load - self._loads[name]
        self._loads[name] = load

    def finished(self, name: str) -> None:
        """A request that was routed there has ended; where reports are frequent, say nothing."""
        if self._loads.get(name, 0) > 0:
            self._loads[name] -= 1
            self._total_load -= 1

    def load(self, name: str) -> int:
        """Requests that an instance has, as far as is known here."""
        return self._loads[name]

    def homes(self, adapter_id: str) -> tuple[str, ...]:
        """Where an adapter is to be, the first first: to prefetch it there, or to look."""
        return tuple(self._ranking(adapter_id, self._copies.get(adapter_id, 1)))

    def route(self, adapter_id: str | None, now: float) -> str:
        """The instance for one request, which is counted as its load from now on.

        Args:
            adapter_id: None is the base model: the least loaded serves it.
            now: seconds, monotonic.

        Raises:
            LookupError: there is no instance.
        """
        if adapter_id is not None:
            self._rates.add(adapter_id, now)
        name = self._first(adapter_id, now)
        self.weigh(name, self._loads[name] + 1)
        return name

    def rank(self, adapter_id: str | None, now: float, *, again: bool = False) -> list[str]:
        """Where to try one request, in this order, for who has to ask an instance whether it takes
        it. The first is what `route` would say; up to seven follow.

        Nothing is counted as load: tell `weigh`. ``again``: this request was ranked before, so
        that it doesn't count twice in what its adapter is asked for.

        Raises:
            LookupError: there is no instance.
        """
        if adapter_id is not None and not again:
            self._rates.add(adapter_id, now)
        first = self._first(adapter_id, now)
        if adapter_id is None:
            rest = nsmallest(_SHORT_RANKING, self._loads, key=self._loads.__getitem__)
        else:
            rest = self._ranking(adapter_id, _SHORT_RANKING)
        return [first, *(name for name in rest if name != first)][:_SHORT_RANKING]

    def _first(self, adapter_id: str | None, now: float) -> str:
        if not self._loads:
            raise LookupError("no instance has joined")
        name = None if adapter_id is None else self._choose(adapter_id, now)
        return min(self._loads, key=self._loads.__getitem__) if name is None else name

    def _choose(self, adapter_id: str, now: float) -> str | None:
        """The cheapest of its homes and the next after them; where all are full, the first in the
        ranking that isn't; None where that is far down."""
        homes = self._count_homes(adapter_id, now)
        ranking = self._ranking(adapter_id, max(homes + 1, _SHORT_RANKING))
        loads, limit = self._loads, self.limit
        best, least = None, float("inf")
        for place, name in enumerate(ranking[: homes + 1]):
            load = loads[name]
            if load < limit and load < least:
                cost = load + self._cost(adapter_id, self._instances[name])
                if place == homes:
                    cost += self._costs.away
                if cost < least:
                    best, least = name, cost
        if best is None:
            best = next((name for name in ranking[homes + 1 :] if loads[name] < limit), None)
        return best

    @property
    def limit(self) -> int:
        """The load that no instance is lifted over now: one more than the mean, at the least, and
        the slack."""
        total, number = self._total_load, max(1, len(self._loads))
        return max(int(self._bound * (total + 1) / number), total // number + 1, self._slack)

    def _cost(self, adapter_id: str, instance: Instance) -> float:
        if adapter_id in instance.gpu:
            return 0.0
        costs = self._costs
        if adapter_id in instance.copying:
            return costs.copying
        if adapter_id in instance.host:
            return costs.host
        return costs.disk if adapter_id in instance.disk else costs.absent

    def _count_homes(self, adapter_id: str, now: float) -> int:
        """As many as its traffic fills, with some calm before one is given up; one at least."""
        before = self._copies.get(adapter_id, 1)
        limit = self._hot_share / len(self._loads)  # of all traffic, that a home may get of it
        share = self._rates.share(adapter_id)
        is_known = self._rates.count(adapter_id, now) >= _ENOUGH
        if before == 1 and not is_known:
            return before
        if is_known and share > before * limit:
            homes = ceil(share / limit * _AMPLE)
        else:
            homes = min(before, max(1, ceil(share / limit / self._calm)))
        homes = min(homes, len(self._loads))
        if homes != before:
            self.rehomed += 1
            if homes > 1:
                self._copies[adapter_id] = homes
            else:
                del self._copies[adapter_id]
        return homes

    def _ranking(self, adapter_id: str, length: int) -> list[str]:
        """The first instances for this adapter, by rendezvous hashing."""
        found = self._rankings.get(adapter_id)
        if found is None or len(found) < min(length, len(self._seeds)):
            if len(self._rankings) >= _MOST_RANKINGS:
                self._rankings.clear()
            own = _hash(adapter_id)
            scores = [((own ^ seed) * _MIX & _MASK, name) for name, seed in self._seeds.items()]
            longer = max(_SHORT_RANKING, length + length // 4)
            best = nlargest(longer, scores) if longer < len(scores) // 4 else sorted(scores)[::-1]
            found = self._rankings[adapter_id] = [name for _, name in best[:longer]]
        return found[:length]


def _hash(name: str) -> int:
    """64 bits, the same in every process and on every machine."""
    data = name.encode("utf-8", "surrogatepass")  # a lone surrogate is a name, too
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
