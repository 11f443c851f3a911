"""A fleet on Ray Serve: our request router beside Serve's default and its `multiplexed` routing.

    python benchmarks/bench_ray.py            # a quarter of an hour; a simulation of 1,000 too
    python benchmarks/bench_ray.py --quick    # 2 replicas alone; nothing is written

The replicas of examples/ray_fleet.py, a tiny model, 200 adapters asked for by Zipf 1.0 from 8
clients, one request each at a time. The CPU memory of all replicas holds two thirds of the
adapters, that of the GPUs a fifth, their disks all; as on machines of their own, none shares a
disk. The store answers after 50 ms. A *load* brings an adapter into CPU memory, from disk or store.
What is measured is the second half of each run.

All ways have the same caches, with `policy="lfu"`, for popularity is steady here; 2 replicas once
more with LRU, which is what `multiplexed` goes by.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if find_spec("ray") is None:
    raise SystemExit("bench_ray needs Ray Serve: make bench-ray, or the extra `ray`")

import ray
import torch
from ray import serve as ray_serve
from ray.serve.config import RequestRouterConfig
from safetensors.torch import save_file

import record
from adaptercache import BaseModel, DirectorySource, LoraLayout, Source
from adaptercache.integrations.ray import AffinityRequestRouter
from adaptercache.integrations.replicas import Replicas
from adaptercache.testing import random_adapter
from fleet import Fleet, policies
from ray_fleet import Engine
from serve_job import Sampling, Settings
from serve_model import kv_layout
from serve_tiny import ALL_LINEAR, tiny_model

EXAMPLES = Path(__file__).parents[1] / "examples"
ADAPTERS, RANK, TOKENS = 200, 16, 8
CLIENTS, REQUESTS = 8, 2_400  # after one for each adapter
STORE_S = 0.05
LIMITS = Settings(max_running=16, max_adapters=8, max_context=64)
PROMPT = list(range(40, 56))
FLEETS = {"2 replicas": (2, "lfu"), "4 replicas": (4, "lfu"), "2 replicas, LRU": (2, "lru")}
SIMULATED, PUBLISHED_S = 1_000_000, 2.0


class Store(DirectorySource):
    """A directory as far away as an object store."""

    def revision(self, adapter_id: str) -> str:
        time.sleep(STORE_S)
        return super().revision(adapter_id)


class Replica(Engine):
    """Of a fleet that is routed by Serve's default, or by our router."""

    def __init__(self, adapters: Path, folder: Path, options: Mapping[str, Any]) -> None:
        disk = folder / ray_serve.get_replica_context().replica_id.unique_id
        super().__init__(None, adapters, LIMITS, disk_dir=disk, **options)

    def source(self, adapters: Path) -> Source:
        return Store(adapters)


def multiplexed(held: int) -> type[Replica]:
    """The same, as Serve's documentation has it: it says what it holds by `serve.multiplexed`."""

    class Multiplexed(Replica):
        @ray_serve.multiplexed(max_num_models_per_replica=held)  # type: ignore[untyped-decorator]
        async def bring(self, adapter_id: str) -> str:
            async with self.cache.acquire(adapter_id):
                return adapter_id

        async def complete(self, *request: Any) -> AsyncIterator[int | str]:
            await self.bring(ray_serve.get_multiplexed_model_id())
            async for event in super().complete(*request):
                yield event

    return Multiplexed


Call = Callable[[Any, str], Any]


def by_argument(handle: Any, adapter_id: str) -> Any:
    """The router is told nothing."""
    call = handle.options(stream=True, method_name="run")
    return call.remote(adapter_id, PROMPT, TOKENS, Sampling())


def by_model_id(handle: Any, adapter_id: str) -> Any:
    call = handle.options(stream=True, method_name="complete", multiplexed_model_id=adapter_id)
    return call.remote(PROMPT, TOKENS, Sampling())


