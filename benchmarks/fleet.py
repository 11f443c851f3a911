"""A fleet of instances, simulated: queues, slots, and adapters in two tiers of each. Seeded."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from adaptercache.routing import AffinityRouter, Instance

__all__ = ["Fleet", "Outcome", "Policy", "policies"]

ADAPTERS = 100_000
ON_GPU, IN_CPU = 100, 1_000
BATCH = 32  # requests that an instance runs at once
SERVICE_S = 1.0  # mean, exponential
USE = 0.8  # of what the fleet could serve
COPY_S, LOAD_S = 0.002, 0.3  # CPU → GPU; from disk or store into CPU memory

Policy = Callable[[str, float], int]


class LRU:
    """Adapters in one tier of one instance."""

    def __init__(self, capacity: int) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._capacity = capacity

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def use(self, key: str) -> bool:
        """Whether it was there; it is from now on."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return True
        self._keys[key] = None
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return False


@dataclass
class Server:
    """One instance."""

    gpu: LRU = field(default_factory=lambda: LRU(ON_GPU))
    cpu: LRU = field(default_factory=lambda: LRU(IN_CPU))
    running: int = 0
    waiting: deque[str] = field(default_factory=deque)
    served: int = 0
    distinct: set[str] = field(default_factory=set)

    @property
    def load(self) -> int:
        return self.running + len(self.waiting)


@dataclass
class Outcome:
    """What was measured in the second half of a run."""

    requests: int = 0
    loads: int = 0
    copies: int = 0
    queues: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def row(self, servers: list[Server]) -> dict[str, float]:
        self.queues.sort()
        mean = sum(server.served for server in servers) / len(servers)
        return {
            "loads_per_request": round(self.loads / self.requests, 4),
            "copies_per_request": round(self.copies / self.requests, 4),
            "distinct_adapters_per_instance": round(
                sum(len(server.distinct) for server in servers) / len(servers)
            ),
            "p99_queue": self.queues[int(len(self.queues) * 0.99)],
            "largest_load_over_mean": round(max(self.peaks), 3),
            "largest_traffic_over_mean": round(max(s.served for s in servers) / mean, 3),
        }


class Fleet:
    """``number`` servers, and requests for them."""

    def __init__(self, number: int, seed: int) -> None:
        self.servers = [Server() for _ in range(number)]
        self.names = [f"instance-{index}" for index in range(number)]
        self.random = random.Random(seed)
        self._ends: list[tuple[float, int]] = []
        self.outcome = Outcome()
        self.measured = False
        self.rehomed: dict[str, int] = {}  # adapters whose number of homes changed; how often
        self.ended: Callable[[int], None] = lambda index: None

    def run(self, requests: int, policy: Policy) -> None:
        """Serve them; the second half is measured."""
        rate = len(self.servers) * BATCH * USE / SERVICE_S
        weights = list(accumulate(1.0 / rank for rank in range(1, ADAPTERS + 1)))
        ranks = range(ADAPTERS)
        now, done = 0.0, 0
        while done < requests:
            for rank in self.random.choices(ranks, cum_weights=weights, k=10_000):
                now += self.random.expovariate(rate)
                while self._ends and self._ends[0][0] <= now:
                    self._end(*heappop(self._ends))
                adapter = f"adapter-{rank}"
                self._arrive(policy(adapter, now), adapter, now)
            done += 10_000
            if self.measured:
                loads = [server.load for server in self.servers]
                self.outcome.peaks.append(max(loads) / (sum(loads) / len(loads)))
            self.measured = done >= requests // 2

    def _arrive(self, index: int, adapter: str, now: float) -> None:
        server = self.servers[index]
        if self.measured:
            self.outcome.requests += 1
            self.outcome.queues.append(len(server.waiting))
            server.served += 1
            server.distinct.add(adapter)
        if server.running < BATCH:
            self._start(index, adapter, now)
        else:
            server.waiting.append(adapter)

    def _start(self, index: int, adapter: str, now: float) -> None:
        server = self.servers[index]
        on_gpu, in_cpu = server.gpu.use(adapter), server.cpu.use(adapter)
        took = self.random.expovariate(1.0 / SERVICE_S)
        took += 0.0 if on_gpu else COPY_S
        took += 0.0 if on_gpu or in_cpu else LOAD_S
        self.outcome.copies += self.measured and not on_gpu
        self.outcome.loads += self.measured and not on_gpu and not in_cpu
        server.running += 1
        heappush(self._ends, (now + took, index))

    def _end(self, now: float, index: int) -> None:
        server = self.servers[index]
        server.running -= 1
        self.ended(index)
        if server.waiting:
            self._start(index, server.waiting.popleft(), now)


class LeastLoaded:
    """The instance with the fewest requests, found by levels."""

    def __init__(self, number: int) -> None:
        self._loads = [0] * number
        self._levels: dict[int, OrderedDict[int, None]] = {}
        self._levels[0] = OrderedDict.fromkeys(range(number))
        self._least = 0

    def __call__(self, adapter: str, now: float) -> int:
        while not self._levels.get(self._least):
            self._least += 1
        index = next(iter(self._levels[self._least]))  # the one that has been there longest
        self._move(index, 1)
        return index

    def ended(self, index: int) -> None:
        self._move(index, -1)
        self._least = min(self._least, self._loads[index])

    def _move(self, index: int, by: int) -> None:
        del self._levels[self._loads[index]][index]
        self._loads[index] += by
        self._levels.setdefault(self._loads[index], OrderedDict())[index] = None


def policies(fleet: Fleet) -> dict[str, Callable[[], tuple[Policy, AffinityRouter | None]]]:
    """What routes the fleet's requests, by name; made for a fleet that is fresh."""
    number = len(fleet.servers)
    index_of = {name: index for index, name in enumerate(fleet.names)}

    def at_random() -> tuple[Policy, None]:
        chosen = random.Random(number)
        return lambda adapter, now: chosen.randrange(number), None

    def least_loaded() -> tuple[Policy, None]:
        policy = LeastLoaded(number)
        fleet.ended = policy.ended
        return policy, None

    def hashing() -> tuple[Policy, None]:
        router = AffinityRouter(fleet.names)
        return lambda adapter, now: index_of[router.homes(adapter)[0]], None

    def affinity() -> tuple[Policy, AffinityRouter]:
        router = AffinityRouter(fleet.names)
        for name, server in zip(fleet.names, fleet.servers, strict=True):
            router.report(Instance(name, gpu=server.gpu, host=server.cpu))  # seen as they are
        fleet.ended = lambda index: router.finished(fleet.names[index])

        def policy(adapter: str, now: float) -> int:
            before = router.rehomed
            index = index_of[router.route(adapter, now)]
            if router.rehomed != before and fleet.measured:
                fleet.rehomed[adapter] = fleet.rehomed.get(adapter, 0) + 1
            return index

        return policy, router

    return {
        "random": at_random,
        "least-loaded": least_loaded,
        "hashing": hashing,
        "affinity": affinity,
    }
