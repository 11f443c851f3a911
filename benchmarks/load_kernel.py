"""A kernel that reads pinned CPU memory itself and lays it into cells: no staging."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 8  # they keep the link busy; more only take more of the GPU


@triton.jit  # type: ignore[untyped-decorator]
def _read(arena, source, pages, num_pages, cells, ROWS: tl.constexpr, CELL: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = CELL // 2048
    for unit in range(tl.program_id(0), cells * blocks, tl.num_programs(0)):
        cell, part = unit // blocks, unit % blocks
        page = tl.load(pages + cell // ROWS).to(tl.int64)
        row = (cell % ROWS).to(tl.int64)
        word = part * 2048 + tl.arange(0, 2048)
        value = tl.load(source + cell.to(tl.int64) * CELL + word)
        tl.store(arena + (row * num_pages + page) * CELL + word, value)


def read_into_cells(arena: Tensor, source: Tensor, pages: Tensor, count: int) -> None:
    """``arena[:, pages[i]] = source[i]`` for the first ``count`` pages; ``source`` is pinned."""
    rows, num_pages, words = arena.shape
    _read[(PROGRAMS,)](
        arena, source, pages, num_pages, count * rows, ROWS=rows, CELL=words, num_warps=16
    )
