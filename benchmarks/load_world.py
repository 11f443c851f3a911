"""What the load benchmarks share: an arena like an engine's, adapters in CPU memory, and clocks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptercache import KVLayout, LoraLayout
from adaptercache.blocks import BlockAllocator, Run
from adaptercache.layout import ArenaShape
from adaptercache.packing import VectorSpec
from adaptercache.tiers.gpu import GpuTier
from adaptercache.tiers.host import HostTier
from adaptercache.tiers.transfer import Transfer
from adaptercache.tiers.ways import Way, Ways

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK = 2 << 20

LLAMA_3_8B: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SMALL: dict[str, object] = LLAMA_3_8B | {  # where there is no GPU: to see that it runs
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CONFIG = LLAMA_3_8B if ON_GPU else SMALL
KV = KVLayout(block_size=16, kv_heads=8, head_dim=128) if ON_GPU else KVLayout(16, 2, 64)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Mark:
    """A moment: on the current stream of a GPU, or on the clock."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if ON_GPU else None
        self.time = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def us_to(self, end: Mark) -> float:
        if self.event is None or end.event is None:
            return (end.time - self.time) * 1e6
        return float(self.event.elapsed_time(end.event)) * 1e3


def wait_for_gpu() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Resting:
    """An adapter in CPU memory."""

    spec: VectorSpec
    runs: tuple[Run, ...]
    nbytes: int


class LoadWorld:
    """A GPU tier of 8 GiB in pages of 32 cells, a host tier, and adapters of random bytes in it."""

    def __init__(
        self, way: type[Way] | None = None, gpu_bytes: int = 8 << 30, host_bytes: int = 3 << 30
    ) -> None:
        if not ON_GPU:
            gpu_bytes, host_bytes = 64 << 20, 64 << 20
        self.layout = LoraLayout.from_config(CONFIG, max_rank=64)
        shape = ArenaShape.fit(self.layout, KV, gpu_bytes)
        self.tier = GpuTier(self.layout, shape, 64, DEVICE)
        if way is not None:
            self.take(way(self.tier.streams, self.tier.stack))
        self.host = HostTier(host_bytes // BLOCK, BLOCK, pinned=ON_GPU)
        self.blocks = BlockAllocator(host_bytes // BLOCK)
        self._random = random.Random(1)
        self.queued_us = 0.0
        self._pages: list[int] = []

    def take(self, way: Way) -> None:
        """Bring adapters in another way from now on."""
        self.tier._memory = self.tier.stack, Ways(way, way, way)
        wait_for_gpu()

    def rest(self, rank: int, modules: Iterable[str] | None = None) -> Resting:
        """A new adapter in CPU memory: of these modules, or of all."""
        wanted = set(self.layout.modules if modules is None else modules)
        ranks = [rank if site.module in wanted else 0 for site in self.layout.sites]
        spec = VectorSpec.of(self.layout, ranks, [1.0] * len(ranks))
        nbytes = spec.elements * self.layout.itemsize
        runs = self.blocks.allocate(-(-nbytes // BLOCK))
        assert runs is not None, "the host tier is too small for this benchmark"
        for view in self.host.views(runs, nbytes):
            words = view.view(torch.int32)
            words.copy_(torch.randint(-(1 << 30), 1 << 30, words.shape, dtype=torch.int32))
        return Resting(spec, runs, nbytes)

    def views(self, adapter: Resting) -> list[Tensor]:
        return self.host.views(adapter.runs, adapter.nbytes)

    def expect(self, slot: int, adapter: Resting) -> Transfer:
        """Into pages at random, other ones each time."""
        count = self.tier.shape.pages_for(adapter.spec.elements)
        if len(self._pages) < count:
            self._pages = list(range(self.tier.shape.num_pages))
            self._random.shuffle(self._pages)
        pages, self._pages = self._pages[:count], self._pages[count:]
        return self.tier.expect(slot, pages, adapter.spec, lambda: self.views(adapter))

    def time_loads(self, adapters: list[Resting], *, ahead: bool = False) -> float:
        """µs from the first copy to the last scatter, of adapters one after the other.

        ``ahead``: queued while the GPU sleeps, so that the host's own time does not count.
        """
        transfers = [self.expect(slot, adapter) for slot, adapter in enumerate(adapters)]
        streams = self.tier.streams
        start = self._start(len(adapters), ahead)
        begun = time.perf_counter()
        for transfer in transfers:
            transfer.begin()
        self.queued_us = (time.perf_counter() - begun) * 1e6  # of the host
        ends = []
        for lane in streams.lanes:
            with lane.use():
                ends.append(Mark())
        for end in ends:
            end.wait()
        for slot, transfer in enumerate(transfers):
            self.tier.write(slot, transfer)  # it has come: this only raises what went wrong
        return max(start.us_to(end) for end in ends)

    def _start(self, count: int, ahead: bool) -> Mark:
        streams = self.tier.streams
        with streams.copy.use():
            if ahead and ON_GPU:
                torch.cuda._sleep(3_000_000 + 3_000_000 * count)  # cycles: 1.7 ms for each
            start = Mark()
        for lane in streams.lanes:
            lane.wait(start.event)
        return start

    def time_plain(self, adapters: list[Resting], target: Tensor, *, ahead: bool = False) -> float:
        """µs of plain copies of the same bytes to one place on the GPU."""
        sources = [self.views(adapter) for adapter in adapters]
        start = self._start(len(adapters), ahead)
        with self.tier.streams.copy.use():
            for views in sources:
                at = 0
                for view in views:
                    target[at : at + len(view)].copy_(view, non_blocking=True)
                    at += len(view)
            end = Mark()
        end.wait()
        return start.us_to(end)

    def check(self, slot: int, adapter: Resting) -> None:
        """The slot holds the adapter's own bytes."""
        found = self.tier.stack.elements(slot, 0, adapter.spec.elements).view(torch.uint8).cpu()
        want = torch.cat(self.views(adapter))
        assert torch.equal(found, want), f"slot {slot} holds other bytes than its adapter's"

    def close(self) -> None:
        self.tier.drop()
        self.host.close()


def median_of(measure: Callable[[], float], times: int) -> tuple[float, float, float]:
    """Median and quartiles."""
    return quartiles([measure() for _ in range(times)])


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def rates(nbytes: int, us: list[float], reference_us: list[float]) -> dict[str, object]:
    """GB/s beside that of the plain copy in the same run."""
    median, low, high = quartiles(us)
    plain = statistics.median(reference_us)
    return {
        "us": round(median, 1),
        "p25": round(low, 1),
        "p75": round(high, 1),
        "GBps": round(nbytes / median / 1e3, 2),
        "reference_us": round(plain, 1),
        "reference_GBps": round(nbytes / plain / 1e3, 2),
        "share": round(plain / median, 4),
    }
