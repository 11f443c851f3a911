"""Routing over a simulated fleet: 100,000 adapters, Zipf 1.0, 64 and 1,000 instances.

    python benchmarks/bench_routing.py            # some minutes
    python benchmarks/bench_routing.py --quick    # 64 instances alone

Each instance holds 100 adapters on the GPU and 1,000 in CPU memory. A *load* brings one into CPU
memory from disk or store (hundreds of ms), a *copy* from there onto the GPU (ms). What is measured
is the second half of each run. Beside the copies stands what no router could do without, for a
fleet has so many slots and no more.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import record
from adaptercache.routing import AffinityRouter
from fleet import ADAPTERS, ON_GPU, Fleet, policies

SEED = 0
REQUESTS = {64: 400_000, 1_000: 1_000_000}
CHANGES = 10
MOST = {"loads": 0.25, "load": 1.25, "moved": 1.2}


def main() -> int:
    parser = record.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="64 instances alone")
    quick = parser.parse_args().quick
    cases: dict[str, dict[str, object]] = {}
    missed: list[str] = []
    for number, requests in REQUESTS.items():
        if quick and number > 64:
            continue
        for name in policies(Fleet(number, SEED)):
            start = time.perf_counter()
            fleet = Fleet(number, SEED)
            policy, router = policies(fleet)[name]()
            fleet.run(requests, policy)
            row: dict[str, object] = {**fleet.outcome.row(fleet.servers)}
            if router is not None:
                row["homes_changed"] = sum(fleet.rehomed.values())
                row["flapping_adapters"] = sum(times > 1 for times in fleet.rehomed.values())
                row["adapters_with_several_homes"] = sum(
                    len(router.homes(f"adapter-{rank}")) > 1 for rank in range(2_000)
                )
                row |= movement(router, number)
                missed += misses(number, row, cases)
            cases[f"{name}/{number} instances"] = row
            print(f"{number:5} {name:13} {row} ({time.perf_counter() - start:.0f} s)", flush=True)
    for line in missed:
        print(f"missed: {line}")
    if not quick:
        print(f"written to {record.write('routing', cases).relative_to(Path.cwd())}")
    return 1 if missed else 0


def movement(router: AffinityRouter, number: int) -> dict[str, object]:
    """Homes that move when one instance joins or leaves, over K / n; the mean of ten in a row."""
    steps = {"join": (router.join, "new"), "leave": (router.leave, "instance")}
    before, found = homes(router), dict[str, object]()
    for what, (change, name) in steps.items():
        for index in range(CHANGES):
            change(f"{name}-{index}")
        after = homes(router)
        keys = sum(map(len, before))
        moved = sum(len(new - old) for old, new in zip(before, after, strict=True))
        found[f"moved_by_{what}_over_k_n"] = round(moved / CHANGES / (keys / number), 3)
        before = after
    return found


def homes(router: AffinityRouter) -> list[frozenset[str]]:
    return [frozenset(router.homes(f"adapter-{rank}")) for rank in range(ADAPTERS)]


def copies_bound(number: int) -> float:
    """Copies a request that no router can do without: were the fleet's GPUs always full of the most
    wanted adapters, each in one place alone, these requests would be for others."""
    wanted = [1.0 / rank for rank in range(1, ADAPTERS + 1)]
    return sum(wanted[number * ON_GPU :]) / sum(wanted)


def misses(number: int, row: dict[str, object], cases: dict[str, dict[str, object]]) -> list[str]:
    least = cases[f"least-loaded/{number} instances"]
    row["loads_over_least_loaded"] = round(
        float(str(row["loads_per_request"])) / float(str(least["loads_per_request"])), 3
    )
    of_least = float(str(least["copies_per_request"]))
    row["copies_over_least_loaded"] = round(float(str(row["copies_per_request"])) / of_least, 3)
    row["copies_bound"] = round(copies_bound(number), 4)
    row["copies_bound_over_least_loaded"] = round(copies_bound(number) / of_least, 3)
    limits = {
        "loads_over_least_loaded": MOST["loads"],
        "largest_load_over_mean": MOST["load"],
        "moved_by_join_over_k_n": MOST["moved"],
        "moved_by_leave_over_k_n": MOST["moved"],
        "flapping_adapters": 0.0,
    }
    return [
        f"{number} instances: {what} is {row[what]}, over {limit}"
        for what, limit in limits.items()
        if float(str(row[what])) > limit
    ]


if __name__ == "__main__":
    sys.exit(main())
