"""The kernel that lays a chunk of a flat vector into the cells of the arena."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaptercache.kernels.binary import Binary

__all__ = ["lay"]

_WORDS = 2048  # 16 KiB a program. Fewer programs that stride take more from the model's kernels.


def lay_kernel(
    arena,  # int64 [ROWS, num_pages, CELL]
    chunk,  # int64 [n, ROWS, CELL]
    pages,  # int32 [n]
    num_pages,
    ROWS: tl.constexpr,
    CELL: tl.constexpr,  # words a cell
    BLOCK: tl.constexpr,
):
    """Semantics: ``arena[r, pages[i], :] = chunk[i, r, :]``. A program moves a block of a cell."""
    PARTS: tl.constexpr = (CELL + BLOCK - 1) // BLOCK
    cell, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    page = tl.load(pages + cell // ROWS).to(tl.int64)
    # [BLOCK]
    word = part * BLOCK + tl.arange(0, BLOCK)
    mask = word < CELL
    value = tl.load(chunk + cell * CELL + word, mask=mask)
    tl.store(arena + (cell % ROWS * num_pages + page) * CELL + word, value, mask=mask)


# What the numbers are makes no other binary, nor where in a row the pages begin.
lay_kernel = triton.jit(
    lay_kernel, do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["pages"]
)


@cache
def _binary(rows: int, words: int, block: int) -> Binary:
    constants = {"ROWS": rows, "CELL": words, "BLOCK": block}
    return Binary(lay_kernel, constants, (torch.int64, torch.int64, torch.int32, 1), num_warps=4)


def lay(arena: Tensor, chunk: Tensor, pages: Tensor) -> None:
    """See `cells.lay_into_cells`."""
    rows, num_pages, words = arena.shape
    block = min(_WORDS, triton.next_power_of_2(words))
    programs = len(chunk) * rows * triton.cdiv(words, block)
    args = (arena, chunk, pages, num_pages)
    _binary(rows, words, block).launch(programs, args, arena.device, aligned=True, pdl=False)
