"""Loading adapters: disk → CPU memory → scattered cells on the GPU, and what steps notice of it.

    python benchmarks/bench_load.py [--only copies,flow]

The parts: copies, peers, flow, decode, first, variants, growth, footprint. Every case checks the
bytes that it moved. One that fails is told of at the end, and takes nothing from the others.
Without a GPU it runs at small sizes, to see that it runs; only the footprint, which is arithmetic,
is then written.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

import load_copies
import load_flow
import load_step
import record
from load_footprint import footprint
from load_world import ON_GPU, LoadWorld

Rows: TypeAlias = Iterator[tuple[str, dict[str, object]]]


def in_a_world(cases: Callable[[LoadWorld], Rows]) -> Callable[[], Rows]:
    def run() -> Rows:
        world = LoadWorld()
        try:
            yield from cases(world)
        finally:
            world.close()

    return run


PARTS: dict[str, Callable[[], Rows]] = {
    "copies": in_a_world(load_copies.copies),
    "peers": in_a_world(load_copies.one_copy_a_tensor),
    "flow": load_flow.flow,
    "decode": in_a_world(load_step.decode_beside_loads),
    "first": load_step.first_step,
    "variants": in_a_world(load_copies.variants),
    "growth": in_a_world(load_copies.growth),
    "footprint": footprint,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    options = parser.parse_args()
    lines, failed = [], []
    for part in options.only.split(","):
        found: dict[str, dict[str, object]] = {}
        start = time.perf_counter()
        try:
            for name, figures in PARTS[part]():
                found[name] = figures
                told = "  ".join(f"{key} {value}" for key, value in figures.items())
                print(f"{name}: {told}", flush=True)
        except Exception:
            failed.append(part)
            traceback.print_exc(file=sys.stdout)
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
        print(f"-- {part}: {time.perf_counter() - start:.1f} s", flush=True)
        if found and (ON_GPU or part == "footprint"):
            on_gpu = part != "footprint"
            print("written:", record.write(f"load_{part}", found, on_gpu=on_gpu), flush=True)
        lines += missed(found)
    print(*lines, sep="\n")
    if failed:
        print("FAILED:", ", ".join(failed))
    return bool(failed)


def missed(found: dict[str, dict[str, object]]) -> list[str]:
    """Targets that these figures miss."""
    limits = (
        ("share", "least_share", -1),
        ("slower", "most_slower", 1),
        ("over_a_hit_us", "most_over_a_hit_us", 1),
    )
    lines = []
    for name, figures in found.items():
        for value, limit, sign in limits:
            have, bound = figures.get(value), figures.get(limit)
            if not isinstance(have, (int, float)) or not isinstance(bound, (int, float)):
                continue
            if (have - bound) * sign > 0:
                lines.append(f"MISSED {name}: {value} {have}, the limit is {bound}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
