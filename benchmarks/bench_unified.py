"""One unified arena against static splits of the same bytes, on S-LoRA's workload; needs no GPU.

    python benchmarks/bench_unified.py [--seconds 60]

Simulated time over the library's own deciding (see `unified_world`): 200 adapters of ranks 8 to 64
on q, k, v and o, all in CPU memory, more requests than can be served, and an arena of 8 GiB. A
split gives adapters a share for themselves, and KV the rest. What counts is requests served in the
time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import record
from unified_plot import bars
from unified_world import Costs, Serving, means, slora_workload

GPU_BYTES = 8 << 30
ADAPTERS, RANKS = 200, (64, 32, 16, 8)
SKEWS = (0.1, 0.3, 1.0)
KV_LOADS = {"8 to 512 tokens": ((8, 512), 60.0), "512 to 2048 tokens": ((512, 2048), 10.0)}
SHARES = (None, 0.1, 0.25, 0.5)
LEAST_OF_BEST, OVER_WORST = 0.98, 1.1
COPIES = Path(__file__).parent / "results" / "nvidia-h200" / "load_copies.json"
PICTURE = Path(__file__).parent.parent / "docs" / "unified.svg"


def name_of(share: float | None) -> str:
    return "unified" if share is None else f"{share:.0%} for adapters"


def measured() -> Costs:
    """With the link's rate as measured last, where it was."""
    try:
        cases = json.loads(COPIES.read_text())["cases"]
        rate = cases["staged: 8 in a row, rank 16 all-linear"]["GBps"]
    except (OSError, KeyError):
        return Costs()
    return Costs(link=float(rate) * 1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0, help="of simulated time")
    options = parser.parse_args()
    costs = measured()
    found: dict[str, dict[str, object]] = {}
    pictures: dict[str, dict[str, int]] = {}
    missed = []
    for load, (lengths, rate) in KV_LOADS.items():
        for skew in SKEWS:
            jobs = slora_workload(options.seconds, rate, skew, ADAPTERS, lengths, seed=1)
            served: dict[str, int] = {}
            point = f"skew {skew}, {load}"
            for share in SHARES:
                serving = Serving(GPU_BYTES, ADAPTERS, RANKS, share, costs)
                out = serving.run(jobs, options.seconds)
                serving.check()
                served[name_of(share)] = out.served
                figures: dict[str, object] = {"served": out.served, "loads": out.loads}
                figures |= {"loaded_GB": round(out.loaded_bytes / 1e9, 1), **dict(means(out))}
                found[f"{point}: {name_of(share)}"] = figures
            splits = [served[name_of(share)] for share in SHARES if share is not None]
            of_best, over_worst = (served["unified"] / n for n in (max(splits), min(splits)))
            found[f"{point}: unified"] |= {
                "of_best_split": round(of_best, 3),
                "over_worst_split": round(over_worst, 3),
            }
            pictures[point] = served
            print(f"{point:32} {served}  {of_best:.3f} of the best, {over_worst:.3f} of the worst")
            if of_best < LEAST_OF_BEST or over_worst <= OVER_WORST:
                missed.append(point)
    PICTURE.write_text(bars(pictures))
    print(f"written to {record.write('unified', found).relative_to(Path.cwd())} and {PICTURE.name}")
    print(*(f"MISSED {point}" for point in missed), sep="\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
