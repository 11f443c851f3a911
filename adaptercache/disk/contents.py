"""Content on the disk: a folder a digest, there whole or not at all.

A folder appears by one rename, after its files were flushed to the device, and goes by one rename.
Its name comes from the digest, never from an adapter's id. When it was last used is its time of
modification, which all processes see.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachetools import LRUCache

from adaptercache.disk.locks import seize
from adaptercache.errors import AdapterInvalid
from adaptercache.identity import Digest
from adaptercache.regular_file import open_regular

__all__ = ["SUMS", "Contents", "Entry", "flush", "read_sums", "sums_size", "write_sums"]

SUMS = "files.json"
_TOUCH_EVERY_S = 1.0


class Entry(NamedTuple):
    """Content that is there: its bytes, and when it was last used (only the order counts)."""

    used_at: int
    digest: Digest
    size: int


class Contents:
    """The folders. Thread-safe; what changes them is called under the budget's lock."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._touched: LRUCache[Digest, float] = LRUCache(1 << 16)
        self._latest = 0

    def folder(self, digest: Digest) -> Path:
        return self._root / digest.hex()

    def scan(self) -> list[Entry]:
        """All that is here, the least recently used first."""
        found = []
        try:
            with os.scandir(self._root) as folders:
                names = [folder.name for folder in folders]
        except FileNotFoundError:  # of a disk that can only be read, and has nothing
            names = []
        for name in names:
            try:
                digest = bytes.fromhex(name)
                if len(digest) == 32:
                    path = f"{self._root}/{name}"
                    found.append(Entry(os.stat(path).st_mtime_ns, digest, _size(path)))
            except (ValueError, FileNotFoundError, NotADirectoryError):
                continue  # not ours, or another process has just removed it
        found.sort()
        with self._lock:
            self._latest = max(self._latest, found[-1].used_at if found else 0)
        return found

    def count(self) -> int:
        """How many contents are here."""
        try:
            return len(os.listdir(self._root))
        except FileNotFoundError:
            return 0

    def size(self, digest: Digest) -> int:
        """Bytes of the files of one content."""
        return _size(self.folder(digest))

    def growth(self, folder: Path, digest: Digest) -> int:
        """How many bytes more there will be once ``folder`` is published."""
        target, more = self.folder(digest), 0
        for file in os.scandir(folder):
            more += file.stat().st_size
            with suppress(FileNotFoundError):
                more -= os.stat(target / file.name).st_size
        return more

    def publish(self, folder: Path, digest: Digest) -> None:
        """Make a flushed folder the content of ``digest``. That is durable after `flush`.

        Where it is there already, its files are replaced, one by one: it is the same content, but
        one of them may have been found broken, or be new. Readers keep what they have open.
        """
        target = self.folder(digest)
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            names = os.listdir(folder)
            if SUMS in names:  # first out and last in: they never speak of other files
                (target / SUMS).unlink(missing_ok=True)
            for name in sorted(names, key=lambda name: name == SUMS):
                os.replace(folder / name, target / name)
            os.rmdir(folder)
        self.touch(digest, now=True)

    def flush(self, digest: Digest) -> None:
        """Have content outlast a loss of power."""
        with suppress(FileNotFoundError):  # another process has just evicted it
            flush(self.folder(digest))
        flush(self._root)

    def take_away(self, digest: Digest, to: Path, may_go: Callable[[Digest], bool]) -> int | None:
        """Rename content to ``to``, for the caller to remove, if ``may_go`` says yes.

        Returns:
            Its bytes; None where it isn't here, or somebody holds it, or it may not go.
        """
        handle = seize(self.folder(digest))
        if handle is None:
            return None
        try:
            if not may_go(digest):
                return None
            size = self.size(digest)
            os.rename(self.folder(digest), to)
        finally:
            os.close(handle)
        return size

    def touch(self, digest: Digest, *, now: bool = False) -> None:
        """It is used. Written down once a second at most, unless ``now``.

        The time never goes back, whatever the clock does: it is later than all that was seen.
        """
        with self._lock:
            moment = time.monotonic()
            if not now and moment - self._touched.get(digest, -_TOUCH_EVERY_S) < _TOUCH_EVERY_S:
                return
            self._touched[digest] = moment
            self._latest = at = max(time.time_ns(), self._latest + 1)
        with suppress(OSError):  # gone, or a disk that can only be read
            os.utime(self.folder(digest), ns=(at, at))


def _size(folder: str | Path) -> int:
    total = 0
    with os.scandir(folder) as files:
        for file in files:
            with suppress(FileNotFoundError):  # just removed: a packed file found broken, say
                total += file.stat().st_size
    return total


def flush(folder: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_sums(folder: Path, sums: Mapping[str, int]) -> None:
    """Write down the CRC-32 of the files as published, for ``adaptercache verify``."""
    with open(folder / SUMS, "xb") as file:
        file.write(_sums_text(sums))
        file.flush()
        os.fsync(file.fileno())


def sums_size(names: Iterable[str]) -> int:
    """Bytes of the file of the sums of files of these names."""
    return len(_sums_text(dict.fromkeys(names, 0)))


def _sums_text(sums: Mapping[str, int]) -> bytes:
    return json.dumps({name: f"{crc:08x}" for name, crc in sums.items()}).encode()


def read_sums(folder: Path) -> dict[str, int] | None:
    """The same, read back; None: there are none.

    Raises:
        ValueError: they are torn, or no sums.
        OSError: they can't be read.
    """
    try:
        with open_regular(folder / SUMS) as file:
            found = json.loads(file.read())
        return {str(name): int(crc, 16) for name, crc in found.items()}
    except FileNotFoundError:
        return None
    except (AdapterInvalid, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"these are no sums: {error!s:.200}") from error
