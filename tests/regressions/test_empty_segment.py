"""A segment of an adapter with no tokens made the reference kernel raise IndexError."""

from __future__ import annotations

from typing import Any

import torch

from adaptercache.kernels import add_lora


def test_a_lease_with_no_tokens_in_a_batch_is_fine(tiny: Any) -> None:
    with (
        tiny.cache(tiny.source("a", "b")) as cache,
        cache.acquire("a") as a,
        cache.acquire("b") as b,
    ):
        with cache.lora_batch([(a, 0), (b, 2)]) as batch:
            x = torch.ones(2, 32, device=batch.stack.device)
            y = torch.zeros_like(x)
            add_lora(y, x, batch, ("q_proj",), 0)
        assert y[0].equal(y[1])
        assert y.any()
