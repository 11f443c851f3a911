"""What a scheduler step costs in Python: hits, admission, the batch. No GPU is needed.

    python benchmarks/bench_host_path.py

Each figure is taken with 1,000 and with 1,000,000 known adapter ids: none may grow with them.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import record
from adaptercache import AdapterCache, AdapterKey, BaseModel, Caps, Lease, LoraLayout, Request
from adaptercache.testing import FakeSource, random_adapter

ADAPTERS, IN_BATCH = 200, 16
LONG = 10_000
LIMITS_US = {"acquire + release": 10, "admit": 1000, "lora_batch": 100, "long line": 10_000}


def small_base() -> BaseModel:
    table = {
        f"model.layers.{layer}.self_attn.{name}": {"kind": "linear", "out_in": [64, 64]}
        for layer in range(2)
        for name in ("q_proj", "v_proj")
    }
    return BaseModel.from_table(table)


class FarSource(FakeSource):
    """What is cold takes its time, as over a network, so that it is still cold at the next look."""

    def revision(self, adapter_id: str) -> str:
        if adapter_id.startswith("cold-"):
            time.sleep(0.2)
        return super().revision(adapter_id)


@contextmanager
def filled_cache(slots: int, known_ids: int) -> Iterator[AdapterCache]:
    """A cache that has had 200 adapters of different content, as many on the GPU as have slots."""
    base, source = small_base(), FarSource()
    for index in range(ADAPTERS):
        source.put(f"adapter-{index}", *random_adapter(base, rank=4, seed=index))
    cache = AdapterCache(
        LoraLayout(base, max_rank=16),
        source,
        gpu_bytes=64 << 20,
        gpu_slots=slots,
        host_bytes=64 << 20,
        host_block_bytes=64 << 10,
        device="cpu",
    )
    with cache:
        for index in reversed(range(ADAPTERS)):
            with cache.acquire(f"adapter-{index}"):
                pass
        catalog = cache._ledger.catalog
        for index in range(known_ids - len(catalog)):
            key = AdapterKey(f"known-{index}", "1")
            cache._ledger.learn(key, index.to_bytes(32, "little"), 4096)
        gc.freeze()  # a million entries: the collector's walks over them are not what we measure
        yield cache


def hits(cache: AdapterCache) -> dict[str, float]:
    ids = [f"adapter-{random.randrange(IN_BATCH)}" for _ in range(1000)]

    def act() -> None:
        for adapter_id in ids:
            cache.acquire(adapter_id).release()

    durations = record.time_each(act, lambda: None, 30)
    return record.spread([duration / len(ids) for duration in durations])


def queue() -> list[Request]:
    """1,000 requests over 200 adapters; 64 are for the 16 adapters that the batch has room for."""
    ids = [index % IN_BATCH for index in range(64)]
    ids += [IN_BATCH + index % (ADAPTERS - IN_BATCH) for index in range(1000 - 64)]
    random.shuffle(ids)
    first = [ids.index(index) for index in range(IN_BATCH)]
    ids = [ids[i] for i in first] + [x for i, x in enumerate(ids) if i not in set(first)]
    return [Request(f"r{i}", f"adapter-{index}", kv_pages=0) for i, index in enumerate(ids)]


def admission(cache: AdapterCache) -> dict[str, float]:
    waiting = queue()
    leases: list[Lease] = []

    def act() -> None:
        admission = cache.admit(waiting, max_adapters=IN_BATCH)
        assert len(admission.admitted) == 64, admission
        leases.extend(lease for _, lease in admission.admitted)

    def after() -> None:
        while leases:
            leases.pop().release()

    # Fewer times than fairness allows: then those without room would be let in.
    return record.spread(record.time_each(act, after, 60))


def long_line(cache: AdapterCache, waiting: list[Request]) -> dict[str, float]:
    """Another decision on a line that was there before; 64 are admitted where they can be."""
    caps = Caps(adapters=IN_BATCH, tokens=64)
    leases: list[Lease] = []

    def act() -> None:
        leases.extend(lease for _, lease in cache.admit(waiting, caps=caps).admitted)

    def after() -> None:
        while leases:
            leases.pop().release()

    act()
    after()
    return record.spread(record.time_each(act, after, 60))


def batch(cache: AdapterCache) -> dict[str, float]:
    leases = [cache.acquire(f"adapter-{index}") for index in range(IN_BATCH)]
    pairs = [(leases[index % IN_BATCH], 1) for index in range(256)]

    def act() -> None:
        with cache.lora_batch(pairs, pad_to=256, rank_to=64):
            pass

    durations = record.time_each(act, lambda: None, 300)
    for lease in leases:
        lease.release()
    return record.spread(durations)


def main() -> int:
    record.options(__doc__).parse_args()
    torch.set_num_threads(1)
    cases: dict[str, dict[str, object]] = {}
    missed = 0
    for known_ids in (1_000, 1_000_000):
        random.seed(0)
        with filled_cache(ADAPTERS, known_ids) as cache:
            rows = {"acquire + release": hits(cache), "lora_batch": batch(cache)}
            rows["admit, the others capped"] = admission(cache)
            ids = [f"adapter-{random.randrange(ADAPTERS)}" for _ in range(LONG)]
            line = [Request(f"l{i}", adapter_id) for i, adapter_id in enumerate(ids)]
            rows["long line of 10,000 over 200 adapters"] = long_line(cache, line)
        with filled_cache(IN_BATCH, known_ids) as cache:
            running = [cache.acquire(f"adapter-{index}").result() for index in range(IN_BATCH)]
            rows["admit, the others without room"] = admission(cache)
            for lease in running:
                lease.release()
            line = [Request(f"l{i}", f"cold-{i}") for i in range(LONG)]
            rows["long line of 10,000 cold adapters"] = long_line(cache, line)
        for what, figures in rows.items():
            limit = next(us for name, us in LIMITS_US.items() if what.startswith(name))
            missed += figures["us"] > limit
            cases[f"{what}/{known_ids} ids"] = {**figures, "limit_us": limit}
            print(
                f"{what:38} {known_ids:>9} ids {figures['us']:9.2f} µs "
                f"({figures['p25']:.2f} to {figures['p75']:.2f}; limit {limit})",
                flush=True,
            )
    print(f"written to {record.write('host_path', cases).relative_to(Path.cwd())}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
