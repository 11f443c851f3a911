"""Prefix keys: MB of token ids a second, 4 bytes an id, on one core."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import record
from adaptercache.prefix import prefix_keys

TOKENS = 1 << 20
ROUNDS = 7


def megabytes_per_second(token_ids: Sequence[int], block_size: int) -> float:
    start = time.perf_counter()
    keys = prefix_keys(token_ids, block_size=block_size, adapter=bytes(32))
    elapsed_s = time.perf_counter() - start
    assert len(keys) == TOKENS // block_size
    return 4 * TOKENS / elapsed_s / 1e6


def main() -> None:
    record.options(__doc__).parse_args()
    rng = random.Random(0)
    ids = [rng.randrange(128_000) for _ in range(TOKENS)]
    inputs = {"list": ids, "uint32": array("I", ids), "int64": array("q", ids)}
    cases: dict[str, dict[str, object]] = {}
    for name, token_ids in inputs.items():
        for block_size in (16, 64, 256):
            rates = [megabytes_per_second(token_ids, block_size) for _ in range(ROUNDS)]
            cases[f"{name}/block {block_size}"] = {
                "MBps": round(statistics.median(rates)),
                "lowest": round(min(rates)),
                "highest": round(max(rates)),
            }
            print(
                f"{name:>6}, blocks of {block_size:>3}: {statistics.median(rates):6.0f} MB/s "
                f"({min(rates):.0f} to {max(rates):.0f})"
            )
    print(f"written to {record.write('prefix', cases).relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
