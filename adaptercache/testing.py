"""For our tests and yours: sources that you control, adapters made up, and a whole-cache check."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from adaptercache.base_model import BaseModel
from adaptercache.cache import AdapterCache
from adaptercache.errors import CapacityError
from adaptercache.ledger import Ledger
from adaptercache.pages import Owner
from adaptercache.residency import Residency, State
from adaptercache.tiers.remote import Source, TensorSource

__all__ = [
    "FakeSource",
    "FaultySource",
    "TierContract",
    "check_consistent",
    "random_adapter",
]


def random_adapter(
    base: BaseModel,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: Collection[str] = ("q_proj", "v_proj"),
    layers: Collection[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """An adapter in PEFT's format with random non-zero A and B, as a training run would leave it.

    Args:
        alpha: None: twice the rank.
        targets: leaf names of linear modules.
        layers: decoder layers that carry it; None: all.

    Returns:
        ``(tensors, config)``: what `AdapterCache.put` takes, and what goes into
        ``adapter_model.safetensors`` and ``adapter_config.json``.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, module in base.modules.items():
        parts = path.split(".")
        layer = next((int(part) for part in parts if part.isdigit()), None)
        if module.kind != "linear" or parts[-1] not in targets or layer is None:
            continue
        if layers is not None and layer not in layers:
            continue
        out_features, in_features = module.shape
        a = torch.randn(rank, in_features, generator=generator) / in_features**0.5
        b = torch.randn(out_features, rank, generator=generator) / rank**0.5
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(dtype)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
    }
    return tensors, config


class FakeSource(TensorSource):
    """A source in memory that counts what is asked of it. Thread-safe.

    Attributes:
        calls: how often each method was called for each id: ``calls["read", "a"]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self._counting = threading.Lock()

    def put_files(self, adapter_id: str, files: Mapping[str, bytes]) -> None:
        """Put an adapter here as files, sound or not."""
        revision = str(hash((adapter_id, *sorted(files.items()))))
        with self._lock:
            self._adapters[adapter_id] = (revision, dict(files))

    def revision(self, adapter_id: str) -> str:
        self._count("revision", adapter_id)
        return super().revision(adapter_id)

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        self._count("files", adapter_id)
        return super().files(adapter_id, revision)

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        self._count("read", adapter_id)
        return super().read(adapter_id, revision, name, offset, into)

    def _count(self, method: str, adapter_id: str) -> None:
        with self._counting:
            self.calls[method, adapter_id] += 1


class FaultySource:
    """A source in front of another that is slow, stands still, or fails, as told. Thread-safe.

    Attributes:
        delay_s: before each call.
        failing: ids whose calls raise OSError, until they are taken out.
        gate: calls wait while it is cleared.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.delay_s = 0.0
        self.failing: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def revision(self, adapter_id: str) -> str:
        self._suffer(adapter_id)
        return self._source.revision(adapter_id)

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        self._suffer(adapter_id)
        return self._source.files(adapter_id, revision)

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        self._suffer(adapter_id)
        return self._source.read(adapter_id, revision, name, offset, into)

    def ids(self) -> Iterable[str]:
        return self._source.ids()

    def _suffer(self, adapter_id: str) -> None:
        self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        if adapter_id in self.failing:
            raise OSError(f"injected: {adapter_id} can't be read")


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
        assert ledger.disk.claimed >= 0
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
        if copy.state is State.LOADING:
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
    assert residency.num_leases == sum(copy.leases for copy in residency)
    assert all(copy.leases >= 0 for copy in residency)
    assert not any(copy.doomed and copy.idle for copy in residency if copy.place is not None)


class TierContract:
    """What every tier keeps: derive a test class from it, and give it `tier`; pytest finds its
    tests. A tier that evicts is shown to it with eviction left out.

    The object that `tier` yields holds byte strings (of multiples of 4 bytes) under names:

    - ``capacity`` and ``unit``: how many units of how many bytes it holds; 8 units or more;
    - ``store(name, data)``: raises CapacityError where there is no room; ``name`` is new;
    - ``store_in_vain(name, data)``: the same, but fails midway, with OSError;
    - ``load(name) -> bytes``: raises KeyError where there is no such name;
    - ``drop(name)``; ``used() -> int``: units that are not free."""

    def tier(self) -> AbstractContextManager[Any]:
        """A new, empty tier."""
        raise NotImplementedError

    @staticmethod
    def some_bytes(nbytes: int, seed: int) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        return bytes(torch.randint(0, 255, (nbytes,), generator=generator).tolist())

    def test_any_size_reads_back_and_is_freed_exactly(self) -> None:
        with self.tier() as tier:
            tier.store("kept", self.some_bytes(4, 0))
            before, unit = tier.used(), tier.unit
            for size in (4, *(k * unit + d for k in (1, 2, 3) for d in (-4, 0, 4) if unit > 4)):
                data = self.some_bytes(size, size)
                tier.store("a", data)
                assert tier.load("a") == data
                assert tier.used() == before + -(-size // unit)
                tier.drop("a")
                assert tier.used() == before and _raises(KeyError, tier.load, "a")

    def test_neighbours_do_not_touch_each_other(self) -> None:
        with self.tier() as tier:
            data = [self.some_bytes(tier.unit, seed) for seed in range(8)]
            for index, each in enumerate(data):
                tier.store(str(index), each)
            for index in range(0, 8, 2):
                tier.drop(str(index))
                tier.store(f"again {index}", data[index][::-1])
            assert [tier.load(str(index)) for index in range(1, 8, 2)] == data[1::2]
            assert tier.load("again 4") == data[4][::-1]

    def test_capacity_is_refused_not_exceeded(self) -> None:
        with self.tier() as tier:
            data = [self.some_bytes(tier.unit, seed) for seed in range(tier.capacity)]
            for index, each in enumerate(data):
                tier.store(str(index), each)
            for nbytes in (4, 3 * tier.unit):
                assert _raises(CapacityError, tier.store, "one more", bytes(nbytes))
            assert tier.used() == tier.capacity
            assert [tier.load(str(index)) for index in range(len(data))] == data

    def test_a_place_used_again_shows_no_trace_of_its_last_owner(self) -> None:
        with self.tier() as tier:
            for index in range(tier.capacity):
                tier.store(str(index), b"\xff" * tier.unit)
            for index in range(tier.capacity):
                tier.drop(str(index))
            for size in (4, tier.unit, 2 * tier.unit + 4):
                tier.store("a", bytes(size))
                assert tier.load("a") == bytes(size)
                tier.drop("a")

    def test_a_store_that_fails_leaves_nothing(self) -> None:
        with self.tier() as tier:
            kept, data = self.some_bytes(2 * tier.unit, 0), self.some_bytes(3 * tier.unit, 1)
            tier.store("kept", kept)
            for _ in range(2 * tier.capacity):
                assert _raises(OSError, tier.store_in_vain, "a", data)
            assert tier.used() == 2 and _raises(KeyError, tier.load, "a")
            tier.store("a", data)
            assert (tier.load("a"), tier.load("kept")) == (data, kept)


def _raises(error: type[Exception], act: Callable[..., object], *args: object) -> bool:
    try:
        act(*args)
    except error:
        return True
    return False
