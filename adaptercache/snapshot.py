"""The cache's numbers at one moment, out of its ledger and its movers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from adaptercache.ledger import Ledger
from adaptercache.movers import Hop, Movers
from adaptercache.pages import Owner
from adaptercache.residency import Residency, State
from adaptercache.stats import Stats, Tier

__all__ = ["gpu_demand", "resident_ids", "snapshot"]


def snapshot(ledger: Ledger, movers: Movers) -> Stats:
    """A frozen `Stats`. Call with the cache's lock held; the number of adapters doesn't matter."""
    counters, gpu, host, disk = ledger.counters, ledger.gpu, ledger.host, ledger.disk
    page = gpu.shape.rows * gpu.shape.page_bytes
    block = host.block_bytes
    return Stats(
        requests=dict(counters.requests),
        loads=dict(counters.loads),
        load_bytes=dict(counters.load_bytes),
        load_seconds={hop: h.snapshot() for hop, h in counters.load_seconds.items()},
        ready_seconds={tier: h.snapshot() for tier, h in counters.ready_seconds.items()},
        evictions=dict(counters.evictions),
        deferred=dict(counters.deferred),
        errors=dict(counters.errors),
        prefetch_wasted=counters.prefetch_wasted,
        resident_adapters={
            Tier.GPU: gpu.num_resident,
            Tier.HOST: host.num_resident,
            Tier.DISK: disk.num_resident,
        },
        resident_bytes={
            Tier.GPU: gpu.used * page,
            Tier.HOST: host.used * block,
            Tier.DISK: disk.used,
        },
        capacity_bytes={
            Tier.GPU: gpu.pages.num_pages * page,
            Tier.HOST: host.blocks.num_blocks * block,
            Tier.DISK: ledger.disk.num_bytes,
        },
        pages={
            "adapter": gpu.pages.count(Owner.ADAPTER),
            "kv": gpu.pages.count(Owner.KV),
            "free": gpu.pages.num_free,
        },
        slots={"used": gpu.slots.num_pages - gpu.slots.num_free, "free": gpu.slots.num_free},
        leases=gpu.num_leases,
        in_flight_loads=movers.running,
        queue_depth={hop.label: movers.queued(hop) for hop in Hop},
    )


def resident_ids(
    ledger: Ledger, tier: Tier, *, coming: bool = False, most: int | None = None
) -> frozenset[str]:
    """The ids whose content is whole in a tier, or on its way there; of the ``most`` copies that
    came last. Call with the cache's lock held."""
    tiers: dict[Tier, Residency[Any]]
    tiers = {Tier.GPU: ledger.gpu, Tier.HOST: ledger.host, Tier.DISK: ledger.disk}
    if tier not in tiers:
        raise ValueError(f"tier={tier!r}: Tier.GPU, Tier.HOST or Tier.DISK")
    if most is not None and most < 0:
        raise ValueError(f"{most=}: give 0 or more, or None")
    state = State.LOADING if coming else State.RESIDENT
    copies = [copy for copy in islice(reversed(tiers[tier]), most) if copy.state is state]
    return frozenset(chain.from_iterable(ledger.catalog.ids_of(copy.digest) for copy in copies))


def gpu_demand(ledger: Ledger, adapter_ids: Iterable[str]) -> dict[str, tuple[int, int]]:
    """What these adapters take on the GPU together, and the most that there can be, by unit.

    ``{"slots": (needed, limit), "pages": (needed, limit)}``, of those whose content is known. Call
    with the cache's lock held.
    """
    gpu = ledger.gpu
    found = [ledger.catalog.get(adapter_id) for adapter_id in adapter_ids]
    # By content: two ids of one content share a copy.
    pages = {known.digest: gpu.shape.pages_for(known.elements) for known in found if known}
    return {
        "slots": (len(pages), gpu.slots.num_pages),
        "pages": (sum(pages.values()), gpu.adapter_limit),
    }
