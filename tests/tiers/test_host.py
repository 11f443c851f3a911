"""CPU memory: blocks, runs, and slabs that are taken as they are first used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptercache import CacheClosed, CapacityError
from adaptercache.blocks import BlockAllocator, Run
from adaptercache.packing import bytes_of
from adaptercache.testing import TierContract
from adaptercache.tiers import host
from adaptercache.tiers.host import HostTier
from adaptercache.tiers.pinned import give_back, take_pinned

BLOCK, BLOCKS = 64, 20


class Blocks:
    """`HostTier` with a `BlockAllocator`, as the contract wants it."""

    def __init__(self) -> None:
        self.capacity, self.unit = BLOCKS, BLOCK
        self.tier = HostTier(BLOCKS, BLOCK, pinned=False)
        self.blocks = BlockAllocator(BLOCKS)
        self._held: dict[str, tuple[tuple[Run, ...], int]] = {}

    def store(self, name: str, data: bytes, *, fails: bool = False) -> None:
        runs = self.blocks.allocate(-(-len(data) // BLOCK))
        if runs is None:
            raise CapacityError("no block is free")
        at = 0
        for view in self.tier.views(runs, len(data)):
            bytes_of(view)[:] = data[at : at + len(view)]
            at += len(view)
        if fails:
            self.blocks.free(runs)
            raise OSError("injected")
        self._held[name] = (runs, len(data))

    def store_in_vain(self, name: str, data: bytes) -> None:
        self.store(name, data, fails=True)

    def load(self, name: str) -> bytes:
        runs, nbytes = self._held[name]
        return b"".join(bytes(bytes_of(view)) for view in self.tier.views(runs, nbytes))

    def drop(self, name: str) -> None:
        self.blocks.free(self._held.pop(name)[0])

    def used(self) -> int:
        return BLOCKS - self.blocks.num_free


class TestOneSlab(TierContract):
    @contextmanager
    def tier(self) -> Iterator[Blocks]:
        yield Blocks()


class TestSlabsOfThreeBlocks(TierContract):
    """Runs that go over the edges of slabs, the last of which is shorter."""

    @contextmanager
    def tier(self) -> Iterator[Blocks]:
        before, host.SLAB_BYTES = host.SLAB_BYTES, 3 * BLOCK
        try:
            yield Blocks()
        finally:
            host.SLAB_BYTES = before


def test_memory_is_taken_only_when_it_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLAB_BYTES", 3 * BLOCK)
    taken: list[int] = []
    empty = torch.empty

    def count(nbytes: int, **options: object) -> torch.Tensor:
        taken.append(nbytes)
        return empty(nbytes, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", count)
    tier = HostTier(BLOCKS, BLOCK, pinned=False)
    assert taken == []
    tier.views([(4, 1)], BLOCK)
    tier.views([(3, 2)], BLOCK)
    assert taken == [3 * BLOCK]
    tier.close()


def test_memory_that_the_system_refuses_is_a_capacity_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    tier = HostTier(BLOCKS, BLOCK, pinned=False)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CapacityError, match="host_bytes"):
        tier.views([(0, 1)], BLOCK)


def test_after_a_refusal_the_next_ask_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    tier = HostTier(BLOCKS, BLOCK, pinned=False)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", refuse)
        with pytest.raises(CapacityError):
            tier.views([(0, 1)], BLOCK)
    assert len(tier.views([(0, 1)], BLOCK)) == 1


class Growing:
    """A tier that takes 3 slabs ahead, each when it is let, of memory that is told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.let, self.taken = threading.Semaphore(0), 0
        self.refused = False
        self.locked = 0

        def take(nbytes: int) -> torch.Tensor:
            if threading.current_thread().name.startswith("adaptercache"):
                self.let.acquire(timeout=20)
            if self.refused:
                raise RuntimeError("page-locking failed")
            self.taken += 1
            self.locked += nbytes
            return torch.empty(nbytes, dtype=torch.uint8)

        def give_back(tensor: torch.Tensor) -> None:
            self.locked -= len(tensor)

        monkeypatch.setattr(host, "SLAB_BYTES", 3 * BLOCK)
        monkeypatch.setattr(host, "take_pinned", take)
        monkeypatch.setattr(host, "give_back", give_back)
        self.tier = HostTier(BLOCKS, BLOCK, pinned=True, ahead=3, **options)

    def close(self) -> None:
        for _ in range(BLOCKS):
            self.let.release()
        self.tier.close()


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Growing]:
    growing = Growing(monkeypatch)
    yield growing
    growing.close()
    assert growing.locked == 0, "memory was left page-locked"