OURS = RequestRouterConfig(
    request_router_class=AffinityRequestRouter,
    request_router_kwargs={"slack": LIMITS.max_running // 2},
    request_routing_stats_period_s=1.0,
)
Kind = Callable[[int], type[Replica]]
WAYS: dict[str, tuple[Kind, RequestRouterConfig, Call]] = {
    "default": (lambda held: Replica, RequestRouterConfig(), by_argument),
    "multiplexed": (multiplexed, RequestRouterConfig(), by_model_id),
    "affinity": (lambda held: Replica, OURS, by_model_id),
}


def make_adapters(root: Path, base: BaseModel) -> None:
    for number in range(ADAPTERS):
        tensors, config = random_adapter(
            base, rank=RANK, targets=ALL_LINEAR, seed=number, dtype=torch.float32
        )
        folder = root / f"adapter-{number}"
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))


def held(replicas: int) -> int:
    """Adapters that the CPU memory of each holds."""
    return ADAPTERS * 2 // 3 // replicas


def sizes_of(model: Any, replicas: int) -> dict[str, int]:
    """A replica's budgets, in adapters of this rank: `held` in CPU memory."""
    layout = LoraLayout.from_model(model, max_rank=RANK)
    block = 16 << 10
    each = -(-layout.max_elements * layout.itemsize // block) * block
    kv = kv_layout(model.config, "float32").block_bytes * model.config.num_hidden_layers
    contexts = LIMITS.max_running * -(-LIMITS.max_context // 16) * kv
    gpu, disk = ADAPTERS // 5 // replicas, ADAPTERS // replicas
    return {
        "gpu_bytes": gpu * (each + kv) + contexts,
        "host_bytes": held(replicas) * each,
        "host_block_bytes": block,
        "disk_bytes": 2 * disk * (each + (16 << 10)),  # as published, and packed
        "gpu_slots": gpu,
        "max_rank": RANK,
    }


class Run:
    """Clients of one fleet, and what they saw."""

    def __init__(self, handle: Any, call: Call) -> None:
        self._handle, self._call = handle, call
        weights = list(accumulate(1.0 / rank for rank in range(1, ADAPTERS + 1)))
        drawn = random.Random(0).choices(range(ADAPTERS), cum_weights=weights, k=REQUESTS)
        self._asked = iter([f"adapter-{number}" for number in (*range(ADAPTERS), *drawn)])
        self.first: list[float] = []
        self.served: Counter[str] = Counter()
        self.distinct: dict[str, set[str]] = {}
        self.seconds = 0.0
        self._before: list[dict[str, Any]] = []
        self._done = 0
        self._start = 0.0

    async def go(self) -> dict[str, float]:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))
        seconds = time.perf_counter() - self._start
        after = await self._described()
        requests = len(self.first)
        cut = statistics.quantiles(self.first, n=100)
        return {
            "loads_per_request": round(self._loads(after, "host") / requests, 4),
            "copies_per_request": round(self._loads(after, "gpu") / requests, 4),
            "downloads_per_request": round(self._loads(after, "disk") / requests, 4),
            "distinct_adapters_per_replica": round(
                statistics.mean(len(ids) for ids in self.distinct.values()), 1
            ),
            "largest_share_over_mean": round(max(self.served.values()) / requests * len(after), 3),
            "first_token_ms_p50": round(cut[49] * 1e3, 1),
            "first_token_ms_p99": round(cut[98] * 1e3, 1),
            "requests_per_s": round(requests / seconds, 1),
        }

    async def _client(self) -> None:
        for adapter_id in self._asked:
            if self._done == ADAPTERS + REQUESTS // 2 and not self._before:
                self._start = time.perf_counter()
                self._before = [{}]
                self._before = await self._described()
            self._done += 1
            start = time.perf_counter()
            events = self._call(self._handle, adapter_id)
            replica = await anext(events)  # it comes with the first token
            took = time.perf_counter() - start
            tokens = [event async for event in events]
            assert len(tokens) == TOKENS + 1, tokens
            if self._before:
                self.first.append(took)
                self.served[replica] += 1
                self.distinct.setdefault(replica, set()).add(adapter_id)

    async def _described(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._handle.broadcast("describe").results_async()
        return found

    def _loads(self, after: list[dict[str, Any]], tier: str) -> int:
        ends = sum(one["loads"].get(tier, 0) for one in after)
        return int(ends - sum(one["loads"].get(tier, 0) for one in self._before))


def measure(
    way: str, replicas: int, adapters: Path, options: Mapping[str, Any]
) -> dict[str, float]:
    kind, config, call = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as folder:
        deployment = ray_serve.deployment(
            kind(held(replicas)),
            name="Engine",
            num_replicas=replicas,
            max_ongoing_requests=2 * LIMITS.max_running,
            ray_actor_options={"num_cpus": 0.1},
            graceful_shutdown_timeout_s=2,
            request_router_config=config,
        )
        handle = ray_serve.run(
            deployment.bind(adapters, Path(folder), options), name=way, route_prefix=None
        )
        found = asyncio.run(Run(handle, call).go())
        ray_serve.delete(way)
    return found


def simulate(number: int) -> Iterator[tuple[str, dict[str, object]]]:
    """The fleet of bench_routing.py, routed by the object that the request router routes by, with
    what replicas published up to two seconds ago."""
    fleet = Fleet(number, 0)
    policy, _ = policies(fleet)["least-loaded"]()
    fleet.run(SIMULATED, policy)
    yield "least-loaded", {**fleet.outcome.row(fleet.servers)}

    fleet, replicas = Fleet(number, 0), Replicas()
    index_of = {name: index for index, name in enumerate(fleet.names)}
    due = 0.0

    def tell() -> None:
        tiers = [{"gpu": sorted(s.gpu), "host": sorted(s.cpu)} for s in fleet.servers]
        replicas.update({n: {"adaptercache": t} for n, t in zip(fleet.names, tiers, strict=True)})

    def route(adapter_id: str, now: float) -> int:
        nonlocal due
        if now >= due:
            tell()
            due = now + PUBLISHED_S
        name = next(iter(replicas.order(adapter_id, (), now)))
        replicas.router.weigh(name, replicas.router.load(name) + 1)
        return index_of[name]

    fleet.ended = lambda index: replicas.router.finished(fleet.names[index])
    fleet.run(SIMULATED, route)
    yield "affinity, published", {**fleet.outcome.row(fleet.servers)}


def missed(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for case, row in cases.items():
        if not case.startswith("affinity"):
            continue
        _, _, fleet = case.partition("/")
        bounds = [("default", 0.5), ("least-loaded", 0.25)]
        if not fleet.endswith("LRU"):  # there both do what LRU can, and chance decides
            bounds.append(("multiplexed", 1.0))
        for other, share in bounds:
            beside = cases.get(f"{other}/{fleet}")
            if beside is not None:
                limit = share * beside["loads_per_request"]
                if row["loads_per_request"] > limit:
                    yield f"{case}: {row['loads_per_request']} loads a request, over {limit:.4f}"


def main() -> int:
    parser = record.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="2 replicas; nothing is written")
    quick = parser.parse_args().quick
    cases: dict[str, dict[str, object]] = {}

    def tell(case: str, row: Mapping[str, object]) -> None:
        cases[case] = dict(row)
        print(f"{case:30} {row}", flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-ray-") as root:
        model = tiny_model()
        make_adapters(Path(root), BaseModel.from_model(model))
        ray.init(
            "local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=1 << 27,
            runtime_env={
                "env_vars": {"PYTHONPATH": str(EXAMPLES)}
            },  # where replicas find the engine
        )
        try:
            for fleet, (replicas, policy) in [*FLEETS.items()][: 1 if quick else None]:
                options = {**sizes_of(model, replicas), "policy": policy}
                for way in WAYS:
                    tell(f"{way}/{fleet}", measure(way, replicas, Path(root), options))
        finally:
            ray_serve.shutdown()
            ray.shutdown()
    if not quick:
        for way, row in simulate(1_000):
            tell(f"{way}/1000 simulated", row)
    lines = list(missed(cases))
    for line in lines:
        print(f"missed: {line}")
    if not quick:
        print(f"written to {record.write('ray', cases).relative_to(Path.cwd())}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
