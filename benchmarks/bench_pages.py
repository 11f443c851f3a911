"""Page allocations a second: pairs of `allocate` and `free` of 1 to 64 pages, on one core."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import record
from adaptercache.pages import Owner, PageAllocator

PAIRS = 100_000
HELD = 256
"""Allocations alive at any time, so that pages come back in another order than they left."""


def pairs_per_second(seed: int) -> float:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 64) for _ in range(PAIRS)]
    turns = [rng.randrange(HELD) for _ in range(PAIRS)]
    pages = PageAllocator(HELD * 64)
    held: list[tuple[int, ...]] = [()] * HELD
    start = time.perf_counter()
    for n, turn in zip(sizes, turns, strict=True):
        pages.free(held[turn], Owner.KV)
        ids = pages.allocate(n, Owner.KV)
        assert ids is not None
        held[turn] = ids
    return PAIRS / (time.perf_counter() - start)


def main() -> None:
    record.options(__doc__).parse_args()
    rates = [pairs_per_second(seed) for seed in range(7)]
    figures = {
        "pairs_per_second": round(statistics.median(rates)),
        "lowest": round(min(rates)),
        "highest": round(max(rates)),
    }
    print("{pairs_per_second:,} pairs/s ({lowest:,} to {highest:,})".format(**figures))
    path = record.write("pages", {"1 to 64 pages": figures})
    print(f"written to {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
