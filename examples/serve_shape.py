"""How large a step's tensors are: as large as its work, or padded to one of a few shapes.

A CUDA graph computes one shape. Steps in which everybody decodes have a row a job, a power of two
of them: few rows cost little, and they are the most of all steps. Where chunks of prompts are
computed, too, rows are products' time, and padding is kept small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serve_attention import TILE_TOKENS
from serve_job import Job

__all__ = ["Limits", "Shape", "Work"]

Work = Sequence[tuple[Job, int]]
"""Who computes how many tokens: those that decode first."""

APART = 128
"""Rows from one shape with prompts to the next, at least: as a product's tiles are."""


class Shape(NamedTuple):
    """Of a step's tensors."""

    rows: int
    jobs: int
    blocks: int  # of a job at most
    tiles: int  # of attention; 0: every job has one row

    @property
    def sizes(self) -> list[int]:
        """Of the parts of the step's numbers: see `serve_rows`."""
        return [*[self.rows] * 4, self.jobs, self.jobs * self.blocks, 3 * self.tiles]


@dataclass(frozen=True, slots=True)
class Limits:
    """What no step exceeds."""

    rows: int
    jobs: int
    blocks: int  # of a job
    block_size: int

    def exact(self, work: Work) -> Shape:
        """The shape without padding."""
        counts = [count for _, count in work]
        longest = max(job.computed + count for job, count in work)
        tiles = 0 if max(counts) == 1 else sum(-(-count // TILE_TOKENS) for count in counts)
        return Shape(sum(counts), len(work), -(-longest // self.block_size), tiles)

    def padded(self, work: Work) -> Shape:
        """The least of `shapes` that holds the work."""
        rows = sum(count for _, count in work)
        return self._decoding(rows) if rows == len(work) else self._mixed(rows)

    def shapes(self) -> list[Shape]:
        """All that `padded` may be, the largest first."""
        found = {*self._each(self.jobs, self._decoding), *self._each(self.rows, self._mixed)}
        return sorted(found, reverse=True)

    def _decoding(self, rows: int) -> Shape:
        rows = min(_power_of_2(rows), self.jobs)
        return Shape(rows, rows, self.blocks, 0)

    def _mixed(self, rows: int) -> Shape:
        apart = max(APART, _power_of_2(rows) // 8)
        rows = min(-(-rows // apart) * apart, self.rows)
        jobs = min(self.jobs, rows)
        # Each job's last tile may have one row; the others are full.
        return Shape(rows, jobs, self.blocks, (rows + (TILE_TOKENS - 1) * jobs) // TILE_TOKENS)

    @staticmethod
    def _each(most: int, shape_of: Callable[[int], Shape]) -> Iterator[Shape]:
        rows = 0
        while rows < most:
            shape = shape_of(rows + 1)
            rows = shape.rows
            yield shape


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
