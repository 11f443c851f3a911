"""A safetensors file, checked before it is believed.

Layout: the header's length (8 bytes, little-endian), the header (JSON: name → dtype, shape and
byte range), then the data. Every number in it was written by a stranger, so all of them are
checked against the file's own size before anything is allocated. The file is read, not mapped:
whoever cuts a mapped file short kills the process that looks at it, and whoever writes into it
changes weights that were checked. Reading is as lazy as mapping, and as fast once somebody looks.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import torch

from adaptercache.checkpoint.json_object import MOST_VALUES, parse_object
from adaptercache.checkpoint.memory import anonymous_memory
from adaptercache.checkpoint.stored import StoredTensors
from adaptercache.errors import AdapterCacheError, AdapterInvalid, LoadFailed
from adaptercache.regular_file import open_regular

__all__ = ["open_safetensors"]

_LONGEST_HEADER = 100_000_000  # the format's own bound
_SMALL_HEADER = 4 << 20
_MOST_DIMENSIONS = 16
_METADATA = "__metadata__"
_ALIGN = 64  # bytes: where a tensor may begin in memory

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Extent:
    """A tensor's dtype, shape and byte range, counted from the start of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@contextmanager
def open_safetensors(path: Path) -> Iterator[StoredTensors]:
    """The file's tensors: checked at once, by its header; each read when it is asked for.

    What is read lies in memory of its own, and outlives the file and the block. A tensor that
    nobody asks for is not read and takes no memory.

    Raises:
        AdapterInvalid: not a sound safetensors file.
        LoadFailed: the file was changed while it was open, whatever was found wrong with it.
        OSError: it can't be opened or read.
    """
    with open_regular(path) as file, _unchanged(file, path) as size:
        length = _header_length(file.read(8), size, path)
        # Parsed, a value takes up to 80 bytes: less than the file, or 20 MB.
        header = parse_object(
            file.read(length), f"{path}: its header", most_values=max(MOST_VALUES, size // 128)
        )
        extents = _check(header, size - 8 - length, path)
        outlines = {
            name: torch.empty(extent.shape, dtype=extent.dtype, device="meta")
            for name, extent in extents.items()
        }
        reader = _Reader(file.fileno(), path, 8 + length, extents)
        yield StoredTensors(outlines, reader.read)


@contextmanager
def _unchanged(file: BufferedReader, path: Path) -> Iterator[int]:
    """Yields the file's size. Raises LoadFailed at the end if somebody wrote to it meanwhile."""

    def mark() -> tuple[int, int]:
        info = os.fstat(file.fileno())
        return info.st_size, info.st_mtime_ns

    before = mark()
    try:
        yield before[0]
    except AdapterCacheError as error:  # perhaps nothing is wrong with what it was, or will be
        if mark() != before:
            raise LoadFailed(f"{path} was changed while it was read") from error
        raise
    if mark() != before:
        raise LoadFailed(f"{path} was changed while it was read")


def _header_length(prefix: bytes, size: int, path: Path) -> int:
    for opening, what, remedy in (
        (b"version ", "a git-lfs pointer, not the data", "run git lfs pull, then publish again"),
        (b"<", "an HTML or XML page, not the data", "the download was answered by an error page"),
        (b"PK\x03\x04", "a zip archive (a pickle?)", "save the adapter as safetensors"),
    ):
        if prefix.startswith(opening):
            raise AdapterInvalid(
                "not a safetensors file", where=str(path), found=what, remedy=remedy
            )
    if not size:
        raise AdapterInvalid(
            "the safetensors file is empty",
            where=str(path),
            found="0 bytes",
            remedy="copy or publish the file again, whole",
        )
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > size - 8:
        raise AdapterInvalid(
            "the safetensors header is longer than the file (truncated, or not safetensors)",
            where=str(path),
            found=f"a header of {length} bytes in a file of {size}",
            expected=f"at most {max(0, size - 8)} bytes",
        )
    # Parsed, a header takes many times its size; so it may be large only beside larger data.
    longest = min(_LONGEST_HEADER, max(_SMALL_HEADER, size // 8))
    if length > longest:
        raise AdapterInvalid(
            "the safetensors header is too long",
            where=str(path),
            found=f"{length} bytes",
            expected=f"at most {longest} in a file of {size} bytes",
        )
    return length


def _check(header: Mapping[str, Any], data_size: int, path: Path) -> dict[str, _Extent]:
    """Every entry well-formed, and together they tile the data: no gap, no overlap, no rest.

    Returns:
        The extents by name, in the order of the data.
    """
    found = [
        (name, _extent(name, entry, path)) for name, entry in header.items() if name != _METADATA
    ]
    extents = dict(sorted(found, key=lambda item: (item[1].begin, item[1].end)))
    position = 0
    for name, extent in extents.items():
        if extent.begin != position:
            raise AdapterInvalid(
                "the tensors of the safetensors file overlap or leave gaps",
                where=f"{path}: {name!r:.200}",
                found=f"starts at byte {extent.begin}",
                expected=f"starts at byte {position}",
            )
        position = extent.end
    if position != data_size:
        is_short = data_size < position
        raise AdapterInvalid(
            f"the safetensors file {'is truncated' if is_short else 'has bytes to spare'}",
            where=str(path),
            found=f"{data_size} bytes of data",
            expected=f"{position} bytes, as its header says",
            remedy="copy or publish the file again, whole" if is_short else "",
        )
    return extents


def _extent(name: str, entry: object, path: Path) -> _Extent:
    try:
        if not isinstance(entry, dict):
            raise ValueError(f"{entry!r:.80}")
        dtype = entry.get("dtype")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r:.40}")
        if not _are_sizes(shape) or not _is_shape(shape):
            raise ValueError(f"shape {shape!r:.80}")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"data_offsets {offsets!r:.80}")
        begin, end = offsets
        if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ValueError(f"{dtype} {shape!r:.80} in bytes {begin} to {end}")
    except ValueError as error:
        raise AdapterInvalid(
            "the safetensors header is broken", where=f"{path}: {name!r:.200}", found=error
        ) from error
    return _Extent(_DTYPES[dtype], tuple(shape), begin, end)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _is_shape(sizes: list[int]) -> bool:
    """Whether torch can count in it, also where one size is 0 and the product says nothing."""
    return len(sizes) <= _MOST_DIMENSIONS and math.prod(max(1, n) for n in sizes) < 1 << 56


class _Reader:
    """Reads tensors straight to where they stay: one copy, out of the page cache.

    Each begins at an aligned place in memory, wherever it does in the file.
    """

    def __init__(
        self, handle: int, path: Path, data_start: int, extents: Mapping[str, _Extent]
    ) -> None:
        self._handle, self._path, self._data_start = handle, path, data_start
        self._extents = extents
        self._places: dict[str, int] = {}
        total = 0
        for name, extent in extents.items():
            self._places[name] = total
            total += -(-(extent.end - extent.begin) // _ALIGN) * _ALIGN
        self._memory = anonymous_memory(total)
        self._read: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        if name not in self._read:
            extent, place = self._extents[name], self._places[name]
            size = extent.end - extent.begin
            self._fill(memoryview(self._memory)[place : place + size], extent.begin)
            self._read[name] = _view(self._memory, place, extent)
        return self._read[name]

    def _fill(self, into: memoryview, begin: int) -> None:
        offset = self._data_start + begin
        while into:
            count = os.preadv(self._handle, [into], offset)
            if count == 0:
                raise LoadFailed(f"{self._path} was changed while it was read")
            offset, into = offset + count, into[count:]


def _view(memory: mmap.mmap, start: int, extent: _Extent) -> torch.Tensor:
    count = (extent.end - extent.begin) // extent.dtype.itemsize
    if count == 0:
        return torch.empty(extent.shape, dtype=extent.dtype)
    flat = torch.frombuffer(memory, dtype=extent.dtype, count=count, offset=start)
    return flat.view(extent.shape)
