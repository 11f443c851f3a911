"""The engine of serve.py as a fleet on Ray Serve: several replicas, routed by their adapters.

    python examples/ray_fleet.py                    # two replicas of a tiny model, on this machine
    python examples/ray_fleet.py --adapters DIR     # yours: see --help

    curl localhost:8000/v1/completions -d '{"model": "adapter-03", "prompt": "Once"}'
    curl localhost:8000/fleet                       # who has which adapters, and its process
    kill -9 PID                                     # of a replica: another takes its place
    curl localhost:8000/fleet -d '{"replicas": 3}'  # one more

`Engine` is a replica, `Gateway` (ray_gateway.py) speaks HTTP. What an author of such a fleet takes
from here is short: `AdapterReplica` as a base of the one, ``multiplexed_model_id`` in the call of
the other, and `AffinityRequestRouter` in the configuration. docs/ray.md walks through it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if find_spec("ray") is None:
    raise SystemExit("ray_fleet needs Ray Serve: make fleet, or the extra `ray`")

import ray
import torch
from ray import serve as ray_serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)

import serve
from adaptercache import BaseModel, DirectorySource, Source
from adaptercache.integrations.ray import AdapterReplica, AffinityRequestRouter
from ray_gateway import MOST_REPLICAS, Gateway
from serve_job import Finished, Job, Sampling, Settings
from serve_tiny import make_adapters

STATS_S = 1.0  # how often replicas publish what they have


class Events(queue.SimpleQueue[Any]):
    """A job's events, into the event loop of who waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)

    async def next(self) -> Any:
        event = await self._arrived.get()
        if isinstance(event, Exception):
            raise event
        return event


class Engine(AdapterReplica):
    """A replica: the model, an `AdapterCache`, and the engine's thread. ``options`` are the
    cache's, see `serve.build`. Those on one machine share the adapters on disk."""

    def __init__(
        self, model: Path | None, adapters: Path, limits: Settings, **options: Any
    ) -> None:
        torch.set_num_threads(1)  # several replicas share the machine
        self._stack = ExitStack()
        loaded, _ = serve.open_model(model, torch.device("cpu"))
        source = self.source(adapters)
        self.engine = self._stack.enter_context(serve.build(loaded, source, limits, **options))
        self.cache = self.engine.cache
        self._name = ray_serve.get_replica_context().replica_id.unique_id

    def source(self, adapters: Path) -> Source:
        return DirectorySource(adapters)

    async def complete(
        self, tokens: list[int], max_tokens: int, sampling: Sampling
    ) -> AsyncIterator[int | str]:
        """The replica's name, token by token, and why it ended; with the adapter that the call
        was routed by."""
        adapter_id = ray_serve.get_multiplexed_model_id() or None
        async for event in self.run(adapter_id, tokens, max_tokens, sampling):
            yield event

    async def run(
        self, adapter_id: str | None, tokens: list[int], max_tokens: int, sampling: Sampling
    ) -> AsyncIterator[int | str]:
        events = Events()
        job = Job(adapter_id, tokens, max_tokens, sampling, events)
        self.engine.submit(job)
        try:
            event = await events.next()
            yield self._name
            while not isinstance(event, Finished):
                yield event
                event = await events.next()
            yield event.reason
        finally:
            self.engine.abort(job)  # changes nothing where the job has ended

    def describe(self) -> dict[str, Any]:
        loads: dict[str, int] = {}
        for (_, to, result), times in self.cache.stats().loads.items():
            if result == "ok":
                loads[to.value] = loads.get(to.value, 0) + times
        resident = self.record_routing_stats()["adaptercache"]
        return {"name": self._name, "pid": os.getpid(), "loads": loads, "adapters": resident}

    def check_health(self) -> None:
        if not self.engine.is_alive:
            raise RuntimeError("the engine is closed")

    def __del__(self) -> None:  # how Serve ends a replica
        self._stack.close()


class AsWanted:
    """How many replicas there are to be. Serve's own policy follows the load; here a file says
    it, so that one can be added by hand."""

    def __init__(self, wanted: str) -> None:
        self._wanted = Path(wanted)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        return int(self._wanted.read_text()), {}


def fleet(args: argparse.Namespace, adapters: Path, folder: Path) -> Any:
    """The application, to be given to Serve. ``folder``: for adapters on disk, and a file with the
    number of replicas."""
    wanted = folder / "replicas"

    model, tokenizer = serve.open_model(args.model, torch.device("cpu"))
    limits = Settings(max_running=32, end_tokens=serve.end_tokens(model))
    engine = ray_serve.deployment(
        Engine,
        autoscaling_config=AutoscalingConfig(
            min_replicas=1,
            initial_replicas=args.replicas,
            max_replicas=MOST_REPLICAS,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=AutoscalingPolicy(
                policy_function=AsWanted, policy_kwargs={"wanted": str(wanted)}
            ),
        ),
        max_ongoing_requests=2 * limits.max_running,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=5,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRequestRouter,
            request_router_kwargs={"slack": limits.max_running // 2},
            request_routing_stats_period_s=STATS_S,
        ),
    ).bind(
        args.model,
        adapters,
        limits,
        gpu_bytes=args.gpu_mib << 20,
        host_bytes=args.host_mib << 20,
        host_block_bytes=64 << 10,
        disk_dir=folder / "disk",
    )
    gateway = ray_serve.deployment(
        Gateway, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1}
    )
    return gateway.bind(engine, tokenizer, adapters, wanted)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    text, _, _ = (__doc__ or "").partition("\n\n`Engine`")
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--replicas", type=int, default=2, help="default: 2; on this machine's CPUs")
    add("--model", type=Path, help="directory of a Llama-family model (default: a tiny one)")
    add("--adapters", type=Path, help="directory with a folder an adapter (default: made up)")
    add("--count", type=int, default=32, help="adapters to make up (default: 32)")
    add("--port", type=int, default=8000, help="default: 8000")
    add("--gpu-mib", type=int, help="of a replica's arena (default: 8 for the tiny one, or 8192)")
    add("--host-mib", type=int, help="of its CPU memory for adapters (default: 8, or 16384)")
    args = parser.parse_args(argv)
    if args.adapters is not None and not args.adapters.is_dir():
        parser.error(f"--adapters: {args.adapters} is no directory")
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model: no config.json in {args.model}")
    args.gpu_mib = args.gpu_mib or (8 if args.model is None else 8192)
    args.host_mib = args.host_mib or (8 if args.model is None else 16384)
    return args


def why_not() -> str:
    """What failed in replicas: Serve's own error names only their deployments."""
    deployments = ray_serve.status().applications["fleet"].deployments.values()
    return "\n".join(each.message for each in deployments if each.message)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
        adapters = args.adapters
        if adapters is None:
            adapters = folder / "adapters"
            model, _ = serve.open_model(args.model, torch.device("cpu"))
            make_adapters(adapters, BaseModel.from_model(model), args.count)
        ray.init(
            "local", include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20
        )
        stack.callback(ray.shutdown)
        ray_serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        stack.callback(ray_serve.shutdown)
        (folder / "replicas").write_text(str(args.replicas))
        try:
            ray_serve.run(fleet(args, adapters, folder), name="fleet")
        except RuntimeError as error:
            print(f"error: {error}\n{why_not()}", file=sys.stderr)
            return 1
        print(f"{args.replicas} replicas on http://127.0.0.1:{args.port}", flush=True)
        serve.wait_for_signal()
    return 0


if __name__ == "__main__":
    sys.exit(main())
