"""Steps that are in flight on a GPU while adapters and KV pages change their owners behind them.

Everything is launched ahead: kernels of random length stand on the compute stream and on both
streams of ours, and what a step has read is looked at long after. On a CPU there is one order only,
and the same test sees that the bookkeeping is right.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import AdapterCache, AdapterCacheError, Lease, LoraLayout, Request, Tier
from adaptercache.kernels import LoraBatch
from adaptercache.testing import any_device
from adaptercache.tiers import ways
from adaptercache.tiers.streams import Lane

IDS = [f"a{index}" for index in range(7)]
SLEEPS = (0, 0, 20_000, 200_000, 1_500_000)  # cycles: up to a millisecond
ON_GPU = any_device() == "cuda"


def sleep(rng: random.Random) -> None:
    """A kernel of random length on the current stream."""
    cycles = rng.choice(SLEEPS)
    if ON_GPU and cycles:
        torch.cuda._sleep(cycles)


@pytest.fixture(params=range(6 if ON_GPU else 2))
def rng(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """And streams of ours on which long kernels stand, and small chunks."""
    rng = random.Random(request.param)
    in_lanes = random.Random(100 + request.param)
    wait = Lane.wait

    def wait_after_a_sleep(lane: Lane, event: Any) -> None:
        with lane.use():
            sleep(in_lanes)
        wait(lane, event)

    monkeypatch.setattr(Lane, "wait", wait_after_a_sleep)
    chunk = 4096 * rng.choice([1, 2, 3])
    monkeypatch.setattr(ways, "STAGED_BYTES", chunk)
    monkeypatch.setattr(ways, "STRIDED_BYTES", chunk)
    if request.param % 2:  # strided, else staged

        def only_strided(streams: Any, stack: Any) -> ways.Ways:
            way = ways.Strided(streams, stack)
            return ways.Ways(way, way, way)

        monkeypatch.setattr(ways.Ways, "of", only_strided)
    return rng


@dataclass
class Seen:
    """What a step has read, on the GPU, and what it should have been."""

    got: list[torch.Tensor] = field(default_factory=list)
    want: list[torch.Tensor] = field(default_factory=list)

    def check(self) -> None:
        for got, want in zip(self.got, self.want, strict=True):
            assert torch.equal(got.cpu(), want)


class Engine:
    """Opens steps over a cache of few pages, reads in them whatever they hold, and frees much."""

    def __init__(self, tiny: Any, cache: AdapterCache, rng: random.Random) -> None:
        self.cache, self.rng = cache, rng
        self.layout: LoraLayout = tiny.layout
        self.tensors = {key: tiny.tensors(seed)[0] for seed, key in enumerate(IDS)}
        self.leases: list[Lease] = []
        self.kv: dict[int, float] = {}
        self.seen: list[Seen] = []
        self.count = 0

    def step(self) -> None:
        rng, seen = self.rng, Seen()
        waiting = [
            Request(f"r{index}", key, pipelined=rng.random() < 0.6)
            for index, key in enumerate(rng.sample(IDS, 2))
        ]
        for _, lease in self.cache.admit(waiting).admitted:
            self.leases.append(lease)
        with self.cache.lora_batch([(lease, 1) for lease in self.leases]) as lora:
            sleep(rng)
            for layer in range(self.layout.num_layers):
                lora.wait(layer)
                for lease in self.leases:
                    self._read(lora, lease, layer, seen)
                self._use_kv(layer, seen)
                sleep(rng)
            some = list(self.kv.items())[:3]
            self._free_some()
            for page, value in some:  # freed or not: the step may use it to its end
                self._read_kv(page, value, 0, seen)
        self._free_some()
        self.seen.append(seen)

    def _read(self, lora: LoraBatch, lease: Lease, layer: int, seen: Seen) -> None:
        """A and B of a site, through the table as it is on the GPU: nothing here waits for it."""
        stack = lora.stack
        site = next(s for s in self.layout.sites if (s.layer, s.module) == (layer, "v_proj"))
        index = stack.site(layer, "v_proj")
        elems, rows = stack.shape.page_elems, stack.shape.rows
        assert lease.adapter_id is not None
        tensors = self.tensors[lease.adapter_id]
        a = tensors[f"base_model.model.{site.path}.lora_A.weight"]
        element = stack.start[lease.slot, index].long() * 512
        element = element + torch.arange(a.numel(), device=stack.device)
        cell = element // elems
        pages = stack.pages[lease.slot].long().gather(0, cell // rows)
        seen.got.append(stack.arena[cell % rows, pages, element % elems])
        seen.want.append(a.flatten())

    def _use_kv(self, layer: int, seen: Seen) -> None:
        if layer == 0:
            pages = self.cache.pages.allocate(self.rng.randint(1, 4))
            for page in pages or ():
                assert page not in self.kv
                self.count += 1
                self.kv[page] = float(self.count)
                self.cache.kv_view(0)[page] = float(self.count)
        for page, value in self.kv.items():
            if self.rng.random() < 0.3:
                self._read_kv(page, value, 0, seen)

    def _read_kv(self, page: int, value: float, layer: int, seen: Seen) -> None:
        block = self.cache.kv_view(layer)[page].flatten()
        seen.got.append(block.clone())
        seen.want.append(torch.full(block.shape, value))

    def _free_some(self) -> None:
        """Leases and KV pages, whatever launches are still to come; also from other threads."""
        rng = self.rng
        gone = [lease for lease in self.leases if rng.random() < 0.5]
        self.leases = [lease for lease in self.leases if lease not in gone]
        thread = threading.Thread(target=self._release, args=(gone,))
        thread.start()
        thread.join()
        pages = [page for page in self.kv if rng.random() < 0.5]
        for page in pages:
            del self.kv[page]
        self.cache.pages.free(pages)
        if rng.random() < 0.4:  # given up while it is being copied
            self.cache.acquire(rng.choice(IDS)).release()

    def _release(self, leases: list[Lease]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else nullcontext():
            for lease in leases:
                lease.release()

    def end(self) -> None:
        for lease in self.leases:
            lease.release()
        self.cache.pages.free(self.kv)
        for seen in self.seen:
            seen.check()


def test_each_step_reads_its_adapters_own_bytes_and_its_kv(tiny: Any, rng: random.Random) -> None:
    with tiny.cache(tiny.source(*IDS), pages=24, gpu_slots=4) as cache:
        tiny.load(cache, *IDS)
        engine = Engine(tiny, cache, rng)
        for _ in range(60 if ON_GPU else 40):
            engine.step()
        engine.end()
        evictions = cache.stats().evictions
        assert sum(evictions.values()) > 10
        assert sum(len(seen.got) for seen in engine.seen) > 200


def test_a_page_freed_in_a_step_may_be_read_by_what_it_launches_later(tiny: Any) -> None:
    """The next owner's bytes come only after all of the step."""
    with tiny.cache(tiny.source("a"), pages=32) as cache:
        cache.prefetch(["a"], to=Tier.HOST)
        assert tiny.wait_until(lambda: "a" in cache.resident(Tier.HOST))
        pages = cache.pages.allocate(15)
        with cache.lora_batch([]):
            for layer in range(2):
                cache.kv_view(layer)[list(pages)] = 7.0
            cache.pages.free(pages)
            pending = cache.acquire("a")
            if ON_GPU:
                torch.cuda._sleep(20_000_000)
            late = [cache.kv_view(layer)[list(pages)].clone() for layer in range(2)]
        with pending.result(10):
            assert all((each == 7.0).all() for each in late)


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def churned(tiny: Any) -> Iterator[Any]:
    """Loads and evicts adapters; tells what it holds after so many."""
    with tiny.cache(tiny.source(*IDS), pages=24, gpu_slots=3) as cache:
        count = 0

        def churn(loads: int) -> dict[str, int]:
            nonlocal count
            for _ in range(loads):
                count += 1
                with cache.acquire(IDS[count % len(IDS)]).result(10) as lease:
                    if count % 3 == 0:
                        with cache.lora_batch([(lease, 1)]):
                            pass
            if ON_GPU:
                torch.cuda.synchronize()
            return {
                "threads": threading.active_count(),
                "files": len(list(Path("/proc/self/fd").iterdir())),
                "page-locked": cache._parts.host.taken_bytes,
                "gpu": torch.cuda.memory_allocated() if ON_GPU else 0,
            }

        yield churn, cache


