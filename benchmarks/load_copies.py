"""Copies of adapters into scattered cells, beside plain copies, other ways, and vLLM's way."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from adaptercache.tiers import staging, ways
from load_world import ATTENTION, DEVICE, ON_GPU, LoadWorld, Mark, rates

TIMES = 25 if ON_GPU else 3


def copies(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """The targets: one of 80 MiB, eight in a row, one of 13 MiB; in both ways."""
    large = [world.rest(16) for _ in range(8)]
    small = [world.rest(8, ATTENTION) for _ in range(2)]
    target = torch.empty(large[0].nbytes, dtype=torch.uint8, device=DEVICE)
    cases = {
        "one, rank 16 all-linear": (large[:1], 0.95),
        "8 in a row, rank 16 all-linear": (large, 0.97),
        "one, rank 8 q k v o": (small[:1], 0.85),
    }
    for way, name in itertools.product((ways.Strided, ways.Staged), cases):
        adapters, least = cases[name]
        world.take(way(world.tier.streams, world.tier.stack))
        world.time_loads(adapters)
        for slot, adapter in enumerate(adapters):
            world.check(slot, adapter)
        ours, plain, idle, plain_idle, host = [], [], [], [], []
        for _ in range(TIMES):
            plain.append(world.time_plain(adapters, target, ahead=True))
            ours.append(world.time_loads(adapters, ahead=True))
            plain_idle.append(world.time_plain(adapters, target))
            idle.append(world.time_loads(adapters))
            host.append(world.queued_us)
        nbytes = sum(adapter.nbytes for adapter in adapters)
        figures = {"nbytes": nbytes, **rates(nbytes, ours, plain)}
        if way is ways.Staged:  # how demand is loaded
            figures["least_share"] = least
        figures["host_us"] = round(statistics.median(host), 1)
        figures["with_host_us"] = round(statistics.median(idle), 1)
        figures["with_host_reference_us"] = round(statistics.median(plain_idle), 1)
        yield f"{way.__name__.lower()}: {name}", figures


def variants(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """Sizes of chunks and rings, and torch's own scatter; the adapter of 80 MiB."""
    adapter = [world.rest(16)]
    target = torch.empty(adapter[0].nbytes, dtype=torch.uint8, device=DEVICE)
    before = ways.STAGED_BYTES, ways.STRIDED_BYTES, ways.FIRST_BYTES, staging.RING
    streams, stack, mib = world.tier.streams, world.tier.stack, 1 << 20

    def staged(chunk: int, first: int, ring: int, how: str) -> ways.Way:
        ways.STAGED_BYTES, ways.FIRST_BYTES, staging.RING = chunk * mib, first * mib, ring
        way = ways.Staged(streams, stack)
        if how == "index_copy_":
            way.staging._lay = _index_copy
        return way

    def strided(chunk: int, first: int, count: int, how: str) -> ways.Way:
        ways.STRIDED_BYTES, ways.FIRST_BYTES = chunk * mib, first * mib
        return ways.Strided(streams, stack)

    tried: list[tuple[Callable[[int, int, int, str], ways.Way], int, int, int, str]] = [
        (strided, 8, 4, 1, ""),
        (strided, 32, 4, 1, ""),
        *((staged, chunk, first, 3, "kernel") for chunk in (8, 16) for first in (2, 4, 8)),
        *((staged, 16, 4, ring, "kernel") for ring in (2, 4)),
        (staged, 16, 4, 3, "index_copy_"),
    ]
    try:
        for make, chunk, first, count, how in tried:
            world.take(make(chunk, first, count, how))
            world.time_loads(adapter)
            plain = [world.time_plain(adapter, target, ahead=True) for _ in range(8)]
            ours = [world.time_loads(adapter, ahead=True) for _ in range(12)]
            figures = rates(adapter[0].nbytes, ours, plain) | {"host_us": round(world.queued_us, 1)}
            name = f"{make.__name__}: chunks {chunk} MiB, first {first}, ring {count}, {how}"
            yield name, figures
    finally:
        ways.STAGED_BYTES, ways.STRIDED_BYTES, ways.FIRST_BYTES, staging.RING = before


