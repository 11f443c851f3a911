"""The example engine: what adapters add to a decode step, and S-LoRA's workload.

    python benchmarks/bench_serving.py            # 8B shapes on a GPU; a tiny model elsewhere
    python benchmarks/bench_serving.py --quick    # the fewest and the most adapters, fewer requests

Decode: batch 64, with 0, 1, 8, 32 and 64 distinct adapters of rank 16 on all projections. A step is
what the engine's loop takes from one launch to the next, admission included; in `host_us` of it the
device has nothing to do. Beside it stands what the kernels' targets (docs/kernels.md) allow for all
its calls together, and how many LoRA kernels ran in a step.

Workload: adapters of different content, rank 8 on q, k, v and o, all in CPU memory, chosen by
S-LoRA's power law (a small skew makes few of them popular), Poisson arrivals. Saturated: all
requests are there at once, and what counts are the steps while some still wait. Offered: 70 % of
what the fewest adapters saturate at.

Before it is timed, mixed requests' greedy tokens are checked against those of requests alone. One
engine serves all of it; figures are written after each case, the most important cases first, so
that little is lost where time runs out (``--minutes``: no case begins after that).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import record
from adaptercache import BaseModel
from adaptercache.stats import Tier
from serving_launches import kernel_limit_us, lora_kernels_a_step
from serving_load import Load, ask, serve
from serving_world import (
    ALL_LINEAR,
    ATTENTION,
    Engine,
    Job,
    Kind,
    Meter,
    Sampling,
    Settings,
    Shape,
    VariedSource,
    bring_up,
    metered,
    say,
)

ROWS = 64
DISTINCT = (0, 1, 8, 32, 64)
LOAD = 0.7
LOADING_S = 240.0  # for the adapters to come into CPU memory; those that have count

Cases = dict[str, dict[str, Any]]


def settings_of(shape: Shape) -> Settings:
    return Settings(
        max_running=ROWS,
        max_adapters=ROWS,
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
    together = [new_job(*request) for request in requests]
    for job in together:
        engine.submit(job)
    expected = []
    for request in requests:
        engine.submit(job := new_job(*request))
        expected.append(tokens_of(job))
    assert [tokens_of(job) for job in together] == expected, "wrong tokens"


def new_job(adapter_id: str | None, prompt: list[int]) -> Job:
    return Job(adapter_id, list(prompt), 8, Sampling())


def tokens_of(job: Job) -> list[int]:
    tokens = []
    while isinstance(event := job.events.get(timeout=120), int):
        tokens.append(event)
    if isinstance(event, Exception):
        raise event
    return tokens


class Bench:
    """What all parts share. ``until``: no case begins after this (`time.monotonic`)."""

    def __init__(
        self, engine: Engine, meter: Meter, shape: Shape, source: VariedSource, model: Any
    ) -> None:
        self.engine, self.meter, self.shape, self.source = engine, meter, shape, source
        self.vocab = model.config.vocab_size
        # A step gathers a few rows of the embeddings, and reads all the rest.
        embeddings = model.get_input_embeddings().weight.nbytes
        self.read_bytes = sum(p.nbytes for p in model.parameters()) - embeddings
        heads, width = model.config.num_key_value_heads, model.config.head_dim
        layers = model.config.num_hidden_layers
        self.kv_bytes = 2 * layers * heads * width * model.dtype.itemsize  # a token
        self.on_gpu = shape.device.type == "cuda"
        self.bytes_per_s = bandwidth() if self.on_gpu else None
        self.until = float("inf")

    def is_late(self, what: str) -> bool:
        if time.monotonic() < self.until:
            return False
        say(f"no time for {what}")
        return True

    def write(self, name: str, cases: Cases) -> None:
        record.write(name, cases, on_gpu=self.on_gpu)


def decode(bench: Bench, kind: Kind, steps: int) -> None:
    """Step times by the number of distinct adapters, and what they add to the base model's."""
    engine, meter, ids = bench.engine, bench.meter, kind.ids
    gate(engine, ids, bench.vocab)
    cases: Cases = {}
    most = min(bench.shape.max_context - 8, steps + 16)
    for distinct in (*DISTINCT[:1], *DISTINCT):  # the first is run twice: to warm up
        there = bring_up(engine, ids[:distinct], Tier.GPU)
        if len(there) < distinct:
            raise TimeoutError(f"{distinct - len(there)} adapters did not come to the GPU")
        chosen = [ids[row % distinct] if distinct else None for row in range(ROWS)]

        def run(tokens: int, chosen: Sequence[str | None] = chosen) -> None:
            meter.steps.clear()
            asked = [ask(engine, each, [1 + row], tokens) for row, each in enumerate(chosen)]
            for each in asked:
                each.done.wait()

        run(most)
        timed = meter.decode_steps(ROWS)[8:]
        if len(timed) < 4:
            raise RuntimeError(f"only {len(timed)} steps had {ROWS} rows")
        case: dict[str, Any] = {
            **record.spread([step for step, _ in timed]),
            "host_us": record.spread([idle for _, idle in timed])["us"],
            "steps": len(timed),
            "adapter_bytes": distinct * bench.source.bytes_each[kind.name],
            "kernel_limit_us": kernel_limit_us(engine.cache.layout, kind.rank, ROWS, distinct),
        }
        if distinct in (DISTINCT[0], DISTINCT[-1]):
            case["lora_kernels_a_step"] = lora_kernels_a_step(engine, meter, lambda: run(24))
        alone = cases.setdefault(f"{ROWS} rows, 0 adapters", case)
        case["added_us"] = round(case["us"] - alone["us"], 2)
        if distinct:
            case["of_kernel_limit"] = round(case["added_us"] / case["kernel_limit_us"], 3)
        else:  # the second run of it counts
            case["added_us"] = 0.0
        cases[f"{ROWS} rows, {distinct} adapters"] = case
        bench.write("serving_decode", cases)
        say(
            f"{ROWS} rows, {distinct:2} adapters: {case['us']:>10} µs a step (host "
            f"{case['host_us']}), {case['added_us']:>9} for LoRA, where the kernels' targets allow "
            f"{case['kernel_limit_us']}; LoRA kernels: {case.get('lora_kernels_a_step', '?')}"
        )


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
    bench: Bench, kind: Kind, plan: Sequence[tuple[int, float]], requests: int, name: str
) -> None:
    """Saturation, then the offered load, for each number of adapters and skew of the plan; the
    fewest adapters come first."""
    say(f"{kind.size} adapters come into CPU memory")
    loading_s = min(LOADING_S, bench.until - time.monotonic())
    ids = bring_up(bench.engine, kind.ids, Tier.HOST, loading_s)
    hops = bench.engine.cache.stats().load_seconds.items()
    took = [f"{a.value} to {b.value} {h.sum / sum(h.counts):.3f} s" for (a, b), h in hops]
    say(f"{len(ids)} are there; a load took at the mean: {', '.join(took)}")
    if len(ids) < plan[0][0]:
        return
    gate(bench.engine, ids, bench.vocab)
    cases: Cases = {}
    for count, skew in plan:
        count = min(count, len(ids))
        its, point = ids[:count], f"{count} adapters, skew {skew}"
        if bench.is_late(point):
            break
        fewest = next((key for key in cases if key.endswith(f"skew {skew}, saturated")), None)
        first = cases[fewest] if fewest else None
        offered = cases[fewest.replace("saturated", "offered")] if fewest else None
        shape = replace(bench.shape, output_tokens=(1, 16))
        warm_up = Load("warm-up", skew, None, 2 * ROWS)
        serve(bench.engine, bench.meter, shape, warm_up, its, bench.vocab)
        case = run_load(bench, Load("saturated", skew, None, requests), its)
        case |= predicted(bench, case, first, bench.source.bytes_each[kind.name])
        cases[f"{point}, saturated"] = case
        bench.write(name, cases)
        rate = LOAD * float((first or case)["full_requests_per_s"])
        say(f"{point}, saturated: {line(case)}")
        case = run_load(bench, Load("offered", skew, rate, requests), its)
        case["offered_per_s"] = round(rate, 3)
        if offered is not None:
            case["of_fewest"] = round(case["requests_per_s"] / offered["requests_per_s"], 4)
        cases[f"{point}, offered"] = case
        bench.write(name, cases)
        say(f"{point}, offered:   {line(case)}")


