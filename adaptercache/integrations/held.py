"""Leases on all the adapters of one batch of rows: all of them, or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from weakref import WeakKeyDictionary

from adaptercache.cache import AdapterCache
from adaptercache.errors import CapacityError
from adaptercache.lease import Lease
from adaptercache.snapshot import gpu_demand

__all__ = ["held", "launching"]

_LOOK_AGAIN_S = 0.2  # how soon it shows that a batch can never fit


class _Turns:
    """The locks of one cache: who waits for a set of leases, and who launches. ``outer``: what
    this thread's calls hold in which others are made, by a hook, say."""

    def __init__(self) -> None:
        self.waiting = threading.Lock()
        self.launching = threading.Lock()
        self._held = threading.local()

    @property
    def outer(self) -> list[tuple[str, ...]]:
        if not hasattr(self._held, "calls"):
            self._held.calls = []
        calls: list[tuple[str, ...]] = self._held.calls
        return calls


_turns: WeakKeyDictionary[AdapterCache, _Turns] = WeakKeyDictionary()
_turns_lock = threading.Lock()


def _turns_of(cache: AdapterCache) -> _Turns:
    with _turns_lock:
        return _turns.setdefault(cache, _Turns())


def launching(cache: AdapterCache) -> threading.Lock:
    """Held while a batch is laid out and while a group's kernels are launched: scratch and work
    buffers are one stream's, and several threads may run the model."""
    return _turns_of(cache).launching


@contextmanager
def held(
    cache: AdapterCache, adapter_ids: Sequence[str | None], timeout_s: float | None
) -> Iterator[list[Lease]]:
    """Leases in the order of ``adapter_ids``, each adapter leased once, all ready.

    Two batches that each hold what the other waits for would wait for ever. So a batch takes what
    is ready all at once, and only one at a time holds some while it waits for the rest.

    Raises:
        AdapterCacheError: an adapter that fails, with its own error; `CapacityError` if they can
            never be on the GPU together.
        TimeoutError: it took longer than ``timeout_s``.
    """
    distinct = tuple(dict.fromkeys(found for found in adapter_ids if found is not None))
    outer = _turns_of(cache).outer
    _check_room(cache, distinct)
    leases = {adapter_id: cache.acquire(adapter_id) for adapter_id in distinct}
    try:
        if not all(lease.ready for lease in leases.values()):
            _release(leases)
            cache.prefetch(distinct)  # so that they come up while another batch has its turn
            _wait_in_turn(cache, leases, timeout_s)
        for lease in leases.values():
            lease.result()
        base = cache.acquire(None)
        outer.append(distinct)
        try:
            yield [base if found is None else leases[found] for found in adapter_ids]
        finally:
            outer.pop()
    finally:
        _release(leases)


def _wait_in_turn(cache: AdapterCache, leases: dict[str, Lease], timeout_s: float | None) -> None:
    """Fill ``leases`` anew, and wait for them all."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    turn = _turns_of(cache).waiting
    if not turn.acquire(timeout=-1 if timeout_s is None else timeout_s):
        raise TimeoutError(f"another batch has been waiting for its adapters for {timeout_s} s")
    try:
        for adapter_id in leases:
            leases[adapter_id] = cache.acquire(adapter_id)
        for lease in leases.values():
            _wait(cache, lease, tuple(leases), deadline)
    finally:
        turn.release()


def _wait(
    cache: AdapterCache, lease: Lease, adapter_ids: Collection[str], deadline: float | None
) -> None:
    while True:
        left = _LOOK_AGAIN_S if deadline is None else deadline - time.monotonic()
        try:
            lease.result(max(0.0, min(left, _LOOK_AGAIN_S)))
            return
        except TimeoutError:
            _check_room(cache, adapter_ids)
            if deadline is not None and time.monotonic() >= deadline:
                raise


def _check_room(cache: AdapterCache, adapter_ids: Collection[str]) -> None:
    """Refuse what would wait for ever: beside what this thread holds already, too. Adapters not
    fetched yet count once they are."""
    adapter_ids = {*adapter_ids, *chain.from_iterable(_turns_of(cache).outer)}
    with cache._deciding.lock:
        demand = gpu_demand(cache._ledger, adapter_ids)
    for unit, (needed, limit) in demand.items():
        if needed > limit:
            raise CapacityError(
                f"one batch of {len(adapter_ids)} adapters does not fit the GPU at once: send "
                "fewer in a batch, or raise gpu_slots and gpu_bytes",
                needed=needed,
                limit=limit,
                unit=unit,
            )


def _release(leases: Mapping[str, Lease]) -> None:
    for lease in leases.values():
        lease.release()
