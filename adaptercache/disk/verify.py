"""Every byte of a disk tier, compared with what was written down of it.

Runs beside caches that use the directory: content is held while it is looked at.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import ReadOptions, read_checkpoint
from adaptercache.disk.contents import SUMS, Contents, read_sums
from adaptercache.disk.locks import hold
from adaptercache.disk.transfer import mapped
from adaptercache.errors import AdapterCacheError
from adaptercache.packing import PACKED_FORMAT, seal_of

__all__ = ["Finding", "verify"]

_PACKED = re.compile(r"([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True, slots=True)
class Finding:
    """One content: its files, their bytes, and what is wrong with them (nothing: it is sound).

    ``unsummed`` are files of which nothing was written down.
    """

    digest: str
    files: int
    nbytes: int
    wrong: tuple[str, ...]
    unsummed: tuple[str, ...]


def verify(
    root: Path, base: BaseModel | None = None, options: ReadOptions | None = None
) -> Iterator[Finding]:
    """Look at all content of the disk tier in ``root``.

    Files as published are compared with their checksums, packed files with theirs and with the
    content that they are of. With ``base``, the digest is computed again from the files.

    Raises:
        NotADirectoryError: there is no disk tier.
    """
    if not (root / "objects").is_dir():
        raise NotADirectoryError(f"{root} is no directory of a disk tier: it has no 'objects'")
    contents = Contents(root / "objects")
    for entry in contents.scan():
        handle = hold(contents.folder(entry.digest))
        if handle is None:  # evicted meanwhile
            continue
        try:
            yield _look(contents.folder(entry.digest), base, options or ReadOptions())
        finally:
            os.close(handle)


def _look(folder: Path, base: BaseModel | None, options: ReadOptions) -> Finding:
    sums, wrong = {}, []
    try:
        sums = read_sums(folder) or {}
    except (ValueError, OSError) as error:
        wrong.append(f"{SUMS}: {error}")
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    wrong += [f"{name}: missing" for name in sums if not (folder / name).exists()]
    unsummed, nbytes = [], 0
    for file in files:
        try:
            _expect(file.is_file(), "not a file")
            nbytes += file.stat().st_size
            if packed := _PACKED.fullmatch(file.name):
                _check_packed(file, packed[1], folder.name)
            elif file.name not in sums:
                unsummed.append(file.name)
            else:
                with mapped(file) as data:
                    _expect(zlib.crc32(data) == sums[file.name], "the checksum is wrong")
        except (ValueError, OSError) as error:
            wrong.append(f"{file.name}: {error}")
    if base is not None and sums:
        wrong += _digest_again(folder, base, options)
    return Finding(folder.name, len(files), nbytes, tuple(wrong), tuple(unsummed))


def _digest_again(folder: Path, base: BaseModel, options: ReadOptions) -> list[str]:
    try:
        found = read_checkpoint(folder, base, options=options).digest.hex()
    except AdapterCacheError as error:
        return [str(error)]
    return [] if found == folder.name else [f"the content's digest is {found}"]


def _check_packed(path: Path, layout_digest: str, content: str) -> None:
    """All that can be said without the layout. Raises ValueError."""
    with mapped(path) as data:
        length = int.from_bytes(data[:8], "little")
        _expect(8 + length <= len(data), "it is cut short")
        header = _parsed(bytes(data[8 : 8 + length]))
        facts = dict(header["__metadata__"])
        seal = facts.pop("header_crc32", "")
        _expect(facts.get("format") == PACKED_FORMAT, "it is no packed file")
        _expect(seal == seal_of(facts), "its header has changed")
        _expect(facts["content_digest"] == content, "it is of other content")
        _expect(facts["layout_digest"] == layout_digest, "it is of another layout")
        vector = data[8 + length :]
        _expect(header["vector"]["data_offsets"] == [0, len(vector)], "it is cut short")
        _expect(f"{zlib.crc32(vector):08x}" == facts["crc32"], "the checksum is wrong")
        vector.release()


def _parsed(text: bytes) -> dict[str, dict[str, object]]:
    try:
        header = json.loads(text)
        _expect(header["__metadata__"].keys() and header["vector"].keys(), "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its header has changed") from error
    parsed: dict[str, dict[str, object]] = header
    return parsed


def _expect(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(what)
