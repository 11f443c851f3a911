"""Lays chunks of flat vectors, whole pages of them, into the cells of the arena."""

from __future__ import annotations

from torch import Tensor

__all__ = ["lay_into_cells"]


def lay_into_cells(arena: Tensor, chunk: Tensor, pages: Tensor) -> None:
    """``arena[:, pages[i]] = chunk[i]``, on the current stream.

    Args:
        arena: ``int64 [rows, num_pages, words]``.
        chunk: ``int64 [n, rows, words]``, contiguous: cell after cell of the vector.
        pages: ``int32 [n]`` on the same device; distinct.
    """
    if arena.is_cuda:
        from adaptercache.kernels.lay import lay  # triton: only where it is used

        lay(arena, chunk, pages)
        return
    arena.index_copy_(1, pages.long(), chunk.transpose(0, 1))
