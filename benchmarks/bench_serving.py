"""The example engine: what adapters add to a decode step, and S-LoRA's workload.

    python benchmarks/bench_serving.py            # 8B shapes on a GPU; a tiny model elsewhere
    python benchmarks/bench_serving.py --quick    # fewer cases, shorter: minutes

Decode: batch 64, with 0, 1, 8, 32 and 64 distinct adapters of rank 16 on q, k, v and o. A step is
what the engine's loop takes from one computing to the next, admission included.

Workload: adapters of different content, rank 8 on q, k, v and o, all in CPU memory, chosen by
S-LoRA's power law (a small skew makes few of them popular), Poisson arrivals. Saturation is when
all requests are there at once; the offered load is 70 % of what the fewest adapters saturate at.
Before it is timed, mixed requests' greedy tokens are checked against those of requests alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import record
from adaptercache import BaseModel
from adaptercache.stats import Stats, Tier
from serving_world import (
    Arrival,
    Asked,
    Engine,
    Job,
    Meter,
    Sampling,
    Settings,
    Shape,
    VariedSource,
    Workload,
    ask,
    bring_up,
    draw,
    metered,
    run,
)

ROWS = 64
DECODE_RANK, SERVE_RANK = 16, 8
DISTINCT = (0, 1, 8, 32, 64)
LOAD = 0.7

Cases = dict[str, dict[str, object]]


def settings_of(shape: Shape, max_adapters: int) -> Settings:
    return Settings(
        max_running=ROWS,
        max_adapters=max_adapters,
        max_step_tokens=shape.max_step_tokens,
        max_context=shape.max_context,
        max_waiting=1 << 20,
    )


def gate(engine: Engine, ids: Sequence[str], vocab: int) -> None:
    """No figure of wrong tokens: eight requests in one batch answer as each does alone.

    In float32 only: in bfloat16 a batch of another size may round a near-tie the other way.
    """
    if engine.cache.layout.dtype != "float32":
        return
    rng = random.Random(5)
    requests = [(rng.choice([None, *ids[:8]]), [rng.randrange(vocab)] * 9) for _ in range(8)]
    together = [Keeping.ask(engine, *request) for request in requests]
    expected = [Keeping.ask(engine, *request).result() for request in requests]
    assert [each.result() for each in together] == expected, "wrong tokens"


class Keeping:
    """A request of which the tokens are kept."""

    def __init__(self, job: Any) -> None:
        self._job = job

    @classmethod
    def ask(cls, engine: Engine, adapter_id: str | None, prompt: list[int]) -> Keeping:
        job = Job(adapter_id, list(prompt), 8, Sampling())
        engine.submit(job)
        return cls(job)

    def result(self) -> list[int]:
        tokens = []
        while isinstance(event := self._job.events.get(timeout=120), int):
            tokens.append(event)
        if isinstance(event, Exception):
            raise event
        return tokens


def decode(model: Any, shape: Shape, steps: int) -> Cases:
    """Step times by the number of distinct adapters, and what they add to the base model's."""
    base = BaseModel.from_model(model)
    source = VariedSource(base, DECODE_RANK, ROWS, model.dtype)
    ids = list(source.ids())
    cases: Cases = {}
    most = min(shape.max_context - 8, steps + 16)
    with metered(model, source, shape, settings_of(shape, ROWS)) as (engine, meter):
        gate(engine, ids, model.config.vocab_size)
        for distinct in (*DISTINCT[:1], *DISTINCT):  # the first is run twice: to warm up
            meter.steps.clear()
            bring_up(engine, ids[:distinct], Tier.GPU)
            chosen = [ids[row % distinct] if distinct else None for row in range(ROWS)]
            asked = [ask(engine, each, [1 + row], most) for row, each in enumerate(chosen)]
            for each in asked:
                each.done.wait()
            seconds = meter.step_seconds(ROWS)[8:]
            if len(seconds) < 4:
                raise RuntimeError(f"only {len(seconds)} steps had {ROWS} rows")
            cases[f"{ROWS} rows, {distinct} adapters"] = {
                **record.spread(seconds),
                "steps": len(seconds),
                "adapter_bytes": distinct * source.bytes_each,
            }
    alone = cases[f"{ROWS} rows, 0 adapters"]["us"]
    for name, case in cases.items():
        case["added_us"] = round(case["us"] - alone, 2)  # type: ignore[operator]
        print(f"{name:28} {case['us']:>10} µs a step, {case['added_us']:>9} for LoRA", flush=True)
    return cases


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(asked: Sequence[Asked], before: Stats, after: Stats, meter: Meter) -> dict[str, object]:
    """Of one run."""
    first = [each.first_s - each.at_s for each in asked if each.first_s]
    wall = max(each.done_s for each in asked) - min(each.at_s for each in asked)
    found = _difference(after.requests, before.requests)
    by_tier = {tier: sum(n for (t, _), n in found.items() if t == tier) for tier, _ in found}
    total = sum(by_tier.values()) or 1
    return {
        "requests_per_s": round(len(asked) / wall, 3),
        "tokens_per_s": round(sum(each.tokens for each in asked) / wall, 1),
        "ttft_p50_ms": round(1e3 * percentile(first, 0.5), 2),
        "ttft_p99_ms": round(1e3 * percentile(first, 0.99), 2),
        "found_in": {tier: round(n / total, 4) for tier, n in by_tier.items() if n},
        "gpu_evictions": sum(after.evictions.values()) - sum(before.evictions.values()),
        "rows_per_step": round(statistics.fmean(step.rows for step in meter.steps), 2),
        "adapters_per_step": round(statistics.fmean(step.adapters for step in meter.steps), 2),
        "steps": len(meter.steps),
        "seconds": round(wall, 2),
    }


