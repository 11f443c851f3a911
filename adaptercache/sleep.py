"""Give the GPU's memory back for a while, for another job on the card, and come back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from adaptercache.assembly import Parts
from adaptercache.errors import AdapterCacheError, CacheClosed
from adaptercache.ledger import Ledger
from adaptercache.pages import Owner
from adaptercache.snapshot import resident_ids
from adaptercache.stats import Tier

__all__ = ["fall_asleep", "wake_up"]

POLL_S = 0.001


def fall_asleep(parts: Parts) -> frozenset[str]:
    """Forget what is on the GPU and free the arena; returns the ids that were there.

    Waits for copies that are under way. Raises AdapterCacheError where something is held.
    """
    with _alone(parts):
        with parts.deciding:
            parts.deciding.check_open()
            were_there = resident_ids(parts.ledger, Tier.GPU)
            _check_unused(parts.ledger)
            parts.ledger.gpu_up = False
            is_clear = _clear(parts.ledger)
        while not is_clear:
            time.sleep(POLL_S)
            with parts.deciding:
                is_clear = _clear(parts.ledger)
        parts.gpu.drop()
    return were_there


@contextmanager
def _alone(parts: Parts) -> Iterator[None]:
    """Refuses the other one, or the same again, rather than have it wait: it may be called by a
    hook, which this one runs."""
    if not parts.resizing.acquire(blocking=False):
        raise AdapterCacheError("drop_gpu or restore is under way: call it when that has returned")
    try:
        yield
    finally:
        parts.resizing.release()


def _check_unused(ledger: Ledger) -> None:
    leased = sum(1 for copy in ledger.gpu if copy.leases)
    kv_pages = ledger.gpu.pages.count(Owner.KV)
    if leased or kv_pages:
        raise AdapterCacheError(
            f"the GPU is in use: {leased} adapters are leased, {kv_pages} KV pages allocated"
        )


def _clear(ledger: Ledger) -> bool:
    """Forget what is on the GPU; False while a load is still on its way there."""
    for copy in list(ledger.gpu.coldest()):
        ledger.evict(Tier.GPU, copy.digest, "dropped")
    return len(ledger.gpu) == 0


def wake_up(parts: Parts, adapter_ids: Iterable[str]) -> None:
    """Allocate the arena again, and load these adapters as far as they are still known and find
    room beside those that were asked for meanwhile. Waits for that."""
    with _alone(parts):
        _wake_up(parts, adapter_ids)


def _wake_up(parts: Parts, adapter_ids: Iterable[str]) -> None:
    with parts.deciding.lock:
        parts.deciding.check_open()
    parts.gpu.restore()
    with parts.deciding:
        if parts.deciding.closed:  # meanwhile, and perhaps it found nothing to free
            parts.gpu.drop()
            raise CacheClosed()
        parts.ledger.gpu_up = True
        known = [adapter_id for adapter_id in adapter_ids if parts.ledger.catalog.get(adapter_id)]
        if parts.ledger.gpu.follows:  # rank 0 brings them back
            known = []
    leases = [parts.leasing.acquire(adapter_id) for adapter_id in known]
    while not all(lease.ready for lease in leases):
        time.sleep(POLL_S)
        with parts.deciding.lock:
            if parts.movers.are_idle:  # what is not here by now waits for somebody's release
                break
    for lease in leases:
        lease.release()
