"""How the parts of a cache are wired together."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from adaptercache.arena import DiskShelf, GpuArena, HostArena
from adaptercache.checkpoint import ReadOptions
from adaptercache.deciding import Deciding
from adaptercache.disk_room import DiskRoom
from adaptercache.errors import CacheClosed, CapacityError
from adaptercache.fetch import Fetcher
from adaptercache.kv import KVPages
from adaptercache.layout import ArenaShape, KVLayout, LoraLayout
from adaptercache.leasing import Leasing
from adaptercache.ledger import Ledger
from adaptercache.lifts import Lifts
from adaptercache.movers import Hop, Movers
from adaptercache.policy import new_policy
from adaptercache.prefetch import Lifter
from adaptercache.tiers.disk import DiskTier
from adaptercache.tiers.gpu import GpuTier
from adaptercache.tiers.host import HostTier
from adaptercache.tiers.memory import free_bytes
from adaptercache.tiers.remote import Source, TensorSource, open_source

__all__ = ["Budgets", "Parts", "assemble"]

# Copies: two that are queued one behind the other keep the link busy, and a third is for whoever
# comes meanwhile. Their threads sleep.
THREADS = {Hop.FETCH: 16, Hop.READ: 2, Hop.COPY: 3}


@dataclass(frozen=True, slots=True)
class Budgets:
    """What each tier may take; see `AdapterCache`."""

    gpu_bytes: int | float
    gpu_slots: int
    host_bytes: int
    host_block_bytes: int
    disk_bytes: int
    allow_pageable: bool = False

    def gpu_bytes_on(self, device: torch.device) -> int:
        """Bytes of the arena; a share is one of what is free now."""
        if isinstance(self.gpu_bytes, int):
            return self.gpu_bytes
        return int(self.gpu_bytes * free_bytes(device))


@dataclass(frozen=True, slots=True)
class Parts:
    """A cache, taken apart. Each part knows only those above it."""

    ledger: Ledger
    deciding: Deciding
    disk: DiskTier
    host: HostTier
    gpu: GpuTier
    puts: TensorSource
    lifts: Lifts
    movers: Movers
    lifter: Lifter
    leasing: Leasing
    pages: KVPages
    ends: deque[Callable[[], None]]
    """What closing is yet to do, in order; each may be done again where it was interrupted."""
    closing: threading.Lock = field(default_factory=threading.Lock)
    resizing: threading.Lock = field(default_factory=threading.Lock)
    """Held while the GPU's memory is given back, or taken."""
    asleep: set[str] = field(default_factory=set)
    """Ids that were on the GPU when its memory was given back."""

    def close(self) -> None:
        """End running loads, fail whoever waits, and free all, in that order. Idempotent: goes on
        where one that was interrupted has stopped, and leaves one that is under way alone."""
        if not self.closing.acquire(blocking=False):
            return
        try:
            with self.deciding:
                if not self.deciding.closed:
                    self.deciding.closed = True
                    for grant in self.ledger.waiting.grants():
                        self.ledger.fail(grant, CacheClosed())
                    self.lifter.close()
        finally:  # what is raised there is a hook's
            try:
                self._end()
            finally:
                self.closing.release()

    def _end(self) -> None:
        failures: list[Exception] = []
        while self.ends:
            try:
                self.ends[0]()
            except Exception as error:  # tried again it would fail again, and keep all the rest
                failures.append(error)
            self.ends.popleft()
        if failures:
            raise failures[0]


