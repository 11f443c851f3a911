"""What every storage tier keeps, as a test class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from adaptercache.errors import CapacityError

__all__ = ["TierContract"]


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
