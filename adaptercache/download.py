"""What a source has of an adapter, brought into a folder on the disk: whole, checked, flushed."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from cachetools import TTLCache

from adaptercache.disk.contents import write_sums
from adaptercache.disk.transfer import flush_file, mapped
from adaptercache.disk_room import NoRoom
from adaptercache.errors import AdapterNotFound, CacheClosed, LoadFailed
from adaptercache.identity import AdapterKey
from adaptercache.source_files import check_names, name_of, stream_of
from adaptercache.tiers.disk import FULL, DiskTier
from adaptercache.tiers.remote import Source

__all__ = ["Downloads", "files_of", "tried_again"]

MISSING_TTL_S, MOST_MISSING = 10.0, 1024
FLIGHT_PAUSE_S = 0.01
TRIES = 3

T = TypeVar("T")


class Downloads:
    """Asks sources, and copies from them. Thread-safe; blocks.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, disk: DiskTier, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._missing: TTLCache[str, str] = TTLCache(MOST_MISSING, MISSING_TTL_S, clock)
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def look_again(self, adapter_id: str) -> None:
        """Whether it was missing a short while ago doesn't matter now."""
        with self._lock:
            self._missing.pop(adapter_id, None)

    def close(self) -> None:
        """Give up what is being downloaded, and waiting for others who do."""
        self._closing.set()

    def revision(self, source: Source, adapter_id: str, *, may_remember: bool = True) -> str:
        """What the source says now. That an adapter is missing is remembered for some seconds.

        Raises:
            AdapterNotFound: the source has none of that id, or hadn't a moment ago.
            AdapterCacheError, OSError: as the source raises them.
        """
        with self._lock:
            missing = self._missing.get(adapter_id)
        if missing is not None and may_remember:
            raise AdapterNotFound(missing, adapter_id=adapter_id)
        try:
            return source.revision(adapter_id)
        except AdapterNotFound as error:
            if may_remember:
                with self._lock:
                    self._missing[adapter_id] = error.what
            if (name := name_of(source)) is not None:
                with suppress(OSError):  # it is not what the disk had last, in any process
                    self._disk.forget(adapter_id, name)
            raise

    def wait(self) -> None:
        """Wait a little for another who brings an adapter here.

        Raises:
            CacheClosed: nobody waits any more.
        """
        if self._closing.wait(FLIGHT_PAUSE_S):
            raise CacheClosed()

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def look(self) -> None:
        """Go on, or raise CacheClosed: `close` was called."""
        if self.is_closed:
            raise CacheClosed()

    def bring(
        self, source: Source, key: AdapterKey, files: Mapping[str, int], folder: Path
    ) -> None:
        """Write these files of an adapter and their sums, whole and flushed.

        Args:
            files: what `files_of` has said.

        Raises:
            LoadFailed: the source has other bytes than it declares, or others by now.
            CacheClosed: `close` was called.
            AdapterCacheError, OSError: as the source raises them.
        """
        sums = {
            name: self._copy(source, key, name, size, folder / name) for name, size in files.items()
        }
        write_sums(folder, sums)

    def _copy(self, source: Source, key: AdapterKey, name: str, size: int, to: Path) -> int:
        """Bring one file here. Returns its CRC-32."""
        self._disk.fill(to, size, stream_of(source, key, name), self.look)
        with mapped(to) as data:
            check = getattr(source, "check", None)
            if check is not None:
                check(key.adapter_id, key.revision, name, data)
            crc = zlib.crc32(data)
        flush_file(to)
        return crc


def tried_again(act: Callable[[], T], make_free: Callable[[], bool]) -> T:
    """What ``act`` gives, tried up to three times: an adapter may be rewritten while it is read,
    and the device may be full before the budget is.

    Args:
        make_free: evicts something for the device's sake; False: there is nothing.
    """
    for attempt in range(TRIES):
        is_last = attempt == TRIES - 1
        try:
            return act()
        except NoRoom as error:
            raise LoadFailed(str(error)) from None
        except LoadFailed:  # rewritten while we read it: the next revision may hold still
            if is_last:
                raise
        except OSError as error:
            # The device is full before the budget is: somebody else writes there, too.
            if error.errno not in FULL or is_last or not make_free():
                raise
    raise AssertionError("unreachable")


def files_of(source: Source, key: AdapterKey) -> Mapping[str, int]:
    """Names and sizes of an adapter's files.

    Raises:
        AdapterInvalid: a name leads out of a folder, or is one that our own files have there.
    """
    files = source.files(key.adapter_id, key.revision)
    check_names(files)
    return files
