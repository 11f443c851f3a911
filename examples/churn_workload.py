"""Which requests come, when, and how time passes: S-LoRA's workload, and Zipf with drift."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Protocol

from adaptercache import AdapterCache

__all__ = ["Arrival", "Lockstep", "Pace", "WallClock", "Workload", "changes", "draw", "fingerprint"]

PROMPT_TOKENS = (8, 512)  # S-LoRA's
OUTPUT_TOKENS = (4, 32)  # S-LoRA has 8 to 512; fewer, so that the run stays short


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it comes; ``adapter_id`` None is the base model."""

    number: int
    at_s: float
    adapter_id: str | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What to draw.

    Args:
        law: ``"slora"``, ``"zipf"``, or ``"both"``: half of the requests by each, in this order.
        requests: how many.
        rate: requests a second.
        cv: coefficient of variation of the gaps between arrivals; 1 is Poisson, more is bursty.
        alpha: of S-LoRA's power law; 1 is uniform, smaller is more skewed.
        zipf: exponent of Zipf's law.
        drift_every: Zipf's popularities are dealt out anew after so many requests.
        base_share: of requests for the base model alone.
        seed: equal seeds draw equal requests.
    """

    law: str = "both"
    requests: int = 1000
    rate: float = 24.0
    cv: float = 2.0
    alpha: float = 0.3
    zipf: float = 1.0
    drift_every: int = 125
    base_share: float = 0.05
    seed: int = 0


def draw(workload: Workload, ids: Sequence[str]) -> list[Arrival]:
    """The requests, in order of arrival.

    The gaps are one Gamma process for all adapters together, as in S-LoRA's code: shape 1 / cv²,
    scale cv² / rate.
    """
    rng = random.Random(workload.seed)
    shape, scale = workload.cv**-2, workload.cv**2 / workload.rate
    now, arrivals = 0.0, []
    for number, index in enumerate(_adapters(workload, len(ids), rng)):
        now += rng.gammavariate(shape, scale)
        is_base = rng.random() < workload.base_share
        adapter_id = None if is_base else ids[index]
        prompt, output = rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)
        arrivals.append(Arrival(number, now, adapter_id, prompt, output))
    return arrivals


def fingerprint(arrivals: Sequence[Arrival]) -> str:
    """Equal for equal requests."""
    return hashlib.sha256(repr(arrivals).encode()).hexdigest()[:16]


def changes(workload: Workload, arrivals: Sequence[Arrival]) -> list[tuple[float, str]]:
    """When popularity changes, and how."""
    first = _num_slora(workload)
    marks = [
        (arrivals[n].at_s, "popularity is dealt out anew")
        for n in range(first, len(arrivals), workload.drift_every)
        if n > 0
    ]
    if 0 < first < len(arrivals):
        marks[0] = (arrivals[first].at_s, "from S-LoRA's power law to Zipf's")
    return marks


def _num_slora(workload: Workload) -> int:
    return {"slora": workload.requests, "zipf": 0, "both": workload.requests // 2}[workload.law]


def _adapters(workload: Workload, n: int, rng: random.Random) -> Iterator[int]:
    slora = power_law(n, workload.alpha, rng)
    zipf = drifting_zipf(n, workload.zipf, workload.drift_every, rng)
    first = _num_slora(workload)
    yield from islice(slora, first)
    yield from islice(zipf, workload.requests - first)


def power_law(n: int, alpha: float, rng: random.Random) -> Iterator[int]:
    """S-LoRA's: adapter i of n with probability ((i + 1) / n)^alpha − (i / n)^alpha."""
    while True:
        yield min(n - 1, int(n * rng.random() ** (1 / alpha)))


def drifting_zipf(n: int, exponent: float, drift_every: int, rng: random.Random) -> Iterator[int]:
    """Zipf's: the k-th most popular with probability ~ k^−exponent; who is k-th drifts."""
    weights = list(accumulate(k**-exponent for k in range(1, n + 1)))
    by_popularity = list(range(n))
    for number in count():
        if number % drift_every == 0:
            rng.shuffle(by_popularity)
        yield rng.choices(by_popularity, cum_weights=weights)[0]


class Pace(Protocol):
    """How time passes for the scheduler."""

    def now(self) -> float:
        """Seconds since the start; also the cache's clock."""

    def settle(self, cache: AdapterCache) -> None:
        """Called after each verb that may have started loads."""

    def pass_step(self, next_arrival_s: float | None, is_busy: bool) -> None:
        """Called after each step; ``is_busy``: requests run or wait."""


class Lockstep:
    """Virtual time: a step takes ``step_s``, and every load ends before the next verb.

    So what the cache decides depends on the requests alone, and a run can be repeated.
    """

    def __init__(self, step_s: float = 0.025) -> None:
        self._step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def settle(self, cache: AdapterCache) -> None:
        stats = cache.stats()
        while stats.in_flight_loads or any(stats.queue_depth.values()):
            time.sleep(0.0005)
            stats = cache.stats()

    def pass_step(self, next_arrival_s: float | None, is_busy: bool) -> None:
        self._now += self._step_s
        if not is_busy and next_arrival_s is not None:
            self._now = max(self._now, next_arrival_s)


class WallClock:
    """Real time: steps go on while loads run, as in a serving engine."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    def settle(self, cache: AdapterCache) -> None:
        """Nothing waits."""

    def pass_step(self, next_arrival_s: float | None, is_busy: bool) -> None:
        if is_busy or next_arrival_s is None:
            time.sleep(0.001)  # a model's step would take longer
        else:
            time.sleep(max(0.0, next_arrival_s - self.now()))
