"""The memory that programs use, and what they must not do with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.arithmetic import Lanes


class Fault(AssertionError):
    """The program did what it must not do."""


@dataclass
class Memory:
    """Buffers of a GPU's memory, with room between them that nothing may touch."""

    bytes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1 << 25, np.uint8))
    names: list[str] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_output: list[bool] = field(default_factory=list)
    is_shared: list[bool] = field(default_factory=list)

    def place(
        self, name: str, data: NDArray[Any], *, is_output: bool = False, is_shared: bool = False
    ) -> int:
        """The address of a copy. ``is_output``: kernels may write to it. ``is_shared``: with the
        kernel ahead, so that it is to be waited for."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        begin = -(-(self.ends[-1] if self.ends else 0) // 256 + -2) * 256
        self.bytes[begin : begin + raw.size] = raw
        self.names.append(name)
        self.begins.append(begin)
        self.ends.append(begin + raw.size)
        self.is_output.append(is_output)
        self.is_shared.append(is_shared)
        return begin

    def read(self, name: str) -> NDArray[np.uint8]:
        place = self.names.index(name)
        copy: NDArray[np.uint8] = self.bytes[self.begins[place] : self.ends[place]].copy()
        return copy

    def check(self, at: Lanes, size: int, *, writes: bool, has_waited: bool) -> None:
        its = np.searchsorted(self.begins, at, "right") - 1
        outside = (its < 0) | (at + size > np.array(self.ends)[its])
        if outside.any():
            near = self.names[max(0, its[outside][0])]
            raise Fault(f"{outside.sum()} threads are outside of all buffers, behind {near}")
        for place in np.unique(its):
            if writes and not self.is_output[place]:
                raise Fault(f"{self.names[place]} is written, which is no output")
            if self.is_shared[place] and not has_waited:
                raise Fault(f"{self.names[place]} is used before griddepcontrol.wait")


class Shared:
    """A program's shared memory, and who has used it since the last barrier."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self._is_written = np.zeros(size, bool)
        self._writer = np.full(size, -1)
        self._readers = np.zeros(size, np.uint64)

    def barrier(self) -> None:
        self._writer.fill(-1)
        self._readers.fill(0)

    def check(self, at: Lanes, size: int, warps: Lanes, *, writes: bool) -> None:
        if at.size and (at.min() < 0 or at.max() + size > self.bytes.size):
            raise Fault(f"outside of the {self.bytes.size} bytes of shared memory")
        its, warps = at[:, None] + np.arange(size), warps[:, None]
        bit = np.uint64(1) << np.broadcast_to(warps, its.shape).astype(np.uint64)
        if ((self._writer[its] != -1) & (self._writer[its] != warps)).any():
            raise Fault("another warp has written this since the last barrier")
        if not writes:
            if not self._is_written[its].all():
                raise Fault("nobody has written this shared memory")
            np.bitwise_or.at(self._readers, its, bit)
            return
        if (self._readers[its] & ~bit).any():
            raise Fault("another warp has read this since the last barrier")
        self._writer[its] = warps
        self._is_written[its] = True
