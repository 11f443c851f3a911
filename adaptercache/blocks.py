"""Which blocks of the host tier are free; an adapter's blocks lie in runs as long as can be had.

A copy to the GPU runs at full rate from pieces of 8 MiB and more, so neighbouring blocks matter
here, as they do not in the arena.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["BlockAllocator", "Run"]

Run: TypeAlias = tuple[int, int]
"""``(first block, number of blocks)``."""


class BlockAllocator:
    """First fit where a run is long enough, else the longest runs there are.

    Low blocks are used first, so that memory that is page-locked on demand stays short. Plain
    Python on one byte a block: `bytearray.find` does the searching. Not thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be >= 0, not {num_blocks}")
        self._free = bytearray(b"\x01" * num_blocks)
        self.num_blocks = num_blocks
        self.num_free = num_blocks

    def allocate(self, n: int) -> tuple[Run, ...] | None:
        """``n`` blocks in as few runs as can be had, or None where fewer are free."""
        if n < 0:
            raise ValueError(f"n must be >= 0, not {n}")
        if n > self.num_free:
            return None
        runs: list[Run] = []
        length = n
        while n:
            length = min(length, n)
            first = self._free.find(b"\x01" * length)
            if first < 0:
                length = -(-length // 2)
                continue
            self._free[first : first + length] = bytes(length)
            self.num_free -= length
            n -= length
            runs.append((first, length))
        return _joined(runs)

    def free(self, runs: Iterable[Run]) -> None:
        """Gives runs back.

        Raises:
            ValueError: a block is free already, or isn't ours; nothing has changed.
        """
        runs = tuple(runs)
        blocks = [block for first, length in runs for block in range(first, first + length)]
        if len(set(blocks)) != len(blocks) or any(
            not 0 <= block < self.num_blocks or self._free[block] for block in blocks
        ):
            raise ValueError(f"not all of the runs {runs} are allocated, or one comes twice")
        for first, length in runs:
            self._free[first : first + length] = b"\x01" * length
        self.num_free += len(blocks)


def _joined(runs: list[Run]) -> tuple[Run, ...]:
    """Neighbours as one run; the order of an adapter's bytes is that of its runs."""
    joined: list[Run] = []
    for first, length in sorted(runs):
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return tuple(joined)
