"""A safetensors file, checked before it is believed, and mapped instead of read.

Layout: the header's length (8 bytes, little-endian), the header (JSON: name → dtype, shape and
byte range), then the data. Every number in it was written by a stranger, so all of them are
checked against the file's own size before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from adaptercache.checkpoint.json_object import parse_object
from adaptercache.errors import AdapterInvalid

__all__ = ["open_safetensors"]

_LONGEST_HEADER = 100_000_000  # the format's own bound
_MOST_DIMENSIONS = 16

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


def open_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors by name, as views of a private mapping of it.

    Nothing is read until a tensor is used. The mapping lives as long as any of the tensors; while
    it does, the file must not be truncated in place (replacing it by rename is fine). Writing to
    a tensor changes this process's copy, never the file.

    Raises:
        AdapterInvalid: not a sound safetensors file.
        OSError: it can't be opened or read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = _header_length(prefix, size, path)
        extents = _check(parse_object(file.read(length), str(path)), size - 8 - length, path)
        if not extents:
            return {}
        try:
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise AdapterInvalid("the file shrank while it was read", where=str(path)) from error
    start = 8 + length
    return {name: _view(mapping, start, extent) for name, extent in extents.items()}


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
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise AdapterInvalid(
            "the safetensors header is longer than the file (truncated, or not safetensors)",
            where=str(path),
            found=f"a header of {length} bytes in a file of {size}",
            expected=f"at most {max(0, min(size - 8, _LONGEST_HEADER))} bytes",
        )
    return length


def _check(header: Mapping[str, Any], data_size: int, path: Path) -> dict[str, _Extent]:
    """Every entry well-formed, and together they tile the data: no gap, no overlap, no rest."""
    extents = {
        name: _extent(name, entry, path) for name, entry in header.items() if name != "__metadata__"
    }
    position = 0
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].begin, item[1].end)):
        if extent.begin != position:
            raise AdapterInvalid(
                "the tensors of the safetensors file overlap or leave gaps",
                where=f"{path}: {name}",
                found=f"starts at byte {extent.begin}",
                expected=f"starts at byte {position}",
            )
        position = extent.end
    if position != data_size:
        raise AdapterInvalid(
            "the safetensors file is truncated or has bytes to spare",
            where=str(path),
            found=f"{data_size} bytes of data",
            expected=f"{position} bytes, as its header says",
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
        if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
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


def _view(mapping: mmap.mmap, start: int, extent: _Extent) -> torch.Tensor:
    begin, end, dtype = start + extent.begin, start + extent.end, extent.dtype
    if begin == end:
        return torch.empty(extent.shape, dtype=dtype)
    if begin % dtype.itemsize:  # a legal file, but no tensor can lie there
        flat = torch.frombuffer(bytearray(mapping[begin:end]), dtype=dtype)
    else:
        count = (end - begin) // dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=begin)
    return flat.view(extent.shape)
