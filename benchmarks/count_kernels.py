"""Hardware counters of add_lora's kernels, by Nsight Compute: which resource holds a case back.

    python benchmarks/count_kernels.py [--only PATTERN]

It starts itself again under ``ncu``, which must be installed, and be allowed to read counters.
Kernels are launched one by one (``ncu`` sees none inside a CUDA graph's replay), each on a layer of
its own, with the clocks left as they are and the caches emptied before; the median of a case's
calls counts. Under ``ncu`` a kernel runs alone: in a step it begins while the one before ends, so
its times here are longer than in `bench_kernels`.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

import record
from adaptercache.kernels import LoraBatch, add_lora, rank_class_of
from kernel_cases import Case, all_cases
from kernel_world import World

CASES = re.compile(
    r"decode/(down|gate_up)/r(16|64)/t256/(a1|a8)|decode/(down|qkv)/r(16|64)/t256/distinct"
)
CALLS = 3
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__bytes_read.sum": "dram_read_MB",
    "lts__t_bytes.sum": "l2_MB",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_pct",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "l2_pct",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_pct",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_pct",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "cycles_for_memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "cycles_at_barriers",
    "smsp__average_warp_latency_per_inst_issued.ratio": "cycles_an_instruction",
    "launch__grid_size": "programs",
    "launch__registers_per_thread": "registers",
}
SCALES = {"us": 1e-3, "dram_read_MB": 1e-6, "l2_MB": 1e-6}  # of --print-units base: ns and bytes
INSIDE = "ADAPTERCACHE_COUNTED"  # the process that ncu watches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", help="cases whose name begins as this pattern")
    options = parser.parse_args()
    pattern = options.only or f"(?:{CASES.pattern})$"
    cases = [case for case in all_cases() if re.match(pattern, case.name)]
    if not cases:
        raise SystemExit(f"no case's name begins as {options.only!r} says")
    if INSIDE in os.environ:
        for case in cases:
            launch(case)
        return
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        raise SystemExit("count_kernels needs a CUDA device and ncu (Nsight Compute)")
    rows, found = counted(), {}
    each, rest = divmod(len(rows), len(cases))
    if rest:
        raise SystemExit(f"ncu saw {len(rows)} kernels in {len(cases)} cases of equally many")
    for index, case in enumerate(cases):
        print(f"{case.name}: floor {case.floor_us:.2f} us, target {case.limit_us:.2f}")
        for kernel, figures in medians(rows[index * each : (index + 1) * each]).items():
            found[f"{case.name}: {kernel}"] = figures
            print(f"  {kernel:24}", *(f"{name} {value}" for name, value in figures.items()))
    if not options.only:
        print("written:", record.write("counters", found, on_gpu=True))


def counted() -> list[dict[str, str]]:
    """A row a kernel, in the order of their launches."""
    ncu = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base", "--page", "raw"]
    ncu += ["--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    environment = {**os.environ, INSIDE: "1"}
    command = [*ncu, sys.executable, *sys.argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row["Kernel Name"]]
    if done.returncode or not rows:
        raise SystemExit(f"ncu ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return rows


def medians(rows: Iterable[Mapping[str, str]]) -> dict[str, dict[str, object]]:
    values: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for metric, name in METRICS.items():
            if text := row.get(metric, "").replace(",", ""):
                value = float(text) * SCALES.get(name, 1)
                values[row["Kernel Name"]][name].append(value)
    return {
        kernel: {name: round(statistics.median(found), 2) for name, found in figures.items()}
        for kernel, figures in values.items()
    }


def launch(case: Case) -> None:
    """``CALLS`` calls that are counted, after one that compiles."""
    world = World([case])
    x = torch.randn(case.tokens, world.shape.k, device="cuda").bfloat16()
    y = torch.zeros(case.tokens, sum(world.shape.widths), device="cuda").bfloat16()
    segments, rank_class = case.segments(), rank_class_of(case.max_rank)
    batch = LoraBatch(
        world.stack, segments, pad_to=case.tokens, rank_class=rank_class, ranks=world.ranks
    )
    add_lora(y, x, batch, world.modules, 0)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in range(CALLS):
        add_lora(y, x, batch, world.modules, call % world.layers)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    del world, batch
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
