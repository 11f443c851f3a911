"""A cache small enough to fill, and ways to look into it: shared by tests (the fixture `tiny`)
and by the programs that they start."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adaptercache import AdapterCache, KVLayout, LoraLayout
from adaptercache.testing import FakeSource, any_device, random_adapter

BASE_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
PAGE_BYTES = 2 * 2048  # two rows of one KV block


class Tiny:
    """A cache of few pages. An adapter of `tensors` takes 4 pages and 16 KiB of blocks."""

    layout = LoraLayout.from_config(BASE_CONFIG, max_rank=16, dtype="float32")
    kv = KVLayout(block_size=16, kv_heads=1, head_dim=16, dtype="float32")

    @staticmethod
    def tensors(seed: int, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        options = {"rank": 4, "dtype": torch.float32} | options
        return random_adapter(Tiny.layout.base, seed=seed, **options)

    @staticmethod
    def source(*adapter_ids: str) -> FakeSource:
        """A source of adapters that all differ."""
        source = FakeSource()
        for seed, adapter_id in enumerate(adapter_ids):
            source.put(adapter_id, *Tiny.tensors(seed))
        return source

    @staticmethod
    def cache(source: Any = None, *, pages: int = 32, **options: Any) -> AdapterCache:
        options = {
            "gpu_slots": 3,
            "host_bytes": 1 << 20,
            "host_block_bytes": 4096,
            "device": any_device(),
            "kv": Tiny.kv,
        } | options
        return AdapterCache(Tiny.layout, source, gpu_bytes=pages * PAGE_BYTES, **options)

    @staticmethod
    def load(cache: AdapterCache, *adapter_ids: str) -> None:
        """Bring these to the GPU, one after the other, and let them go."""
        for adapter_id in adapter_ids:
            cache.acquire(adapter_id).result(10).release()

    @staticmethod
    def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Whether it came true in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    @staticmethod
    def idle(cache: AdapterCache) -> bool:
        """Whether nothing moves and nothing is queued to move."""
        stats = cache.stats()
        return not stats.in_flight_loads and not any(stats.queue_depth.values())

    @staticmethod
    def files(folder: Path) -> list[Path]:
        """All files under it. (`Path.glob` raises where a folder goes while it looks.)"""
        return [Path(inside, name) for inside, _, names in os.walk(folder) for name in names]

    @staticmethod
    def ends(act: Callable[[], Any], timeout_s: float = 5.0) -> bool:
        """Whether ``act`` ends in time, in a thread of its own."""
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()
