"""A check of a whole cache, at any moment."""

from __future__ import annotations

from typing import Any

from adaptercache.cache import AdapterCache
from adaptercache.ledger import Ledger
from adaptercache.pages import Owner
from adaptercache.residency import Residency, State

__all__ = ["check_consistent"]


def check_consistent(cache: AdapterCache) -> None:
    """Assert that all of a cache's tables agree with each other, whatever it is doing now.

    Pages are conserved and disjoint, slots and digests correspond one to one, what is leased is
    there, nothing is over its budget, and what stands in an eviction order is idle.
    """
    with cache._deciding.lock:
        ledger = cache._ledger
        _check_gpu(ledger)
        _check_host(ledger)
        for residency in (ledger.gpu, ledger.host, ledger.disk):
            _check_residency(residency)
        assert ledger.disk.used <= ledger.disk.num_bytes or ledger.disk.idle_size == 0
        for adapter_id in ledger.catalog:
            known = ledger.catalog.get(adapter_id)
            assert known is not None
            assert adapter_id in ledger.catalog.ids_of(known.digest)


def _check_gpu(ledger: Ledger) -> None:
    gpu = ledger.gpu
    pages = [page for copy in gpu for page in copy.place.pages]
    assert len(pages) == len(set(pages)), "a page has two owners"
    assert len(pages) == gpu.pages.count(Owner.ADAPTER), "an adapter's page was lost"
    assert all(gpu.pages.owner_of(page) is Owner.ADAPTER for page in pages)
    owned = gpu.pages.count(Owner.ADAPTER) + gpu.pages.count(Owner.KV)
    assert owned + gpu.pages.num_free == gpu.pages.num_pages, "pages are not conserved"
    slots = [copy.place.slot for copy in gpu]
    assert len(slots) == len(set(slots)), "a slot has two adapters"
    assert len(slots) + gpu.slots.num_free == gpu.slots.num_pages, "slots are not conserved"
    for copy in gpu:
        if copy.state is State.LOADING and copy.error is None:
            assert ledger.host[copy.digest].leases > 0, "a load reads what may be evicted"


def _check_host(ledger: Ledger) -> None:
    host = ledger.host
    blocks = [
        block
        for copy in host
        for first, count in copy.place.runs
        for block in range(first, first + count)
    ]
    assert len(blocks) == len(set(blocks)), "a block has two owners"
    assert len(blocks) + host.blocks.num_free == host.blocks.num_blocks, "blocks are lost"
    for copy in host:
        if copy.state is State.LOADING:
            assert ledger.disk[copy.digest].leases > 0, "a load reads what may be evicted"


def _check_residency(residency: Residency[Any]) -> None:
    idle = {copy.digest for copy in residency if copy.idle}
    order = [copy.digest for copy in residency.coldest()]
    assert len(order) == len(set(order)), "a digest stands twice in the eviction order"
    assert set(order) == idle, "only what is idle can be evicted"
    assert residency.used == sum(copy.size for copy in residency)
    assert residency.idle_size == sum(copy.size for copy in residency if copy.idle)
    assert residency.num_resident == sum(copy.state is State.RESIDENT for copy in residency)
    hinted = [copy for copy in residency if copy.prefetched]
    assert residency.hinted_size == sum(copy.size for copy in hinted)
    coming = [copy.size for copy in hinted if copy.state is State.LOADING]
    assert residency.hints_coming == sum(coming)
    assert residency.num_leases == sum(copy.leases for copy in residency)
    assert all(copy.leases >= 0 for copy in residency)
    assert not any(copy.doomed and copy.idle for copy in residency if copy.place is not None)
