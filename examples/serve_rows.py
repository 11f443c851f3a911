"""A step's numbers: one vector, which goes to the GPU in one copy, and the model's views of it.

In this order, ``int64``, with as many as `Shape.sizes` says: the rows' tokens, positions, pages and
offsets; the jobs' last rows and tables; attention's tiles.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from serve_attention import TILE_TOKENS
from serve_job import Job
from serve_shape import Shape, Work

__all__ = ["Rows", "numbers_of"]


@dataclass(frozen=True, slots=True)
class Rows:
    """One step's new tokens, flat: ``int64 [rows]`` each, on the device; those of a job lie one
    behind the other.

    ``positions`` are those in the sequences; ``pages`` and ``offsets`` say into which block, and
    where in it, each token's keys and values go. ``last [jobs]``: the rows whose logits are wanted.
    ``tables [jobs, blocks]`` and ``tiles [tiles, 3]`` or None: see `serve_attention.attend`.
    """

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    offsets: Tensor
    last: Tensor
    tables: Tensor
    tiles: Tensor | None

    @classmethod
    def of(cls, numbers: Tensor, shape: Shape) -> Rows:
        """Views of a step's numbers, or of their beginning."""
        sizes = shape.sizes
        parts = numbers[: sum(sizes)].split(sizes)
        tokens, positions, pages, offsets, last, tables, tiles = parts
        tables = tables.view(shape.jobs, shape.blocks)
        in_tiles = tiles.view(shape.tiles, 3) if shape.tiles else None
        return cls(tokens, positions, pages, offsets, last, tables, in_tiles)


def numbers_of(
    work: Work, shape: Shape, places: Mapping[Job, int], block_size: int, spare: int
) -> array[int]:
    """Lay a step out.

    Args:
        places: of jobs whose next token a step under way chooses; it stands for the token, and is
            negative.
        spare: a page that nobody reads. Padding rows store their keys and values there.
    """
    tokens, positions, pages, offsets, last, tables, tiles = (array("q") for _ in range(7))
    spares = array("q", [spare]) * shape.blocks
    for number, (job, count) in enumerate(work):
        if shape.tiles:
            for done in range(0, count, TILE_TOKENS):
                tiles.extend((number, len(tokens) + done, min(TILE_TOKENS, count - done)))
        if job.unread:
            tokens.append(places[job])
        else:
            tokens.extend(job.tokens[job.computed : job.computed + count])
        for position in range(job.computed, job.computed + count):
            positions.append(position)
            pages.append(job.pages[position // block_size])
            offsets.append(position % block_size)
        last.append(len(tokens) - 1)
        its = job.pages[: shape.blocks]
        tables.extend(its)
        tables.extend(spares[len(its) :])
    numbers = array("q")
    parts = (tokens, positions, pages, offsets, last, tables, tiles)
    padding = (0, 0, spare, 0, 0, spare, 0)
    for part, size, number in zip(parts, shape.sizes, padding, strict=True):
        numbers.extend(part)
        numbers.extend(array("q", [number]) * (size - len(part)))
    return numbers