def _difference(
    after: Mapping[tuple[str, str], int], before: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    return {key: n - before.get(key, 0) for key, n in after.items()}


def bandwidth() -> float:
    """Bytes a second that a copy on this GPU reads and writes."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    y.copy_(x)
    start.record()
    for _ in range(10):
        y.copy_(x)
    end.record()
    torch.cuda.synchronize()
    seconds: float = start.elapsed_time(end) / 1e3
    return 10 * 2 * x.nbytes / seconds


def workload(
    model: Any, shape: Shape, counts: Sequence[int], skews: Sequence[float], requests: int
) -> Cases:
    """Saturation, then the offered load, for each number of adapters and each skew."""
    base, vocab = BaseModel.from_model(model), model.config.vocab_size
    weights = sum(parameter.nbytes for parameter in model.parameters())
    saturated_at: dict[float, float] = {}  # by skew: of the fewest adapters
    bytes_per_s = bandwidth() if shape.device.type == "cuda" else None
    cases: Cases = {}
    for count in counts:
        source = VariedSource(base, SERVE_RANK, count, model.dtype)
        ids = list(source.ids())
        with metered(model, source, shape, settings_of(shape, ROWS)) as (engine, meter):
            bring_up(engine, ids, Tier.HOST)
            copies = engine.cache.stats().resident_adapters[Tier.HOST]
            assert copies == count, f"{count} adapters have only {copies} different contents"
            gate(engine, ids, vocab)
            serve(engine, meter, shape, Load("warm-up", 1.0, None, 2 * ROWS), ids, vocab)
            for skew in skews:
                load = Load("saturated", skew, None, requests)
                case = serve(engine, meter, shape, load, ids, vocab)
                rate = saturated_at.setdefault(skew, float(str(case["requests_per_s"])))
                if bytes_per_s is not None:
                    case |= predicted(case, weights, source.bytes_each, bytes_per_s)
                cases[f"{count} adapters, skew {skew}, saturated"] = case
                load = Load("offered", skew, LOAD * rate, requests)
                case = serve(engine, meter, shape, load, ids, vocab)
                case["offered_per_s"] = round(LOAD * rate, 3)
                cases[f"{count} adapters, skew {skew}, offered"] = case
                for name in list(cases)[-2:]:
                    print(f"{name:36} {line(cases[name])}", flush=True)
    return cases


class Load(NamedTuple):
    """Requests, by S-LoRA's law; ``rate`` None: all at once."""

    name: str
    skew: float
    rate: float | None
    requests: int


def serve(
    engine: Engine, meter: Meter, shape: Shape, load: Load, ids: Sequence[str], vocab: int
) -> dict[str, object]:
    """Serve a load; its figures."""
    arrivals = drawn(shape, load, ids)
    # Every prompt is its own, in every load: no prefix is shared.
    rng = random.Random(f"{load.name} {load.skew}")
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


def predicted(
    case: Mapping[str, Any], weights: int, each: int, bytes_per_s: float
) -> dict[str, object]:
    """Rows a second if a step took what reading its weights takes, and what share that we reach."""
    step_s = (weights + case["adapters_per_step"] * each) / bytes_per_s
    rows_per_s = case["steps"] * case["rows_per_step"] / case["seconds"]
    return {
        "rows_per_s": round(rows_per_s, 1),
        "predicted_rows_per_s": round(case["rows_per_step"] / step_s, 1),
        "of_predicted": round(rows_per_s * step_s / case["rows_per_step"], 3),
        "copy_GBps": round(bytes_per_s / 1e9, 1),
    }


def line(case: Mapping[str, object]) -> str:
    return (
        f"{case['requests_per_s']:>8} requests/s, {case['tokens_per_s']:>8} tokens/s, first token "
        f"{case['ttft_p50_ms']} / {case['ttft_p99_ms']} ms, found in {case['found_in']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter")
    parser.add_argument("--only", choices=("decode", "workload"), help="one part")
    parser.add_argument("--device", help="default: cuda where there is one")
    args = parser.parse_args()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape = Shape.of(device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # products as small as these take longer with more
    on_gpu, model = device.type == "cuda", shape.model()
    if args.only != "workload":
        cases = decode(model, shape, 64 if args.quick else 256)
        print(f"written to {record.write('serving_decode', cases, on_gpu=on_gpu)}")
    if args.only != "decode":
        counts = [5, 100, 1000, 2000] if shape.name == "8B" else [5, 50, 200]
        counts = [counts[0], counts[-1]] if args.quick else counts
        skews = (0.3,) if args.quick else (0.1, 0.3, 1.0)
        cases = workload(model, shape, counts, skews, 200 if args.quick else 600)
        print(f"written to {record.write('serving_workload', cases, on_gpu=on_gpu)}")


if __name__ == "__main__":
    main()