def run_load(bench: Bench, load: Load, ids: Sequence[str]) -> dict[str, Any]:
    return serve(bench.engine, bench.meter, bench.shape, load, ids, bench.vocab)


def predicted(
    bench: Bench, case: Mapping[str, Any], fewest: Mapping[str, Any] | None, each: int
) -> dict[str, Any]:
    """What share is reached of the steps a second that reading the weights of base and distinct
    adapters allows: by the GPU's bandwidth, and by the steps with the fewest adapters. Steps with
    prompts in them take longer, by their products, than any bytes say."""
    found: dict[str, Any] = {}
    step_bytes = bench.read_bytes + case["adapters_per_step"] * each
    step_s = case["full_seconds"] / case["full_steps"]
    if bench.bytes_per_s is not None:
        kv = case["kv_tokens_per_step"] * bench.kv_bytes
        found = {
            "of_predicted": round(step_bytes / bench.bytes_per_s / step_s, 3),
            "of_predicted_with_kv": round((step_bytes + kv) / bench.bytes_per_s / step_s, 3),
            "copy_GBps": round(bench.bytes_per_s / 1e9, 1),
        }
        if case["decode_step_ms"]:
            ms = 1e3 * (step_bytes + kv) / bench.bytes_per_s
            found["of_predicted_in_decode_steps"] = round(ms / case["decode_step_ms"], 3)
    if fewest is not None:
        fewer = bench.read_bytes + fewest["adapters_per_step"] * each
        predicted = fewest["full_tokens_per_s"] * fewer / step_bytes
        found["of_predicted_from_fewest"] = round(case["full_tokens_per_s"] / predicted, 3)
    return found


