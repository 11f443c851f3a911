"""Requests for the example engine: drawn by S-LoRA's law, asked for, timed, and summed up."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from adaptercache.stats import Stats
from serving_world import Arrival, Engine, Finished, Job, Meter, Sampling, Shape, Workload, draw

__all__ = ["Asked", "Load", "ask", "serve"]


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and when what happened to it happened."""

    at_s: float
    first_s: float = 0.0
    done_s: float = 0.0
    tokens: int = 0
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Noting(SimpleQueue):  # type: ignore[type-arg]
    """The events of a job, noted as they come and not kept."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def put(self, item: int | Finished | Exception, *_: Any, **__: Any) -> None:
        asked, now = self._asked, time.perf_counter()
        if isinstance(item, int):
            asked.tokens += 1
            asked.first_s = asked.first_s or now
            return
        if isinstance(item, Exception):
            asked.error = item
        asked.done_s = now
        asked.done.set()


def ask(engine: Engine, adapter_id: str | None, prompt: list[int], max_tokens: int) -> Asked:
    """Submit a request."""
    asked = Asked(time.perf_counter())
    engine.submit(Job(adapter_id, prompt, max_tokens, Sampling(), Noting(asked)))
    return asked


def run(
    engine: Engine, arrivals: Sequence[Arrival], prompts: Sequence[list[int]], *, at_once: bool
) -> list[Asked]:
    """Ask for all of them, each at its time or all at once, and wait until the last has ended.

    Raises:
        Exception: what a request has failed of.
    """
    start, asked = time.perf_counter(), []
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        if not at_once:
            time.sleep(max(0.0, start + arrival.at_s - time.perf_counter()))
        asked.append(ask(engine, arrival.adapter_id, prompt, arrival.output_tokens))
    for each in asked:
        each.done.wait()
        if each.error is not None:
            raise each.error
    return asked


class Load(NamedTuple):
    """Requests, by S-LoRA's law; ``rate`` None: all at once."""

    name: str
    skew: float
    rate: float | None
    requests: int


def serve(
    engine: Engine, meter: Meter, shape: Shape, load: Load, ids: Sequence[str], vocab: int
) -> dict[str, Any]:
    """Serve a load; its figures."""
    arrivals = drawn(shape, load, ids)
    # Every prompt is its own, in every load: no prefix is shared.
    rng = random.Random(f"{load.name} {load.skew} {len(ids)}")
    prompts = [[rng.randrange(vocab) for _ in range(a.prompt_tokens)] for a in arrivals]
    meter.steps.clear()
    before = engine.cache.stats()
    asked = run(engine, arrivals, prompts, at_once=load.rate is None)
    return figures(asked, before, engine.cache.stats(), meter)


def drawn(shape: Shape, load: Load, ids: Sequence[str]) -> list[Arrival]:
    """S-LoRA's arrivals, with the lengths of the shape."""
    rng = random.Random(3)
    options: dict[str, Any] = {"cv": 1.0, "alpha": load.skew, "base_share": 0.0, "seed": 3}
    return [
        replace(
            arrival,
            prompt_tokens=rng.randint(*shape.prompt_tokens),
            output_tokens=rng.randint(*shape.output_tokens),
        )
        for arrival in draw(Workload("slora", load.requests, load.rate or 1.0, **options), ids)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(asked: Sequence[Asked], before: Stats, after: Stats, meter: Meter) -> dict[str, Any]:
    """Of one run. What begins with ``full_`` is of the steps while requests waited."""
    first = [each.first_s - each.at_s for each in asked if each.first_s]
    wall = max(each.done_s for each in asked) - min(each.at_s for each in asked)
    found = _difference(after.requests, before.requests)
    by_tier = {tier: sum(n for (t, _), n in found.items() if t == tier) for tier, _ in found}
    total = sum(by_tier.values()) or 1
    pairs = meter.full_steps()
    steps, full_s = [step for step, _ in pairs], pairs[-1][1].at_s - pairs[0][0].at_s
    idle_s = sum(step.idle_s(its_next) for step, its_next in pairs)
    lasted_ms: dict[bool, list[float]] = {True: [], False: []}  # all decode, or not
    for step, its_next in pairs:
        lasted_ms[step.jobs == step.decoding].append(1e3 * step.lasted_s(its_next))
    tokens = sum(step.new_tokens for step in steps)
    tokens_each = statistics.fmean(each.tokens for each in asked)
    return {
        "requests_per_s": round(len(asked) / wall, 3),
        "tokens_per_s": round(sum(each.tokens for each in asked) / wall, 1),
        "ttft_p50_ms": round(1e3 * percentile(first, 0.5), 2),
        "ttft_p99_ms": round(1e3 * percentile(first, 0.99), 2),
        "found_in": {tier: round(n / total, 4) for tier, n in by_tier.items() if n},
        "gpu_evictions": sum(after.evictions.values()) - sum(before.evictions.values()),
        "requests": len(asked),
        "seconds": round(wall, 2),
        "full_seconds": round(full_s, 3),
        "full_steps": len(steps),
        "full_tokens_per_s": round(tokens / full_s, 1),
        "full_requests_per_s": round(tokens / tokens_each / full_s, 3),
        "jobs_per_step": _mean(step.jobs for step in steps),
        "rows_per_step": _mean(step.rows for step in steps),
        "adapters_per_step": _mean(step.adapters for step in steps),
        "kv_tokens_per_step": _mean(step.kv_tokens for step in steps),
        "prompt_steps": round(sum(step.jobs > step.decoding for step in steps) / len(steps), 3),
        "decode_step_ms": _mean(lasted_ms[True]),
        "prompt_step_ms": _mean(lasted_ms[False]),
        "host_share": round(idle_s / full_s, 4),
    }


def _mean(values: Iterable[float]) -> float | None:
    """None of none."""
    found = [*values]
    return round(statistics.fmean(found), 2) if found else None


def _difference(
    after: Mapping[tuple[str, str], int], before: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    return {key: n - before.get(key, 0) for key, n in after.items()}
