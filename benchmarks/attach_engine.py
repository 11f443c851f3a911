"""The example engine's decode rate for `bench_attach.py`, and the adapters of all its ways."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from adaptercache import LoraLayout, Tier
from adaptercache.testing import random_adapter
from serving_load import ask
from serving_world import (
    ALL_LINEAR,
    Engine,
    Job,
    Sampling,
    Settings,
    Shape,
    bring_up,
    metered,
)

__all__ = ["Adapters", "in_engine", "nbytes_of"]


class Adapters:
    """Random adapters, and the source that they come from."""

    def __init__(self, layout: LoraLayout, wanted: argparse.Namespace) -> None:
        shape: dict[str, Any] = {"rank": wanted.rank, "targets": ALL_LINEAR}
        shape["dtype"] = getattr(torch, layout.dtype)
        tensors, config = random_adapter(layout.base, **shape)
        self.all: dict[str, tuple[dict[str, Tensor], dict[str, object]]] = {}
        self._files: dict[str, dict[str, bytes]] = {}

        def make(number: int) -> None:
            """All differ, and none takes the time of drawing it."""
            rolled = {name: tensor.roll(number, dims=0) for name, tensor in tensors.items()}
            self.all[f"adapter-{number}"] = rolled, config
            self._files[f"adapter-{number}"] = {
                "adapter_config.json": json.dumps(config).encode(),
                "adapter_model.safetensors": save(rolled),
            }

        with ThreadPoolExecutor() as threads:
            list(threads.map(make, range(wanted.adapters)))

    def ids(self) -> Iterable[str]:
        return list(self.all)

    def revision(self, adapter_id: str) -> str:
        return "1"

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        return {name: len(content) for name, content in self._files[adapter_id].items()}

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        piece = memoryview(self._files[adapter_id][name])[offset : offset + len(into)]
        into[: len(piece)] = piece
        return len(piece)


def nbytes_of(layout: LoraLayout, wanted: argparse.Namespace) -> int:
    """Of all adapters in memory."""
    _, elements = layout.starts([wanted.rank] * len(layout.sites))
    return wanted.adapters * (elements * layout.itemsize + (2 << 20))  # type: ignore[no-any-return]


def in_engine(
    model: Any, adapters: Adapters, of_rows: Sequence[str], ids: Tensor, wanted: argparse.Namespace
) -> tuple[list[float], Tensor]:
    """Tokens a second of the example engine, of each step, and its logits behind the prompts'
    beginnings."""
    layout = LoraLayout.from_model(model, max_rank=wanted.rank)
    context, device = wanted.prompt + wanted.tokens, torch.device(wanted.device)
    pages = wanted.batch * -(-context // 16)
    kv_bytes = pages * 2 * 16 * model.config.num_key_value_heads * model.config.head_dim
    kv_bytes *= layout.num_layers * layout.itemsize
    nbytes = nbytes_of(layout, wanted)
    settings = Settings(
        max_running=wanted.batch,
        max_adapters=wanted.adapters,
        max_step_tokens=max(1024, wanted.batch),
        max_context=context,
    )
    sizes = (nbytes + 2 * kv_bytes + (8 << 20), nbytes, 2 << 20)
    lengths = ((wanted.prompt,) * 2, (wanted.tokens,) * 2, context, settings.max_step_tokens)
    shape = Shape("attach", device, *lengths, *sizes)
    options = {"max_rank": wanted.rank, "gpu_slots": wanted.adapters}
    with metered(model, adapters, shape, settings, **options) as (engine, meter):
        if len(bring_up(engine, list(adapters.all), Tier.GPU)) < wanted.adapters:
            raise TimeoutError("the adapters did not come to the GPU")
        logits = first_logits(engine, of_rows, ids[:, :8].tolist())
        prompts = ids.tolist()
        for _ in range(2):  # the first compiles kernels and fills caches
            meter.steps.clear()
            asked = [
                ask(engine, name, list(prompt), wanted.tokens)
                for name, prompt in zip(of_rows, prompts, strict=True)
            ]
            for each in asked:
                each.done.wait()
        steps = meter.decode_steps(wanted.batch)
    return [wanted.batch / seconds for seconds, _ in steps[1:]], logits


@torch.inference_mode()
def first_logits(engine: Engine, of_rows: Sequence[str], prompts: Sequence[list[int]]) -> Tensor:
    """``[rows, 1, vocab]``: by the engine's runner, while the engine has nothing to do."""
    cache, runner = engine.cache, engine._runner._runner  # type: ignore[attr-defined]
    at_once = engine.settings.max_step_tokens // len(prompts[0])
    logits: list[Tensor] = []
    for first in range(0, len(prompts), at_once):
        work = []
        asked = zip(of_rows[first:], prompts[first : first + at_once], strict=False)
        for name, prompt in asked:
            job = Job(name, prompt, 1, Sampling())
            job.lease, job.pages = cache.acquire(name).result(), list(cache.pages.allocate(1) or ())
            work.append((job, len(prompt)))
        pairs = [(job.lease, n) for job, n in work if job.lease]
        with cache.lora_batch(pairs, pad_to=runner.padded(work)) as lora:
            runner(work, lora).read()
        logits.append(runner._logits[: len(work)].clone())
        for job, _ in work:
            cache.pages.free(job.pages)
            if job.lease is not None:
                job.lease.release()
    return torch.cat(logits)[:, None]