def line(case: Mapping[str, Any]) -> str:
    shares = {key: value for key, value in case.items() if key.startswith("of_")}
    return (
        f"{case['requests_per_s']:>8} requests/s, {case['tokens_per_s']:>8} tokens/s, first token "
        f"{case['ttft_p50_ms']} / {case['ttft_p99_ms']} ms, found in {case['found_in']} {shares}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter")
    parser.add_argument("--only", choices=("decode", "workload"), help="one part")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--minutes", type=float, help="no case begins later; with --quick 6")
    parser.add_argument("--requests", type=int, help="of each load")
    args = parser.parse_args()
    minutes = args.minutes or (6.0 if args.quick else float("inf"))
    until = time.monotonic() + 60 * minutes
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape = Shape.of(device)
    compiling = None
    if device.type == "cuda":
        from kernel_compile import compile_ahead  # triton: only where it is used

        compiling = compile_ahead((1, 17, 64, shape.max_step_tokens))
    if device.type == "cpu":
        torch.set_num_threads(1)  # products as small as these take longer with more
    model = shape.model()
    say("the model is made")
    counts = [5, 100, 1000, 2000] if shape.name == "8B" else [5, 50, 200]
    requests = args.requests or (150 if args.quick else 400)
    kinds = [Kind("wide", 16, ALL_LINEAR, ROWS), Kind("slora", 8, ATTENTION, counts[-1])]
    plan = [(count, skew) for skew in (0.3, 1.0, 0.1) for count in (counts[0], counts[-1])]
    if not args.quick:
        plan += [(count, skew) for skew in (0.3, 1.0, 0.1) for count in counts[1:-1]]
    source = VariedSource(BaseModel.from_model(model), kinds, model.dtype)
    if compiling is not None:
        compiling.join()
        say("kernels are compiled")
    with metered(model, source, shape, settings_of(shape)) as (engine, meter):
        say("the engine runs")
        bench = Bench(engine, meter, shape, source, model)
        bench.until = until
        if args.only != "workload":
            decode(bench, kinds[0], 64 if args.quick else 256)
        if args.only != "decode":
            workload(bench, kinds[1], plan, requests, "serving_workload")
    say("done")


if __name__ == "__main__":
    main()
