"""Copies of adapters into scattered cells, beside plain copies, other ways, and vLLM's way."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from adaptercache.kernels.cells import lay_into_cells
from adaptercache.tiers import staging
from load_world import ATTENTION, DEVICE, ON_GPU, LoadWorld, Mark, rates, wait_for_gpu

TIMES = 25 if ON_GPU else 3


def copies(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """The targets: one of 80 MiB, eight in a row, one of 13 MiB."""
    large = [world.rest(16) for _ in range(8)]
    small = [world.rest(8, ATTENTION) for _ in range(2)]
    target = torch.empty(large[0].nbytes, dtype=torch.uint8, device=DEVICE)
    cases = {
        "one, rank 16 all-linear": (large[:1], 0.95),
        "8 in a row, rank 16 all-linear": (large, 0.97),
        "one, rank 8 q k v o": (small[:1], 0.85),
    }
    for name, (adapters, least) in cases.items():
        world.time_loads(adapters)
        for slot, adapter in enumerate(adapters):
            world.check(slot, adapter)
        ours, plain = [], []
        for _ in range(TIMES):
            plain.append(world.time_plain(adapters, target))
            ours.append(world.time_loads(adapters))
        nbytes = sum(adapter.nbytes for adapter in adapters)
        yield name, {"nbytes": nbytes, **rates(nbytes, ours, plain), "least_share": least}


def variants(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """Sizes of chunks and rings, and torch's own scatter, on the adapter of 80 MiB."""
    adapter = [world.rest(16)]
    target = torch.empty(adapter[0].nbytes, dtype=torch.uint8, device=DEVICE)
    before = staging.CHUNK_BYTES, staging.FIRST_BYTES, staging.RING
    mib = 1 << 20
    tried = [
        *itertools.product((4, 8, 16), (2, 4, 8), (3,), ("kernel",)),
        *((8, 4, ring, "kernel") for ring in (2, 4)),
        (8, 4, 3, "index_copy_"),
        (16, 8, 3, "index_copy_"),
    ]
    try:
        for chunk, first, ring, how in tried:
            if first > chunk:
                continue
            staging.CHUNK_BYTES, staging.FIRST_BYTES, staging.RING = chunk * mib, first * mib, ring
            lay = lay_into_cells if how == "kernel" else _index_copy
            stack = world.tier.stack
            world.tier._memory = stack, staging.Staging(stack, lay)
            wait_for_gpu()
            world.time_loads(adapter)
            plain = [world.time_plain(adapter, target) for _ in range(8)]
            ours = [world.time_loads(adapter) for _ in range(12)]
            name = f"chunks {chunk} MiB, first {first}, ring {ring}, {how}"
            yield name, rates(adapter[0].nbytes, ours, plain)
    finally:
        staging.CHUNK_BYTES, staging.FIRST_BYTES, staging.RING = before
        world.tier._memory = world.tier.stack, staging.Staging(world.tier.stack)


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
    """Page-locking in the background, and the longest that a launch took meanwhile."""
    import time

    from adaptercache.tiers.host import SLAB_BYTES, HostTier

    x = torch.zeros(1, device=DEVICE)

    def longest(seconds: float, until: float | None, tier: HostTier | None) -> tuple[float, float]:
        most, start = 0.0, time.perf_counter()
        while True:
            before = time.perf_counter()
            x.add_(1)
            Mark().wait()
            most = max(most, time.perf_counter() - before)
            if tier is not None and until is not None and tier.taken_bytes >= until:
                break
            if time.perf_counter() - start > seconds:
                break
        return most, time.perf_counter() - start

    alone, _ = longest(0.3, None, None)
    slabs = 8 if ON_GPU else 2
    tier = HostTier(slabs * SLAB_BYTES // (2 << 20), 2 << 20, pinned=ON_GPU, ahead=slabs)
    beside, took = longest(30, slabs * SLAB_BYTES, tier)
    tier.close()
    yield (
        f"page-locking {slabs} slabs",
        {
            "seconds_a_GiB": round(took / (slabs * SLAB_BYTES / 2**30), 3),
            "longest_launch_us": round(beside * 1e6, 1),
            "longest_launch_alone_us": round(alone * 1e6, 1),
        },
    )