def test_slabs_are_taken_ahead_in_the_background(growing: Growing, tiny: Any) -> None:
    for _ in range(3):
        growing.let.release()
    assert tiny.wait_until(lambda: growing.tier.taken_bytes == 9 * BLOCK)
    growing.let.release()
    growing.tier.views([(2, 1)], BLOCK)  # of the first slab: now the fourth is sought, too
    assert tiny.wait_until(lambda: growing.tier.taken_bytes == 12 * BLOCK)


def test_what_there_is_can_be_used_while_the_next_slab_is_being_taken(
    growing: Growing, tiny: Any
) -> None:
    growing.let.release()
    assert tiny.wait_until(lambda: growing.tier.taken_bytes == 3 * BLOCK)
    assert tiny.ends(lambda: growing.tier.views([(0, 3)], 3 * BLOCK))


def test_who_needs_a_slab_that_is_being_taken_waits_for_it(growing: Growing) -> None:
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(growing.tier.views([(0, 1)], BLOCK)))
    waiting.start()
    waiting.join(0.05)
    assert not found
    growing.let.release()
    waiting.join(10)
    assert len(found) == 1
    assert growing.taken >= 1


def test_growing_that_is_refused_rests_until_somebody_asks(growing: Growing, tiny: Any) -> None:
    growing.refused = True
    for _ in range(BLOCKS):
        growing.let.release()
    assert tiny.wait_until(lambda: growing.tier._failed)
    with pytest.raises(CapacityError, match="allow_pageable"):
        growing.tier.views([(0, 1)], BLOCK)
    growing.refused = False
    assert len(growing.tier.views([(0, 1)], BLOCK)) == 1


def test_pageable_memory_is_taken_instead_where_the_user_has_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    growing = Growing(monkeypatch, allow_pageable=True)
    growing.refused = True
    assert len(growing.tier.views([(19, 1)], BLOCK)) == 1
    growing.close()
    assert len([r for r in caplog.records if "page-locked" in r.getMessage()]) == 1


def test_memory_that_was_given_back_is_not_taken_anew() -> None:
    tier = HostTier(BLOCKS, BLOCK, pinned=False)
    tier.views([(0, 1)], BLOCK)
    tier.close()
    with pytest.raises(CacheClosed):
        tier.views([(0, 1)], BLOCK)


def test_a_run_of_neighbours_is_one_view() -> None:
    tier = HostTier(BLOCKS, BLOCK, pinned=False)
    assert [len(view) for view in tier.views([(2, 5)], 5 * BLOCK)] == [5 * BLOCK]


def test_blocks_come_in_one_run_where_there_is_one_that_is_long_enough() -> None:
    blocks = BlockAllocator(10)
    runs = [blocks.allocate(2) for _ in range(5)]
    for one in runs[1:3]:
        assert one is not None
        blocks.free(one)
    assert blocks.allocate(4) == ((2, 4),)


def test_blocks_come_in_few_runs_where_no_run_is_long_enough() -> None:
    blocks = BlockAllocator(10)
    runs = [blocks.allocate(1) for _ in range(10)]
    for index in (0, 1, 2, 5, 8):
        one = runs[index]
        assert one is not None
        blocks.free(one)
    assert blocks.allocate(5) == ((0, 3), (5, 1), (8, 1))


@pytest.mark.parametrize("runs", [((0, 2),), ((3, 1), (3, 1)), ((9, 2),), ((-1, 1),)], ids=str)
def test_freeing_what_is_not_allocated_changes_nothing(runs: tuple[Run, ...]) -> None:
    blocks = BlockAllocator(10)
    blocks.allocate(10)
    blocks.free([(0, 1)])
    with pytest.raises(ValueError, match="runs"):
        blocks.free(runs)
    assert blocks.num_free == 1


@pytest.mark.gpu
def test_page_locked_memory_is_what_the_gpu_copies_from_and_is_given_back() -> None:
    slab = take_pinned(4 << 20)
    slab.fill_(7)
    assert slab.is_pinned()
    assert (slab.to("cuda", non_blocking=True) == 7).all()
    give_back(slab)
    assert not slab.is_pinned()


@pytest.mark.gpu
def test_an_error_of_the_driver_is_told_of_and_not_left_behind() -> None:
    slab = take_pinned(4 << 20)
    give_back(slab)
    give_back(slab)  # an error to the driver, and nothing to us
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_memory_that_the_system_has_not_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    register = torch.cuda.cudart().cudaHostRegister
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: register(8, 8, 0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with pytest.raises(RuntimeError, match="page-locking"):
        take_pinned(4096)
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