def assemble(
    layout: LoraLayout,
    source: str | os.PathLike[str] | Source | None,
    budgets: Budgets,
    kv: KVLayout | None,
    *,
    policy: str,
    disk_dir: str | os.PathLike[str] | None,
    device: torch.device,
    revision_ttl_s: float | None,
    read_options: ReadOptions,
    clock: Callable[[], float],
) -> Parts:
    """Build the tables, take the memory, and start the threads."""
    _check_layout(layout)
    _check(budgets)
    _check_device(device)
    _check_others(kv, read_options, disk_dir)
    _check_time(revision_ttl_s, clock)
    shape = ArenaShape.fit(layout, kv, budgets.gpu_bytes_on(device))
    num_blocks = budgets.host_bytes // budgets.host_block_bytes
    gpu = GpuTier(layout, shape, budgets.gpu_slots, device)  # first: it may find no memory
    ledger = Ledger(
        GpuArena.shared(shape, budgets.gpu_slots, layout, kv, lambda: new_policy(policy)),
        HostArena(num_blocks, budgets.host_block_bytes, lambda: new_policy(policy)),
        DiskShelf(budgets.disk_bytes),
        itemsize=layout.itemsize,
        clock=clock,
    )
    ledger.have_ended = gpu.streams.have_ended
    ledger.catalog.ttl_s = revision_ttl_s
    deciding = Deciding(ledger)
    remote = open_source(source) if source is not None else None
    puts = TensorSource()
    host = HostTier(
        num_blocks,
        budgets.host_block_bytes,
        pinned=device.type == "cuda",
        allow_pageable=budgets.allow_pageable,
    )
    with _ended_if_it_fails(host.close):
        disk = DiskTier(disk_dir, budgets.disk_bytes)
        room = DiskRoom(disk, ledger, deciding.lock)
        room.adopt()
    fetcher = Fetcher(remote, puts, disk, room, layout, read_options, clock)
    lifts = Lifts(ledger)
    movers = Movers(deciding.lock, THREADS, ended=deciding.go_on, tell=deciding.tell)
    lifter = Lifter(ledger, lifts, movers, fetcher, room, layout, disk, host, gpu)
    deciding.advance = lifter.advance
    leasing = Leasing(ledger, lifts, lifter, deciding)
    pages = KVPages(lifts, ledger.gpu.pages, deciding, lambda: gpu.streams.last_opened)
    ends: deque[Callable[[], None]] = deque(
        [gpu.streams.close, movers.close, leasing.close, deciding.tell, disk.close, gpu.drop]
    )
    ends.append(host.close)
    if remote is not source and (close := getattr(remote, "close", None)):  # made here, by name
        ends.append(close)
    return Parts(
        ledger, deciding, disk, host, gpu, puts, lifts, movers, lifter, leasing, pages, ends
    )


@contextmanager
def _ended_if_it_fails(end: Callable[[], None]) -> Iterator[None]:
    with ExitStack() as ending:
        ending.callback(end)
        yield
        ending.pop_all()


def _check_layout(layout: object) -> None:
    if not isinstance(layout, LoraLayout):
        raise TypeError(f"layout is a {type(layout).__name__}: make it with LoraLayout.from_config")


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: the arena is on cuda or on cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r}: torch sees {torch.cuda.device_count()} GPUs; device='cpu' "
            "runs everything without one"
        )


def _check_others(kv: object, read_options: object, disk_dir: Any) -> None:
    if not isinstance(kv, (KVLayout, type(None))):
        raise TypeError(f"kv is {kv!r:.80}: give a KVLayout, or None")
    if not isinstance(read_options, ReadOptions):
        raise TypeError(f"read_options is {read_options!r:.80}: give ReadOptions, or None")
    if disk_dir is not None and not os.fspath(disk_dir):
        raise ValueError("disk_dir is empty: give a directory, or None for a temporary one")


def _check_time(revision_ttl_s: Any, clock: Any) -> None:
    if revision_ttl_s is not None:
        if isinstance(revision_ttl_s, bool) or not isinstance(revision_ttl_s, (int, float)):
            raise TypeError(f"revision_ttl_s is {revision_ttl_s!r:.80}: give seconds, or None")
        if math.isnan(revision_ttl_s) or revision_ttl_s < 0:
            raise ValueError(f"revision_ttl_s is {revision_ttl_s}: give seconds, or None")
    if not callable(clock) or not isinstance(clock(), (int, float)):
        raise TypeError(f"clock is {clock!r:.80}: give a function that returns seconds")


def _check(budgets: Budgets) -> None:
    share = budgets.gpu_bytes
    if isinstance(share, float):
        if not 0 < share < 1:
            raise TypeError(f"gpu_bytes is {share!r}: give an int, or a share between 0 and 1")
    elif not isinstance(share, int):
        raise TypeError(f"gpu_bytes is {share!r}: give an int, or a share between 0 and 1")
    for name in ("gpu_slots", "host_bytes", "host_block_bytes", "disk_bytes"):
        if not isinstance(getattr(budgets, name), int):
            raise TypeError(f"{name} is {getattr(budgets, name)!r}: give an int")
    least = {
        "host_block_bytes": (budgets.host_block_bytes, 1, "bytes"),
        "gpu_slots": (budgets.gpu_slots, 1, "slots"),
        "host_bytes": (budgets.host_bytes, budgets.host_block_bytes, "bytes"),
        "disk_bytes": (budgets.disk_bytes, 1, "bytes"),
    }
    for name, (given, needed, unit) in least.items():
        if given < needed:
            raise CapacityError(f"{name} holds nothing", needed=needed, limit=given, unit=unit)
