"""The host's own time: a call of add_lora without a CUDA graph, and the making of a batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from adaptercache.kernels import LoraBatch, add_lora
from kernel_cases import Case
from kernel_world import World


def host_times() -> dict[str, dict[str, float]]:
    """µs, medians: what a thread is kept busy, with the GPU faster than it."""
    world = World([Case("decode", "qkv", "16", 64, "distinct")])
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    y = torch.zeros(1, 6144, dtype=torch.bfloat16, device="cuda")
    batch = LoraBatch(world.stack, [(0, 1)])
    found = {
        "host/add_lora/qkv": _median(lambda: add_lora(y, x, batch, world.modules, 0)),
        "host/LoraBatch/t256": _median(
            lambda: LoraBatch(world.stack, [(i % 64, 1) for i in range(256)])
        ),
        "host/LoraBatch/t8192": _median(
            lambda: LoraBatch(world.stack, [(i, 512) for i in range(16)])
        ),
    }
    return {name: {"us": round(us, 2)} for name, us in found.items()}


def _median(act: Callable[[], object], times: int = 300) -> float:
    for _ in range(20):
        act()
    durations = []
    for i in range(times):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations) * 1e6
