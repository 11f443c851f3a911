"""Adapters from the disk to the GPU, the hops overlapping, beside each hop by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from adaptercache import AdapterCache, LoraLayout, Tier
from adaptercache.packing import read_packed_header
from adaptercache.testing import random_adapter
from load_world import ATTENTION, CONFIG, DEVICE, KV, ON_GPU, wait_for_gpu

WARM, TIMES = (3, 25) if ON_GPU else (1, 15)


def flow() -> Iterator[tuple[str, dict[str, object]]]:
    """From asking for what only the disk has, in the page cache, until it is ready on the GPU.

    A process verifies a packed file's checksum when it reads it for the first time, and later
    not again: both are measured. In CPU memory nothing waits to be page-locked.
    """
    layout = LoraLayout.from_config(CONFIG, max_rank=16)
    gpu_bytes, host_bytes = (2 << 30, 192 << 20) if ON_GPU else (32 << 20, 32 << 20)
    adapters = {
        "rank 16 all-linear": (16, layout.modules),
        "rank 8 q k v o": (8, ATTENTION),
    }
    with AdapterCache(
        layout, gpu_bytes=gpu_bytes, host_bytes=host_bytes, gpu_slots=4, kv=KV, device=DEVICE
    ) as cache:
        for adapter_id, (rank, targets) in adapters.items():
            made = random_adapter(layout.base, rank=rank, targets=targets)
            cache.put(adapter_id, *made).result(120)
        for adapter_id in adapters:
            trial = Trial(cache, adapter_id)
            for how, is_first in (("read for the first time", True), ("read again", False)):
                yield f"{adapter_id}, {how}", trial.figures(is_first)


class Trial:
    """One adapter that goes up again and again. Durations are in ms, on the clock."""

    def __init__(self, cache: AdapterCache, adapter_id: str) -> None:
        known = cache._ledger.catalog.get(adapter_id)
        assert known is not None
        self._cache, self._id, self._digest = cache, adapter_id, known.digest
        path = cache._parts.disk.packed_path(known.digest, cache.layout.digest)
        packed = read_packed_header(path, cache.layout)
        vector = bytearray(path.read_bytes()[packed.offset : packed.offset + packed.nbytes])
        self._vector = torch.frombuffer(vector, dtype=torch.uint8).to(DEVICE)
        self._elements = packed.spec.elements

    def figures(self, is_first: bool) -> dict[str, object]:
        """Medians and p90 of three ways that are taken in turns, and of the sum of the hops.

        Args:
            is_first: the checksum is verified at each reading.
        """
        took: dict[str, list[float]] = {"flow": [], "host": [], "copy": [], "sum": []}
        for turn in range(WARM + TIMES):
            self._forget(is_first)
            host = self._to_host()
            copy = self._to_gpu()  # from CPU memory, which has it now
            self._forget(is_first)
            flow = self._to_gpu()
            if turn >= WARM:
                for name, ms in zip(took, (flow, host, copy, host + copy), strict=True):
                    took[name].append(ms)
        found: dict[str, object] = {"nbytes": len(self._vector)}
        for name, durations in took.items():
            found[f"{name}_ms"] = round(statistics.median(durations), 3)
            found[f"{name}_p90_ms"] = round(statistics.quantiles(durations, n=10)[-1], 3)
        middle = {name: statistics.median(durations) for name, durations in took.items()}
        found["of_larger"] = round(middle["flow"] / max(middle["host"], middle["copy"]), 3)
        found["of_sum"] = round(middle["flow"] / middle["sum"], 3)
        return found

    def _forget(self, is_first: bool) -> None:
        """Evict it from the GPU and from CPU memory, as room for others would."""
        ledger = self._cache._ledger
        with self._cache._deciding.lock:
            for tier, copies in ((Tier.GPU, ledger.gpu), (Tier.HOST, ledger.host)):
                if copies.get(self._digest) is not None:
                    ledger.evict(tier, self._digest, "room")
        if is_first:
            self._cache._parts.disk._transfer._verified.clear()

    def _to_host(self) -> float:
        begun = _begin()
        self._cache.prefetch([self._id], to=Tier.HOST)  # the hint ends with the next lease
        return _ms_until(lambda: self._id in self._cache.resident(Tier.HOST), begun)

    def _to_gpu(self) -> float:
        begun = _begin()
        lease = self._cache.acquire(self._id)
        took = _ms_until(lambda: lease.ready, begun)
        with lease:
            found = self._cache._gpu.stack.elements(lease.slot, 0, self._elements)
            assert torch.equal(found.view(torch.uint8), self._vector), "other bytes than the file's"
        return took


def _begin() -> float:
    """The time, with nothing under way."""
    wait_for_gpu()
    time.sleep(0.003)
    return time.perf_counter()


def _ms_until(has_come: Callable[[], bool], begun: float) -> float:
    """As who polls sees it, about every 70 µs."""
    while not has_come():
        time.sleep(2e-5)
        assert time.perf_counter() - begun < 30, "it doesn't come"
    return (time.perf_counter() - begun) * 1e3
