"""DISK: content under its digest, published whole or not at all.

    root/objects/<digest>/             adapter_config.json, the weight file, as published
                         /<layout digest>.safetensors        the packed file of a layout
    root/index/<hash of the id>.json   which content an id stood for, at which revision
    root/tmp/<cache>/                  what a running cache is writing; removed when it has died

A folder appears under ``objects`` by one rename, after its files were flushed to the device. Its
name comes from the digest, never from an adapter's id.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import uuid
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from cachetools import LRUCache
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
        self.root = Path(tempfile.mkdtemp(prefix="adaptercache-") if root is None else root)
        doomed = self.root if root is None else None
        self._objects, self._index, all_tmp = (
            self.root / name for name in ("objects", "index", "tmp")
        )
        for folder in (self._objects, self._index, all_tmp):
            folder.mkdir(parents=True, exist_ok=True)
        with open(self.root / "lock", "w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)  # against another cache that starts here now
            _remove_orphans(all_tmp)
            self._tmp = all_tmp / uuid.uuid4().hex
            self._tmp.mkdir()
            alive = os.open(self._tmp, os.O_RDONLY)
            fcntl.flock(alive, fcntl.LOCK_EX)  # dies with this process: see _remove_orphans
        self._end = weakref.finalize(self, _remove, os.getpid(), alive, doomed or self._tmp)
        self.changing = threading.Lock()
        self._verifying = threading.Lock()
        self._verified: LRUCache[tuple[int, int, int], None] = LRUCache(1 << 16)
        self._readers = ThreadPoolExecutor(READ_THREADS, "adaptercache-disk")

    def scan(self) -> list[tuple[Digest, int]]:
        """All content that is here, with its bytes, the least recently written first."""
        found = []
        for folder in self._objects.iterdir():
            try:
                digest = bytes.fromhex(folder.name)
                if len(digest) == 32:
                    found.append((folder.stat().st_mtime_ns, digest, self._size(folder)))
            except (ValueError, FileNotFoundError, NotADirectoryError):
                continue  # not ours, or another process has just deleted it
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

        Where it is there already, its files are replaced, one by one: it is the same content, but
        one of them may have been found broken.
        """
        _flush(folder)
        target = self.folder(digest)
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            for file in folder.iterdir():
                os.replace(file, target / file.name)
            _flush(target)
            self.discard(folder)
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

        The checksum is verified at the first read of a file by this process.

        Args:
            views: ``uint8 [n]``, together as long as the vector.

        Raises:
            LoadFailed: the file ends early, or its bytes are not those that were written.
            OSError: it can't be read.
        """
        self._read_pieces(packed, views)
        info = os.stat(packed.path)
        mark = (info.st_ino, info.st_mtime_ns, info.st_size)
        with self._verifying:
            is_known = mark in self._verified
        if not is_known:
            crc32 = 0
            for view in views:
                crc32 = zlib.crc32(bytes_of(view), crc32)
            if crc32 != packed.crc32:
                raise LoadFailed(f"the checksum of {packed.path} is wrong")
            with self._verifying:
                self._verified[mark] = None

    def _read_pieces(self, packed: PackedFile, views: Sequence[Tensor]) -> None:
        pieces: list[tuple[int, memoryview]] = []
        offset = packed.offset
        for view in views:
            data, steps = bytes_of(view), range(0, len(view), READ_BYTES)
            pieces += [(offset + at, data[at : at + READ_BYTES]) for at in steps]
            offset += len(data)
        file = os.open(packed.path, os.O_RDONLY)
        try:
            reads = [self._readers.submit(_read, file, *piece) for piece in pieces]
            wait(reads)  # all of them, also after a failure: they write into the views
            for read in reads:
                read.result()
        finally:
            os.close(file)

    def close(self) -> None:
        """Stop the readers; remove what is temporary."""
        self._readers.shutdown()
        self._end()


def _remove(owner: int, alive: int, folder: Path) -> None:
    if os.getpid() == owner:  # not at the end of a child that was forked
        shutil.rmtree(folder, ignore_errors=True)
    os.close(alive)


def _remove_orphans(all_tmp: Path) -> None:
    """Remove what caches left that died: nobody holds the lock on their folder any more."""
    for folder in all_tmp.iterdir():
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # its owner has just removed it
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # it lives
        finally:
            os.close(handle)


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
