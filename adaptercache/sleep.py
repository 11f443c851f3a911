"""Give the GPU's memory back for a while, for another job on the card, and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from adaptercache.assembly import Parts
from adaptercache.errors import AdapterCacheError, CacheClosed
from adaptercache.lease import Lease
from adaptercache.ledger import Ledger
from adaptercache.movers import Hop
from adaptercache.pages import Owner
from adaptercache.snapshot import resident_ids
from adaptercache.stats import Tier

__all__ = ["fall_asleep", "wake_up"]

POLL_S = 0.001


def fall_asleep(parts: Parts) -> None:
    """Forget what is on the GPU, but for its ids, and free the arena.

    Waits for copies that are under way. Raises AdapterCacheError where something is held.
    """
    with _alone(parts):
        with parts.deciding:
            parts.deciding.check_open()
            _check_unused(parts.ledger)
            parts.asleep.update(resident_ids(parts.ledger, Tier.GPU))  # an interrupt loses none
            parts.ledger.gpu_up = False
            is_clear = _clear(parts.ledger)
        while not is_clear:
            time.sleep(POLL_S)
            with parts.deciding:
                is_clear = _clear(parts.ledger)
        parts.gpu.drop()


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


def wake_up(parts: Parts) -> None:
    """Allocate the arena again, and load what was there as far as it is still known and finds room
    beside what was asked for meanwhile. Waits for that, and for nothing else."""
    with _alone(parts):
        _wake_up(parts)
        parts.asleep.clear()


def _wake_up(parts: Parts) -> None:
    with parts.deciding.lock:
        parts.deciding.check_open()
    parts.gpu.restore()
    with parts.deciding:
        if parts.deciding.closed:  # meanwhile, and perhaps it found nothing to free
            parts.gpu.drop()
            raise CacheClosed()
        parts.ledger.gpu_up = True
        known = [adapter_id for adapter_id in parts.asleep if parts.ledger.catalog.get(adapter_id)]
        if parts.ledger.gpu.follows:  # rank 0 brings them back
            known = []
    leases = [parts.leasing.acquire(adapter_id) for adapter_id in known]
    waiting = leases
    while waiting:
        with parts.deciding.lock:  # what doesn't move waits for somebody's release
            waiting = [each for each in waiting if not each.ready and _is_moving(parts, each)]
        time.sleep(POLL_S if waiting else 0)
    for lease in leases:
        lease.release()


def _is_moving(parts: Parts, lease: Lease) -> bool:
    adapter_id = lease.adapter_id
    assert adapter_id is not None
    known = parts.ledger.catalog.get(adapter_id)
    if known is None or parts.ledger.lacks(adapter_id):
        return parts.movers.has(Hop.FETCH, adapter_id) or parts.ledger.lacks(adapter_id)
    return any(parts.movers.has(hop, known.digest) for hop in (Hop.READ, Hop.COPY))
