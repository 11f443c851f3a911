"""How many adapters of one rank the tiers hold, and how long one takes to move."""

from __future__ import annotations

from dataclasses import dataclass

from adaptercache.cli.footprint import Footprint
from adaptercache.errors import CapacityError
from adaptercache.layout import ITEMSIZE, ArenaShape, KVLayout, LoraLayout
from adaptercache.packing import VectorSpec

__all__ = ["Bandwidths", "Budgets", "Holding", "Hop", "Plan", "plan_for"]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of each tier; None: not asked about. ``kv_tokens``: room kept for KV on the GPU."""

    gpu: int
    host: int | None = None
    disk: int | None = None
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """In 10⁹ bytes a second; None: not asked about."""

    remote: float | None = None
    disk: float | None = None
    h2d: float | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """A tier: its budget, the bytes of one adapter in it, and how many it holds."""

    tier: str
    budget: int
    adapter_bytes: int
    adapters: int


@dataclass(frozen=True, slots=True)
class Hop:
    """A load from one tier to the next: the transfer alone. ``seconds`` None: no bandwidth."""

    source: str
    target: str
    nbytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What these budgets hold.

    Args:
        tensors: bytes of A and B of one adapter in the layout's dtype.
        pages: of one adapter.
        page_bytes: of one page, all rows of it.
        arena_pages, kv_pages: of the GPU's arena; of these, kept for KV.
    """

    tensors: int
    pages: int
    page_bytes: int
    arena_pages: int
    kv_pages: int
    holdings: tuple[Holding, ...]
    hops: tuple[Hop, ...]


def plan_for(
    layout: LoraLayout,
    kv: KVLayout | None,
    budgets: Budgets,
    bandwidths: Bandwidths,
    *,
    file_dtype: str,
) -> Plan:
    """For adapters of the layout's maximum rank at every site.

    Args:
        file_dtype: of the files as published.

    Raises:
        CapacityError: a tier doesn't hold even one adapter, or not beside so much KV.
        AdapterUnsupported: as `ArenaShape.fit`.
    """
    shape = ArenaShape.fit(layout, kv, budgets.gpu)
    sites, rank = layout.sites, layout.max_rank
    spec = VectorSpec.of(layout, [rank] * len(sites), [1.0] * len(sites))
    # The files hold whole matrices, whatever this GPU's part of them is.
    published = rank * sum(sum(layout.base.modules[site.path].shape) for site in sites)
    one = Footprint.of(layout, spec, shape, published * ITEMSIZE[file_dtype])
    pages = shape.pages_for(spec.elements)
    kv_pages = -(-budgets.kv_tokens // kv.block_size) if kv else 0
    if kv and pages + max(1, kv_pages) > shape.num_pages:
        raise CapacityError(
            "gpu_bytes doesn't hold one adapter beside so much KV",
            needed=pages + max(1, kv_pages),
            limit=shape.num_pages,
            unit="pages",
        )
    page_bytes = shape.rows * shape.page_bytes
    holdings = [_holding("gpu", budgets.gpu, one.gpu, (shape.num_pages - kv_pages) * page_bytes)]
    for tier, budget, adapter_bytes in (
        ("host", budgets.host, one.host),
        ("disk", budgets.disk, one.disk),
    ):
        if budget is not None:
            holdings.append(_holding(tier, budget, adapter_bytes, budget))
    hops = (
        _hop("remote", "disk", one.remote, bandwidths.remote),
        _hop("disk", "host", one.vector, bandwidths.disk),
        _hop("host", "gpu", one.vector, bandwidths.h2d),
    )
    return Plan(
        tensors=rank
        * sum(site.in_features + site.out_features for site in sites)
        * layout.itemsize,
        pages=pages,
        page_bytes=page_bytes,
        arena_pages=shape.num_pages,
        kv_pages=kv_pages,
        holdings=tuple(holdings),
        hops=hops,
    )


def _holding(tier: str, budget: int, adapter_bytes: int, room: int) -> Holding:
    if room < adapter_bytes:
        raise CapacityError(
            f"{tier}_bytes holds no adapter of this rank", needed=adapter_bytes, limit=room
        )
    return Holding(tier, budget, adapter_bytes, room // adapter_bytes)


def _hop(source: str, target: str, nbytes: int, bandwidth: float | None) -> Hop:
    return Hop(source, target, nbytes, nbytes / (bandwidth * 1e9) if bandwidth else None)
