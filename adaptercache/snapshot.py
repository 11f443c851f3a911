"""The cache's numbers at one moment, out of its ledger and its movers."""

from __future__ import annotations

from typing import Any

from adaptercache.ledger import Ledger
from adaptercache.movers import Hop, Movers
from adaptercache.pages import Owner
from adaptercache.residency import Residency, State
from adaptercache.stats import Stats, Tier

__all__ = ["snapshot"]


def snapshot(ledger: Ledger, movers: Movers) -> Stats:
    """A frozen `Stats`. Call with the cache's lock held; costs what the tables' sizes cost."""
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
            Tier.GPU: _resident(gpu),
            Tier.HOST: _resident(host),
            Tier.DISK: _resident(disk),
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
        leases=sum(copy.leases for copy in gpu),
        in_flight_loads=movers.running,
        queue_depth={hop.label: movers.queued(hop) for hop in Hop},
    )


def _resident(residency: Residency[Any]) -> int:
    return sum(copy.state is State.RESIDENT for copy in residency)
