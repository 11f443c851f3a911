"""Copies from CPU memory straight into cells: a page is a strided copy, made by the copy engine.

A page's cells lie one after the other in the vector, and as far apart as a row of the arena is
long on the GPU: rows of one two-dimensional copy. So nothing is staged and no kernel runs. The
driver has that copy, torch has not; it is called by its C name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from adaptercache.layout import ArenaShape

__all__ = ["Bytes", "CopyRows", "copy_rows_of", "lay_page"]

CopyRows: TypeAlias = Callable[[int, int, int, int, int], None]
"""``(to, pitch, source, width, height)``: rows of ``width`` bytes, side by side at the address
``source``, ``pitch`` bytes apart from the address ``to`` on; queued on a stream."""

_HOST, _DEVICE = 1, 2  # CUmemorytype


_SIDE = (
    ("XInBytes", ctypes.c_size_t),
    ("Y", ctypes.c_size_t),
    ("MemoryType", ctypes.c_int),
    ("Host", ctypes.c_void_p),
    ("Device", ctypes.c_uint64),
    ("Array", ctypes.c_void_p),
    ("Pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"src{name}", kind) for name, kind in _SIDE),
        *((f"dst{name}", kind) for name, kind in _SIDE),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


@cache
def _driver() -> Callable[..., int]:
    # Each call lets go of the interpreter: a step's launches get in between the pages.
    call = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    call.argtypes = [ctypes.POINTER(_Copy2D), ctypes.c_void_p]
    call.restype = ctypes.c_int
    return call


def copy_rows_of(device: torch.device) -> CopyRows:
    """Copies on the current stream of a GPU; on the CPU they are done when the call returns."""
    if device.type != "cuda":
        return _copy_rows_on_cpu
    call, copy = _driver(), _Copy2D(srcMemoryType=_HOST, dstMemoryType=_DEVICE)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    reference = ctypes.byref(copy)

    def copy_rows(to: int, pitch: int, source: int, width: int, height: int) -> None:
        copy.dstDevice, copy.dstPitch = to, pitch
        copy.srcHost, copy.srcPitch = source, width
        copy.WidthInBytes, copy.Height = width, height
        error = call(reference, stream)
        if error:
            raise RuntimeError(f"the driver refuses a strided copy (CUresult {error})")

    return copy_rows


def _copy_rows_on_cpu(to: int, pitch: int, source: int, width: int, height: int) -> None:
    for row in range(height):
        ctypes.memmove(to + row * pitch, source + row * width, width)


def lay_page(
    copy_rows: CopyRows, arena: int, shape: ArenaShape, page: int, pieces: Sequence[tuple[int, int]]
) -> None:
    """Bytes of a vector into the cells of one page, from its first on.

    Args:
        arena: its address.
        pieces: ``(address, bytes)`` in CPU memory, in order; no more than the page holds.
    """
    cell, pitch = shape.page_bytes, shape.num_pages * shape.page_bytes
    first = arena + page * cell
    at = 0  # bytes of the page
    for source, nbytes in pieces:
        while nbytes:
            row, column = divmod(at, cell)
            height = 0 if column else nbytes // cell
            if height:
                width = cell
            else:
                width, height = min(cell - column, nbytes), 1
            copy_rows(first + row * pitch + column, pitch, source, width, height)
            taken = width * height
            source, nbytes, at = source + taken, nbytes - taken, at + taken


class Bytes:
    """Pieces of CPU memory, read as one; keeps them alive."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces = pieces
        self._kept: list[Tensor] = []
        self._at = self._left = 0

    def take(self, nbytes: int) -> list[tuple[int, int]]:
        """The next ``nbytes``: ``(address, bytes)`` of each piece of them."""
        found = []
        while nbytes:
            while not self._left:
                piece = next(self._pieces)
                self._kept.append(piece)
                self._at, self._left = piece.data_ptr(), len(piece)
            here = min(nbytes, self._left)
            found.append((self._at, here))
            self._at, self._left, nbytes = self._at + here, self._left - here, nbytes - here
        return found
