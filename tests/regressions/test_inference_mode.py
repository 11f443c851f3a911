"""What is made inside torch.inference_mode was no tensor that anybody could write to outside of it:
every load of a cache that was made there failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptercache.kernels import LoraBatch, LoraStack
from adaptercache.kernels.work_buffer import WorkBuffer


def test_a_cache_made_in_inference_mode_loads(tiny: Any) -> None:
    with torch.inference_mode():
        cache = tiny.cache(tiny.source("a", "b"), gpu_slots=1)
    with cache:
        for name in ("a", "b"):
            with cache.acquire(name).result(10) as lease, cache.lora_batch([(lease, 1)]):
                pass
        with torch.inference_mode():
            cache.drop_gpu()
            cache.restore()
        cache.acquire("a").result(10).release()


@pytest.mark.parametrize("made_in", [True, False])
def test_steps_may_be_inside_and_outside_of_it(made_in: bool) -> None:
    a, b = torch.ones(2, 4, 16), torch.ones(2, 8, 4)
    with torch.inference_mode(made_in):
        stack = LoraStack.from_dense({(0, "q_proj"): (a, b, [1.0, 1.0])})
        sums, zeros = stack.scratch(64, 8)
        batch = LoraBatch(stack, [(0, 1)])
        buffer = WorkBuffer(batch.shape.numel, stack.device)
    with torch.inference_mode(not made_in):
        stack.table[0].copy_(stack.table[1])
        sums.zero_()
        zeros.zero_()
        buffer.write(batch.shape.lay_out([(0, 1)], 16, {}), object())
