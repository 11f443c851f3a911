"""How many LoRA kernels a step of the example engine runs, and how long they may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from adaptercache import LoraLayout
from kernel_cases import COPY_BYTES_PER_US
from serving_world import GROUPS, Engine, Meter, say, serve_model

__all__ = ["kernel_limit_us", "lora_kernels_a_step"]

KERNELS = ("fragment_", "gmv_")  # in the names of ours: fragment_shrink, bgmv_…, sgmv_…
ATTENTION = "_attend_kernel"  # once a layer in each step


def kernel_limit_us(layout: LoraLayout, rank: int, rows: int, distinct: int) -> float:
    """What the targets of decode kernels allow for all calls of a step: each 1.1 × its byte floor
    and 3.5 µs, up to rank 16."""
    if not distinct:
        return 0.0
    sites = {(site.layer, site.module): site for site in layout.sites}
    total = 0.0
    for layer in range(layout.num_layers):
        for group in GROUPS:
            its = [sites[layer, name] for name in group]
            width, out = its[0].in_features, sum(site.out_features for site in its)
            elements = sum(site.in_features + site.out_features for site in its)
            elements = distinct * rank * elements + rows * (width + 2 * out)
            total += 1.1 * elements * layout.itemsize / COPY_BYTES_PER_US + 3.5
    return round(total, 1)


def lora_kernels_a_step(engine: Engine, meter: Meter, run: Callable[[], None]) -> float | None:
    """Of the steps of ``run``: on a GPU as the profiler saw them, graphs' too (None: it saw none);
    else calls of `add_lora`, of which a GPU makes a pair of kernels each."""
    layers = engine.cache.layout.num_layers
    if not torch.cuda.is_available():
        return _calls_a_step(meter, run)
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
    except RuntimeError as error:  # a machine that doesn't let it: told, and left out
        say(f"no profile: {error}")
        return None
    names: Counter[str] = Counter()
    for event in profiler.events() or ():
        names[event.name] += 1
    steps = sum(n for name, n in names.items() if ATTENTION in name) / layers
    ours = sum(n for name, n in names.items() if any(part in name for part in KERNELS))
    if not steps:
        say(f"the profiler saw no attention among {len(names)} names: {list(names)[:5]}")
        return None
    return round(ours / steps, 3)


def _calls_a_step(meter: Meter, run: Callable[[], None]) -> float:
    calls, original = 0, vars(serve_model)["add_lora"]

    def counted(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        original(*args, **kwargs)

    vars(serve_model)["add_lora"] = counted
    try:
        run()
    finally:
        vars(serve_model)["add_lora"] = original
    return round(calls / len(meter.steps), 3)
