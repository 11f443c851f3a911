"""DISK: content under its digest, published whole or not at all.

    root/objects/<digest>/             adapter_config.json, the weight file, as published
                         /<layout digest>.safetensors        the packed file of a layout
    root/index/<hash of the id>.json   which content an id stood for, at which revision
    root/tmp/                          what is being written; emptied at the start

A folder appears under ``objects`` by one rename, after its files were flushed to the device. Its
name comes from the digest, never from an adapter's id.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from adaptercache.errors import LoadFailed
from adaptercache.identity import AdapterKey, Digest
from adaptercache.packing import PackedFile, bytes_of

__all__ = ["DiskTier"]

READ_BYTES = 8 << 20
READ_THREADS = 4


class DiskTier:
    """The local files. Decides nothing: budgets and victims are the ledger's.

    Thread-safe; all methods do I/O and belong to movers. ``changing`` is held around a change of
    ``objects`` together with the ledger's record of it, so that the two never disagree; it is
    never taken while the cache's lock is held.

    Args:
        root: its directory, made if it isn't there; None: a temporary one, removed by `close`.
    """

    def __init__(self, root: str | os.PathLike[str] | None) -> None:
        self._temporary_root = root is None
        self.root = Path(tempfile.mkdtemp(prefix="adaptercache-") if root is None else root)
        self._objects, self._index, self._tmp = (
            self.root / name for name in ("objects", "index", "tmp")
        )
        shutil.rmtree(self._tmp, ignore_errors=True)
        for folder in (self._objects, self._index, self._tmp):
            folder.mkdir(parents=True, exist_ok=True)
        self.changing = threading.Lock()
        self._readers = ThreadPoolExecutor(READ_THREADS, "adaptercache-disk")

    def scan(self) -> list[tuple[Digest, int]]:
        """All content that is here, with its bytes, the least recently written first."""
        found = []
        for folder in self._objects.iterdir():
            try:
                digest = bytes.fromhex(folder.name)
            except ValueError:
                continue
            found.append((folder.stat().st_mtime_ns, digest, self._size(folder)))
        return [(digest, size) for _, digest, size in sorted(found)]

    def size(self, digest: Digest) -> int:
        """Bytes of the files of one content."""
        return self._size(self.folder(digest))

    @staticmethod
    def _size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.iterdir())

    def folder(self, digest: Digest) -> Path:
        """Where content lies, if it is here."""
        return self._objects / digest.hex()

    def packed_path(self, digest: Digest, layout_digest: bytes) -> Path:
        """Where the packed file of a layout lies, if it is here."""
        return self.folder(digest) / f"{layout_digest.hex()}.safetensors"

    def new_folder(self) -> Path:
        """An empty folder for what is not published yet; the caller removes it if it fails."""
        folder = self._tmp / uuid.uuid4().hex
        folder.mkdir()
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a folder that was not published."""
        shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, digest: Digest) -> None:
        """Make a finished folder the content of ``digest``. Call with ``changing`` held.

        What is there already stays (it is the same content); packed files that it lacks are
        added.
        """
        _flush(folder)
        target = self.folder(digest)
        if target.is_dir():
            for file in folder.iterdir():
                if not (target / file.name).exists():
                    os.replace(file, target / file.name)
            _flush(target)
            self.discard(folder)
        else:
            os.rename(folder, target)
            _flush(self._objects)

    def delete(self, digest: Digest) -> None:
        """Remove content. Call with ``changing`` held, and only if the ledger has no copy."""
        doomed = self._tmp / uuid.uuid4().hex
        try:
            os.rename(self.folder(digest), doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def note(self, key: AdapterKey, digest: Digest) -> None:
        """Remember which content an id stands for."""
        path = self._note(key.adapter_id)
        fresh = self._tmp / uuid.uuid4().hex
        note = {"id": key.adapter_id, "revision": key.revision, "digest": digest.hex()}
        fresh.write_text(json.dumps(note))
        os.replace(fresh, path)

    def lookup(self, key: AdapterKey) -> Digest | None:
        """The content that an id stood for at this revision, if it is here."""
        try:
            note = json.loads(self._note(key.adapter_id).read_text())
            matches = (note["id"], note["revision"]) == (key.adapter_id, key.revision)
            digest = bytes.fromhex(note["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return digest if matches and self.folder(digest).is_dir() else None

    def _note(self, adapter_id: str) -> Path:
        name = hashlib.sha256(adapter_id.encode("utf-8", "surrogatepass")).hexdigest()
        return self._index / f"{name}.json"

    def read_into(self, packed: PackedFile, views: Sequence[Tensor]) -> None:
        """Read a packed file's vector into these tensors, with several threads.

        Args:
            views: ``uint8 [n]``, together as long as the vector.

        Raises:
            LoadFailed: the file ends early.
            OSError: it can't be read.
        """
        pieces: list[tuple[int, memoryview]] = []
        offset = packed.offset
        for view in views:
            data, steps = bytes_of(view), range(0, len(view), READ_BYTES)
            pieces += [(offset + at, data[at : at + READ_BYTES]) for at in steps]
            offset += len(data)
        file = os.open(packed.path, os.O_RDONLY)
        try:
            for _ in self._readers.map(lambda piece: _read(file, *piece), pieces):
                pass
        finally:
            os.close(file)

    def close(self) -> None:
        """Stop the readers; remove the directory if it was temporary."""
        self._readers.shutdown()
        if self._temporary_root:
            shutil.rmtree(self.root, ignore_errors=True)


def _read(file: int, offset: int, into: memoryview) -> None:
    while into:
        count = os.preadv(file, [into], offset)
        if count == 0:
            raise LoadFailed("the packed file ends early")
        offset, into = offset + count, into[count:]


def _flush(folder: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
