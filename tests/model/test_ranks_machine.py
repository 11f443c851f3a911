"""Rank 0 and two that follow, in one process, under random operations: whatever happens on rank 0,
the others end up with the same adapters in the same slots and pages, and no batch reads others."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from adaptercache import AdapterCache, Lease, Request
from adaptercache.kernels import add_lora
from adaptercache.ranks import Follower, Leader
from adaptercache.residency import State
from adaptercache.testing import FaultySource, check_consistent

IDS = [f"a{n}" for n in range(6)]
STEPS = 120


def rows_of(cache: AdapterCache, leases: list[Lease], x: torch.Tensor) -> torch.Tensor:
    x = x.to(cache._parts.gpu.device)
    y = torch.zeros(len(leases), 32, device=x.device)
    with cache.lora_batch([(lease, 1) for lease in leases]) as batch:
        add_lora((y,), x[: len(leases)], batch, ("q_proj",), layer=1)
    return y


def tables_of(cache: AdapterCache) -> dict[bytes, Any]:
    gpu = cache._parts.ledger.gpu
    resident = [copy for copy in gpu if copy.state is State.RESIDENT]
    return {copy.digest: copy.place[:3] for copy in resident}  # `after` counts a rank's own steps


class Ranks:
    """The three caches, and an engine that keeps them in step."""

    def __init__(self, tiny: Any, seed: int) -> None:
        self.tiny, self.random = tiny, random.Random(seed)
        self.truth = tiny.source(*IDS)
        self.sources = [FaultySource(self.truth) for _ in range(3)]
        options = {"gpu_slots": 3, "pages": 24, "host_bytes": 5 * 4 * 4096}  # five fit
        self.caches = [tiny.cache(source, **options) for source in self.sources]
        self.leader = Leader(self.caches[0], [1, 2])
        self.followers = [Follower(cache, rank) for rank, cache in enumerate(self.caches) if rank]
        self.waiting: list[Request] = []
        self.running: dict[str, list[Lease]] = {}
        self.kv: list[tuple[int, ...]] = []
        self.asked = self.answered = 0
        self.seed = 100
        self.failing_copies = 0
        self.fail_copies_of(self.caches[seed % 3])

    def step(self) -> None:
        for _ in range(self.random.randrange(3)):
            self.asked += 1
            self.waiting.append(Request(f"r{self.asked}", self.random.choice([None, *IDS])))
        running = [(Request(name), leases[0]) for name, leases in self.running.items()]
        admission, orders = self.leader.admit(self.waiting, running=running)
        self.waiting = admission.deferred
        self.answered += len(admission.failed)
        all_admitted = [admission.admitted, *(each.obey(orders) for each in self.followers)]
        for pairs in zip(*all_admitted, strict=True):
            assert len({request.request_id for request, _ in pairs}) == 1
            self.running[pairs[0][0].request_id] = [lease for _, lease in pairs]
        self.compute()
        for name in [name for name in self.running if self.random.random() < 0.5]:
            self.answered += 1
            for lease in self.running.pop(name):
                lease.release()
        for follower in self.followers:
            if self.random.random() < 0.8:  # a report may come late, or never
                self.leader.hear(follower.report())

    def compute(self) -> None:
        """Every rank reads the same bytes for each running request (here no rank has a part)."""
        batches = list(zip(*self.running.values(), strict=True))
        if not batches:
            return
        x = torch.randn(len(self.running), 32)
        first, *others = (
            rows_of(cache, list(leases), x)
            for cache, leases in zip(self.caches, batches, strict=True)
        )
        assert all(torch.equal(first, other) for other in others)
        slots = [[lease.slot for lease in leases] for leases in batches]
        assert slots[0] == slots[1] == slots[2]

    def disturb(self) -> None:
        leader = self.caches[0]
        what = self.random.randrange(9)
        if what == 0 and (pages := leader.pages.allocate(self.random.randrange(1, 8))):
            self.kv.append(pages)
        elif what == 1 and self.kv:
            leader.pages.free(self.kv.pop())
        elif what == 2:
            self.seed += 1
            adapter_id = self.random.choice(IDS)
            self.truth.put(adapter_id, *self.tiny.tensors(self.seed))
            self.random.choice(self.caches).refresh(adapter_id)
        elif what == 3:
            leader.remove(self.random.choice(IDS))
        elif what == 4:
            leader.prefetch(self.random.sample(IDS, 2))
        elif what == 5:
            self.random.choice(self.sources).failing = set(self.random.sample(IDS, 1))
        elif what == 6:
            self.random.choice(self.sources).delay_s = self.random.choice([0.0, 0.003])
        elif what == 7:
            self.failing_copies = self.random.randrange(2)
        else:
            time.sleep(0.005)

    def fail_copies_of(self, cache: AdapterCache) -> None:
        """While `failing_copies` says so, its copies onto the GPU fail."""
        write = cache._parts.gpu.write

        def fail_or_write(*args: Any) -> None:
            if self.failing_copies:
                raise OSError("injected: the copy fails")
            write(*args)

        cache._parts.gpu.write = fail_or_write  # type: ignore[method-assign]

    def settle(self) -> bool:
        """Nothing new; nobody fails. Whether all are served."""
        self.failing_copies = 0
        for source in self.sources:
            source.failing, source.delay_s = set(), 0.0
        while self.kv:
            self.caches[0].pages.free(self.kv.pop())
        self.step_quietly()
        return not self.waiting and not self.running

    def step_quietly(self) -> None:
        choices, self.random = self.random, Quiet()  # type: ignore[assignment]
        try:
            self.step()
        finally:
            self.random = choices


class Quiet:
    """Nobody comes, all that runs ends, and every report arrives."""

    def randrange(self, stop: int) -> int:
        return 0

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200))]
)
def test_the_others_are_as_rank_0_whatever_happens(tiny: Any, seed: int) -> None:
    ranks = Ranks(tiny, seed)
    for _ in range(STEPS):
        ranks.step()
        ranks.disturb()
    assert tiny.wait_until(ranks.settle, 30)
    assert ranks.answered == ranks.asked

    def are_equal() -> bool:
        ranks.step_quietly()
        first, *others = map(tables_of, ranks.caches)
        return all(tiny.idle(cache) for cache in ranks.caches) and all(o == first for o in others)

    assert tiny.wait_until(are_equal)
    for cache in ranks.caches:
        check_consistent(cache)
        cache.close()
