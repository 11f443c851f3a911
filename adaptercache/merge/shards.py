"""A model's safetensors files: which tensor lies where, read and written one at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

import torch

from adaptercache.errors import AdapterInvalid, LoadFailed
from adaptercache.packing import bytes_of

__all__ = ["FLOATS", "Change", "Shard", "StoredTensor", "open_shards", "write_shard"]

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_INDEX = "*.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # the format's own bound
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: ``begin`` and ``end`` are bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Shard:
    """One file of a model, and what its header says.

    Its methods raise LoadFailed where it isn't the file any more that was opened: places by the old
    header in a new file would be other weights, and a half of each model is none.
    """

    path: Path
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    mark: tuple[int, ...]

    @contextmanager
    def _opened(self) -> Iterator[BufferedReader]:
        with self.path.open("rb") as file:
            yield file
            if _mark(file) != self.mark:
                raise LoadFailed(f"{self.path} was changed while it was read")

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """One tensor, in memory of its own. Its dtype is one of `FLOATS`."""
        buffer = bytearray(stored.end - stored.begin)
        with self._opened() as file:
            file.seek(stored.begin)
            if file.readinto(buffer) != len(buffer):
                raise _broken(self.path, stored.name, "the file ends before it")
        dtype = FLOATS[stored.dtype]
        if not buffer:
            return torch.empty(stored.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype).view(stored.shape)

    def pieces(self, stored: StoredTensor) -> Iterator[bytes]:
        """One tensor's bytes, whatever its dtype."""
        with self._opened() as file:
            file.seek(stored.begin)
            left = stored.end - stored.begin
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise _broken(self.path, stored.name, "the file ends before it")
                left -= len(piece)
                yield piece


def open_shards(path: Path) -> tuple[list[Shard], Path | None]:
    """The files of the model at ``path``, a safetensors file or a directory, and their index.

    Raises:
        AdapterInvalid: there are none, or one is broken.
    """
    if path.is_file():
        return [_open(path)], None
    indexes = sorted(path.glob(_INDEX))
    if len(indexes) > 1:
        raise _broken(path, None, f"several indexes: {', '.join(map(str, indexes))}")
    if indexes:
        names = _names_in(indexes[0])
        return [_open(path / name) for name in names], indexes[0]
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise AdapterInvalid(
            "the base model has no safetensors files",
            where=str(path),
            found=", ".join(sorted(each.name for each in path.glob("*"))[:5]) or "nothing",
            expected="model.safetensors, or shards with their index",
            remedy="save the base model as safetensors",
        )
    return [_open(file) for file in files], None


def _names_in(index: Path) -> list[str]:
    try:
        content = json.loads(index.read_bytes())
        names = sorted(set(content["weight_map"].values()))
        if not isinstance(content.get("metadata") or {}, dict):
            raise ValueError(f"metadata is {content['metadata']!r:.100}")
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        RecursionError,
    ) as error:
        raise _broken(index, None, error) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise _broken(index, None, f"a file called {name!r:.100}")
    return names


def _open(path: Path) -> Shard:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(file.read(length))
            mark = _mark(file)
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise ValueError(f"__metadata__ is {metadata!r:.100}")
        tensors = [_stored(name, entry, 8 + length, size) for name, entry in header.items()]
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        RecursionError,
    ) as error:
        raise _broken(path, None, error) from error
    return Shard(path, tuple(sorted(tensors, key=lambda each: each.begin)), metadata, mark)


def _mark(file: BufferedReader) -> tuple[int, ...]:
    """Which file it is, and which content of it."""
    info = os.fstat(file.fileno())
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _stored(name: str, entry: Mapping[str, Any], start: int, size: int) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
    begin, end = (start + int(offset) for offset in entry["data_offsets"])
    if not start <= begin <= end <= size or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name!r:.200} in bytes {begin} to {end} of {size}")
    if dtype in FLOATS and end - begin != math.prod(shape) * FLOATS[dtype].itemsize:
        raise ValueError(f"{name!r:.200}: {dtype} {shape} in {end - begin} bytes")
    return StoredTensor(name, dtype, shape, begin, end)


Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def write_shard(
    path: Path,
    shard: Shard,
    changes: Mapping[str, Change],
    copies: Mapping[str, tuple[str, Change]],
) -> None:
    """Write a shard anew, flushed to the device; takes memory for one tensor at a time.

    Args:
        path: must not exist.
        shard: the old one.
        changes: what becomes of some of its tensors, by name; dtype and shape stay.
        copies: tensors of which a second version is written too: its name, and what it becomes.
    """
    written: list[StoredTensor] = []
    for stored in shard.tensors:
        written.append(stored)
        if stored.name in copies:  # beside its like, so that it is aligned as that is
            written.append(replace(stored, name=copies[stored.name][0]))
    made = dict(copies.values())
    with path.open("xb") as file:
        file.write(_header(written, shard.metadata))
        for stored in written:
            change = made.get(stored.name) or changes.get(stored.name)
            if change is None:
                file.writelines(shard.pieces(stored))
                continue
            before = shard.read(stored)
            after = change(before).contiguous()
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            file.write(bytes_of(after))
            del before, after  # before the next is read
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for stored in tensors:
        begin, end = end, end + stored.end - stored.begin
        header[stored.name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _broken(path: Path, name: str | None, found: object) -> AdapterInvalid:
    where = str(path) if name is None else f"{path}: {name!r:.200}"
    return AdapterInvalid(
        "the base model's files are broken", where=where, found=found, expected="safetensors"
    )
