"""A step that opened just after a pipelined adapter's copy had failed, and before that was noted,
read what happened to be in the pages."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from adaptercache import AdapterCache, Lease, LoadFailed, Request, Tier
from adaptercache.kernels import add_lora
from adaptercache.tiers import ways


def test_it_is_told(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        cache.prefetch(["a"], Tier.HOST)
        assert tiny.wait_until(lambda: "a" in cache.resident(Tier.HOST))

        def queue(*args: Any) -> Any:
            raise OSError("injected")
            yield

        monkeypatch.setattr(ways.Staged, "queue", queue)
        monkeypatch.setattr(ways.Strided, "queue", queue)
        write, has_failed, go_on = cache._gpu.write, threading.Event(), threading.Event()

        def write_and_stop(slot: int, transfer: Any) -> None:
            try:
                write(slot, transfer)
            finally:
                has_failed.set()
                go_on.wait(10)

        monkeypatch.setattr(cache._gpu, "write", write_and_stop)
        ((_, lease),) = cache.admit([Request("r", "a", pipelined=True)]).admitted
        assert has_failed.wait(10)
        try:
            with pytest.raises(LoadFailed):
                take_a_step(cache, lease)
        finally:
            go_on.set()
            lease.release()


def take_a_step(cache: AdapterCache, lease: Lease) -> None:
    with cache.lora_batch([(lease, 1)]) as batch:
        x = torch.ones(1, 32, device=batch.stack.device)
        add_lora(torch.zeros_like(x), x, batch, ("q_proj",), 0)
