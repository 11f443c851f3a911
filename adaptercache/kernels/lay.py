"""The kernel that lays a chunk of a flat vector into the cells of the arena."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaptercache.kernels.binary import Binary, address

__all__ = ["PROGRAMS", "lay"]

PROGRAMS = 64
"""They keep up with the link several times over. Fewer take longer, and more from the model's
kernels beside them; more make the last chunk no faster."""

_WORDS = 4096  # 32 KiB at a time


def lay_kernel(
    arena,  # int64 [ROWS, num_pages, CELL]
    chunk,  # int64 [n, ROWS, CELL]
    pages,  # int32 [n]
    num_pages,
    units,  # n * ROWS * blocks of a cell
    ROWS: tl.constexpr,
    CELL: tl.constexpr,  # words a cell
    BLOCK: tl.constexpr,
):
    """Semantics: ``arena[r, pages[i], :] = chunk[i, r, :]``, a block of a cell at a time."""
    PARTS: tl.constexpr = (CELL + BLOCK - 1) // BLOCK
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        cell, part = unit // PARTS, unit % PARTS
        page = tl.load(pages + cell // ROWS).to(tl.int64)
        # [BLOCK]
        word = part * BLOCK + tl.arange(0, BLOCK)
        mask = word < CELL
        value = tl.load(chunk + cell * CELL + word, mask=mask)
        tl.store(arena + (cell % ROWS * num_pages + page) * CELL + word, value, mask=mask)


# What the numbers are makes no other binary, nor where in a row the pages begin.
lay_kernel = triton.jit(
    lay_kernel,
    do_not_specialize=["num_pages", "units"],
    do_not_specialize_on_alignment=["pages"],
)


@cache
def _binary(device: torch.device, rows: int, words: int, block: int) -> Binary:
    constants = {"ROWS": rows, "CELL": words, "BLOCK": block}
    types = (torch.int64, torch.int64, torch.int32, 1, 1)
    return Binary(lay_kernel, device, constants, types, num_warps=8)


def lay(arena: Tensor, chunk: Tensor, pages: Tensor) -> None:
    """See `cells.lay_into_cells`."""
    rows, num_pages, words = arena.shape
    block = min(_WORDS, triton.next_power_of_2(words))
    units = len(chunk) * rows * triton.cdiv(words, block)
    args = (address(arena), address(chunk), address(pages), num_pages, units)
    binary = _binary(arena.device, rows, words, block)
    binary.launch(min(units, PROGRAMS), args, aligned=True, pdl=False)
