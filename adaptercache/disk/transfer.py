"""Files written and read by several threads: what comes from a source, and what goes to memory."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from cachetools import LRUCache
from torch import Tensor

from adaptercache.disk.crc import join_crc32
from adaptercache.errors import LoadFailed
from adaptercache.packing import PackedFile, bytes_of

__all__ = ["Stream", "Transfer", "flush_file", "mapped"]

READ_BYTES = 8 << 20
READ_THREADS = 4
SPAN_BYTES = 4 << 20  # a file is downloaded in spans of at least so many bytes
SPANS = 4
DOWNLOAD_THREADS = 16

Stream: TypeAlias = "Callable[[int, int], Iterator[bytes | memoryview]]"
"""Bytes ``[start, stop)`` of a file, in order, in pieces; a piece is valid until the next."""


class Transfer:
    """The threads. Thread-safe. Owns them until `close`."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(READ_THREADS, "adaptercache-disk")
        self._writers = ThreadPoolExecutor(DOWNLOAD_THREADS, "adaptercache-download")
        self._verifying = threading.Lock()
        self._verified: LRUCache[tuple[int, int, int], None] = LRUCache(1 << 16)

    # -- from a source

    def fill(self, path: Path, size: int, stream: Stream, look: Callable[[], None]) -> None:
        """Write a new file of ``size`` bytes, in spans side by side. It isn't flushed.

        Args:
            look: called between pieces; raises to give up.

        Raises:
            LoadFailed: the stream has other bytes than ``size``.
            Whatever ``stream`` and ``look`` raise.
        """
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _allocate(file, size)
        finally:
            os.close(file)
        step = max(SPAN_BYTES, -(-size // SPANS))
        spans = [(at, min(at + step, size)) for at in range(0, size, step)]
        if len(spans) < 2:
            for span in spans:
                _write_span(path, *span, stream, look)
            return
        given_up = threading.Event()

        def look_also_here() -> None:
            look()
            if given_up.is_set():
                raise LoadFailed("the download was given up")

        writes: list[Future[None]] = []
        try:
            writes.extend(
                self._writers.submit(_write_span, path, *span, stream, look_also_here)
                for span in spans
            )
            wait(writes)
            for write in writes:
                write.result()
        except BaseException:  # an interrupt doesn't wait for a source that hangs
            given_up.set()
            for write in writes:
                write.cancel()
            raise

    # -- to memory

    def read_into(
        self, packed: PackedFile, views: Sequence[Tensor], arrived: Callable[[int], None]
    ) -> None:
        """See `DiskTier.read_into`."""
        pieces: list[tuple[int, memoryview]] = []
        offset = packed.offset
        for view in views:
            data, steps = bytes_of(view), range(0, len(view), READ_BYTES)
            pieces += [(offset + at, data[at : at + READ_BYTES]) for at in steps]
            offset += len(data)
        file = os.open(packed.path, os.O_RDONLY)
        try:
            info = os.fstat(file)
            mark = (info.st_ino, info.st_mtime_ns, info.st_size)
            with self._verifying:
                read = _read if mark in self._verified else _read_and_sum
            reads: list[Future[int]] = []
            try:
                reads.extend(self._readers.submit(read, file, *piece) for piece in pieces)
                _tell(zip(reads, (len(into) for _, into in pieces), strict=True), arrived)
            finally:
                _outlast(reads)  # whatever failed: they write into our caller's memory
            sums = [each.result() for each in reads]
        finally:
            os.close(file)
        if read is _read:
            return
        if (
            join_crc32((crc, len(into)) for crc, (_, into) in zip(sums, pieces, strict=True))
            != packed.crc32
        ):
            raise LoadFailed(f"the checksum of {packed.path} is wrong")
        with self._verifying:
            self._verified[mark] = None

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()


def _tell(reads: Iterable[tuple[Future[int], int]], arrived: Callable[[int], None]) -> None:
    """Say how much has come from the beginning on, as the pieces come; nothing behind one that
    fails."""
    total = 0
    for each, nbytes in reads:
        if each.exception() is not None:
            return
        total += nbytes
        arrived(total)


def _outlast(futures: Iterable[Future[Any]]) -> None:
    """Wait until all have ended, also when interrupted: the interrupt is raised after that."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except BaseException as caught:
            interrupt = caught
    if interrupt is not None:
        raise interrupt


def _allocate(file: int, size: int) -> None:
    """Have the file system find the blocks at once: a full device says so before anything is
    downloaded, and many files that are written side by side take half as long."""
    try:
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_span(
    path: Path, start: int, stop: int, stream: Stream, look: Callable[[], None]
) -> None:
    # Opened here: whoever waits for this may be interrupted, and his file number be another's then.
    at, file = start, os.open(path, os.O_WRONLY)
    try:
        for piece in stream(start, stop):
            look()
            if at + len(piece) > stop:
                break
            at += _write(file, piece, at)
        else:
            if at == stop:
                return
    finally:
        os.close(file)
    raise LoadFailed(f"bytes {start} to {stop} of a file came as {at - start} bytes, or more")


def _write(file: int, piece: bytes | memoryview, at: int) -> int:
    left = memoryview(piece)
    while left:
        done = os.pwrite(file, left, at)
        at, left = at + done, left[done:]
    return len(piece)


def _read(file: int, offset: int, into: memoryview) -> int:
    while into:
        count = os.preadv(file, [into], offset)
        if count == 0:
            raise LoadFailed("the packed file ends early")
        offset, into = offset + count, into[count:]
    return 0


def _read_and_sum(file: int, offset: int, into: memoryview) -> int:
    _read(file, offset, into)
    return zlib.crc32(into)


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file of ours that nobody changes, without a copy."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    try:
        with memoryview(memory) as data:
            yield data
    finally:
        with suppress(BufferError):  # a failure's frames still look at it: they unmap it
            memory.close()


def flush_file(path: Path) -> None:
    """Make a file's bytes durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
