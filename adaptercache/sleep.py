"""Give the GPU's memory back for a while, for another job on the card, and come back."""

from __future__ import annotations

import time
from collections.abc import Iterable

from adaptercache.assembly import Parts

__all__ = ["fall_asleep", "wake_up"]


def fall_asleep(parts: Parts) -> frozenset[str]:
    """Forget what is on the GPU and free the arena; returns the ids that were there.

    Waits for copies that are under way. Raises AdapterCacheError where something is held.
    """
    with parts.deciding:
        parts.deciding.check_open()
        were_there = parts.ledger.put_gpu_to_sleep()
        is_clear = parts.ledger.clear_gpu()
    while not is_clear:
        time.sleep(0.001)
        with parts.deciding:
            is_clear = parts.ledger.clear_gpu()
    parts.gpu.drop()
    return were_there


def wake_up(parts: Parts, adapter_ids: Iterable[str]) -> None:
    """Allocate the arena again, load these adapters, and wait for them."""
    parts.gpu.restore()
    with parts.deciding:
        parts.deciding.check_open()
        parts.ledger.gpu_up = True
    for lease in [parts.leasing.acquire(adapter_id) for adapter_id in adapter_ids]:
        with lease:
            pass