def _index_copy(arena: Tensor, chunk: Tensor, pages: Tensor) -> None:
    arena.index_copy_(1, pages.long(), chunk.transpose(0, 1))


def one_copy_a_tensor(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """As vLLM 0.33 loads: each matrix pinned by itself, into dense slots of the maximum rank."""
    reference = [world.rest(16)]
    target = torch.empty(reference[0].nbytes, dtype=torch.uint8, device=DEVICE)
    for max_rank in (16, 64):
        matrices = [
            (torch.randn(16, site.in_features), torch.randn(site.out_features, 16))
            for site in world.layout.sites
        ]
        pinned = [tuple(_pin(m.bfloat16()) for m in pair) for pair in matrices]
        slots = [
            (
                torch.zeros(2, 1, max_rank, site.in_features, dtype=torch.bfloat16, device=DEVICE),
                torch.zeros(2, 1, site.out_features, max_rank, dtype=torch.bfloat16, device=DEVICE),
            )
            for site in world.layout.sites
        ]

        def load(
            slots: list[tuple[Tensor, Tensor]] = slots,
            pinned: list[tuple[Tensor, ...]] = pinned,
        ) -> float:
            start = Mark()
            for (a_slots, b_slots), (a, b) in zip(slots, pinned, strict=True):
                a_slots[0] = 0
                b_slots[0] = 0
                a_slots[0, 0, : a.shape[0], : a.shape[1]].copy_(a, non_blocking=True)
                b_slots[0, 0, : b.shape[0], : b.shape[1]].copy_(b, non_blocking=True)
            end = Mark()
            end.wait()
            return start.us_to(end)

        load()
        theirs = [load() for _ in range(7)]
        plain = [world.time_plain(reference, target) for _ in range(7)]
        ours = [world.time_loads(reference) for _ in range(7)]
        figures = rates(reference[0].nbytes, theirs, plain)
        figures |= {"copies": 2 * len(slots), "ours_us": round(statistics.median(ours), 1)}
        yield f"one copy a tensor, slots of rank {max_rank}", figures


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if ON_GPU else tensor


def growth(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """Page-locking a GiB in the background, and how long launches took meanwhile."""
    from load_growth import in_slabs, through_register  # ways of page-locking

    x = torch.zeros(1, device=DEVICE)
    some = 1 << 30 if ON_GPU else 8 << 20

    def launches(until: Callable[[], bool]) -> list[float]:
        durations = []
        while not until():
            before = time.perf_counter()
            x.add_(1)
            Mark().wait()
            durations.append((time.perf_counter() - before) * 1e6)
        return durations

    for _ in range(100):  # the first ones load the kernel
        x.add_(1)
    Mark().wait()
    end = time.perf_counter() + 0.3
    alone = launches(lambda: time.perf_counter() > end)
    tried: list[tuple[str, Callable[[], object]]] = [
        *((f"slabs of {n} MiB", partial(in_slabs, some, n << 20)) for n in (8, 32, 128)),
        *((f"registered by {n} MiB", partial(through_register, some, n << 20)) for n in (8, 32)),
    ]
    for name, lock in tried:
        thread = threading.Thread(target=lock)
        start = time.perf_counter()
        thread.start()
        beside = launches(lambda thread=thread: not thread.is_alive())  # type: ignore[misc]
        took = time.perf_counter() - start
        thread.join()
        if not beside:
            continue  # it was over at once
        figures: dict[str, object] = {"seconds_a_GiB": round(took / (some / 2**30), 3)}
        for what, durations in (("alone", alone), ("beside", beside)):
            ordered = sorted(durations)
            figures[f"{what}_us"] = round(statistics.median(ordered), 1)
            figures[f"{what}_p99_us"] = round(ordered[int(len(ordered) * 0.99)], 1)
            figures[f"{what}_longest_us"] = round(ordered[-1], 1)
        yield f"page-locking, {name}", figures