def test_a_thousand_loads_and_evictions_leave_nothing_behind(churned: Any) -> None:
    churn, cache = churned
    loads = 1000 if ON_GPU else 300
    before = churn(100)
    memory = rss()
    after = churn(loads)
    assert after == before
    assert rss() - memory < 24 << 20
    assert cache.stats().evictions[Tier.GPU, "room"] >= loads


@pytest.mark.gpu
def test_memory_that_the_gpu_does_not_have_is_told_of_and_given_back(tiny: Any) -> None:
    from adaptercache import CapacityError

    free = torch.cuda.mem_get_info()[0]
    before = torch.cuda.memory_allocated()
    with pytest.raises(CapacityError, match=r"gpu_bytes") as told:
        AdapterCache(tiny.layout, None, gpu_bytes=free * 2, host_bytes=4 << 20, kv=tiny.kv)
    assert told.value.needed > told.value.limit
    del told
    assert torch.cuda.memory_allocated() - before < 1 << 20
    torch.ones(1, device="cuda").add_(1)  # no error is left behind


@pytest.mark.gpu
def test_page_locked_memory_that_is_refused_leaves_no_error_behind(tiny: Any) -> None:
    from adaptercache import CapacityError
    from adaptercache.tiers.host import HostTier
    from adaptercache.tiers.memory import free_bytes

    huge = 2 * free_bytes(torch.device("cpu"))
    tier = HostTier(2, huge, pinned=True, ahead=0)
    with pytest.raises(CapacityError, match="allow_pageable"):
        tier.views([(0, 1)], 16)
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    tier.close()


@pytest.mark.gpu
def test_a_share_of_the_gpus_free_memory(tiny: Any) -> None:
    free = torch.cuda.mem_get_info()[0]
    with AdapterCache(tiny.layout, None, gpu_bytes=0.01, host_bytes=4 << 20) as cache:
        capacity = cache.stats().capacity_bytes[Tier.GPU]
        assert abs(capacity - 0.01 * free) < 64 << 20


@pytest.mark.gpu
def test_after_sleeping_the_memory_is_the_gpus_again(tiny: Any) -> None:
    torch.cuda.empty_cache()  # else the arena may be cut from what other tests still hold
    with tiny.cache(tiny.source("a"), pages=16384) as cache:  # 64 MiB
        tiny.load(cache, "a")
        before = torch.cuda.mem_get_info()[0]
        cache.drop_gpu()
        assert torch.cuda.mem_get_info()[0] - before >= 60 << 20
        with pytest.raises(AdapterCacheError):
            cache.kv_view(0)
        cache.restore()
        assert cache.resident(Tier.GPU) == {"a"}
