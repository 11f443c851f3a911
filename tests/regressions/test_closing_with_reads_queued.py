"""Reads that were queued when the cache closed were counted as broken copies on disk."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from adaptercache import Tier
from adaptercache.tiers.disk import DiskTier


def test_closing_with_reads_queued_evicts_nothing_from_disk(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, evicted = threading.Event(), []
    read_into = DiskTier.read_into

    def read_slowly(*args: Any) -> None:
        go_on.wait(10)
        read_into(*args)

    monkeypatch.setattr(DiskTier, "read_into", read_slowly)
    ids = [f"a{n}" for n in range(4)]
    cache = tiny.cache(
        tiny.source(*ids), gpu_slots=4, on_evict=lambda tier, digest: evicted.append(tier)
    )
    leases = [cache.acquire(adapter_id) for adapter_id in ids]
    assert tiny.wait_until(lambda: cache.stats().queue_depth["disk->host"] == 2)
    threading.Timer(0.1, go_on.set).start()
    cache.close()
    del leases
    assert Tier.DISK not in evicted
