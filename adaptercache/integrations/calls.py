"""The calls of a model with adapters: what they hold, and the step that each is in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TypeAlias

import torch

from adaptercache.cache import AdapterCache
from adaptercache.errors import AdapterUnsupported
from adaptercache.identity import check_id
from adaptercache.integrations.held import held, launching
from adaptercache.integrations.projections import Running, Step
from adaptercache.kernels import LoraBatch
from adaptercache.lease import Lease

__all__ = ["Adapters", "Calls"]

Adapters: TypeAlias = "str | Sequence[str | None] | None"


class _Generating(threading.local):
    leases: list[Lease] | None = None


class Calls:
    """Thread-safe: each thread is in a call of its own.

    Args:
        cache: where the adapters are.
        timeout_s: how long a call waits for them; None: until they are there.
    """

    def __init__(self, cache: AdapterCache, timeout_s: float | None) -> None:
        self.running = Running()
        self._cache = cache
        self._timeout_s = timeout_s
        self._generating = _Generating()
        self._number = 0
        self._counting = threading.Lock()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """None starts meanwhile.

        Raises:
            RuntimeError: one is running.
        """
        with self._counting:
            if self._number:
                raise RuntimeError("a call with adapters is running on this model")
            yield

    @property
    def generating(self) -> list[Lease] | None:
        """The leases of the rows that this thread is in `generate` with."""
        return self._generating.leases

    @contextmanager
    def leases(self, adapters: Adapters, rows: int) -> Iterator[list[Lease]]:
        """One a row, held and ready."""
        ids = _ids(adapters, rows)
        with self._counting:
            self._number += 1
        try:
            with held(self._cache, ids, self._timeout_s) as leases:
                yield leases
        finally:
            with self._counting:
                self._number -= 1

    @contextmanager
    def generation(self, leases: list[Lease] | None) -> Iterator[None]:
        """Forwards of this thread use these, unless they are told otherwise."""
        outer, self._generating.leases = self._generating.leases, leases
        try:
            yield
        finally:
            self._generating.leases = outer

    @contextmanager
    def step(self, leases: Sequence[Lease], shape: tuple[int, int]) -> Iterator[None]:
        """One forward over ``shape`` of rows and tokens; a lease's rows lie side by side."""
        rows, _ = shape
        times, rest = divmod(rows, len(leases))
        if rest or not times:
            raise ValueError(
                f"a forward of {rows} rows inside generate with {len(leases)} adapters"
            )
        outer = self.running.step
        if all(lease.adapter_id is None for lease in leases):
            self.running.step = None
            try:
                yield
            finally:
                self.running.step = outer
            return
        if torch.is_autocast_enabled(self._cache._gpu.device.type):
            raise AdapterUnsupported(
                "autocast where adapters are used", remedy="load the model in the dtype to run in"
            )
        lock = launching(self._cache)
        counts = [(lease, times * sum(1 for _ in same)) for lease, same in groupby(leases)]
        with ExitStack() as stack, torch.no_grad():

            def new_batch(tokens: int) -> LoraBatch:
                pairs = [(lease, count * tokens) for lease, count in counts]
                with lock, torch.inference_mode(False):  # see `Projection`
                    return stack.enter_context(self._cache.lora_batch(pairs))

            step = self.running.step = Step(shape, new_batch, lock)
            try:
                yield
            finally:
                self.running.step = outer
            step.end()


def _ids(adapters: Adapters, rows: int) -> list[str | None]:
    """The adapter id of each row.

    Raises:
        TypeError: something else than one id, or a list of them.
        ValueError: another number of them than there are rows.
    """
    if adapters is None or isinstance(adapters, str):
        return [adapters] * rows
    ids = [check_id(adapter_id) for adapter_id in adapters]
    if len(ids) != rows:
        raise ValueError(f"{len(ids)} adapters for a batch of {rows} rows: give one a row")
    return ids
