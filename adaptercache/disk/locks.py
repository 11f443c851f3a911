"""Locks between processes, on files. The system lets go of them when their holder dies, however.

They are `flock`'s: of an open file, so two threads of one process exclude each other too. Between
machines (NFS) they hold where the file system's locks do.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["claimed", "exclusive", "hold", "is_at", "remove_unclaimed", "seize"]


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Be the only one. ``path`` is made where it isn't there, and stays. Waits."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def claimed(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """The same, by a name of which nothing stays: the holder removes the file at its end.

    Args:
        wait: called while somebody else holds it; sleeps a little, or raises to give up.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _try(handle, fcntl.LOCK_EX):
                wait()
            elif is_at(handle, path):  # else the last holder has removed what we opened
                try:
                    yield
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(path)
                return
        finally:
            os.close(handle)


def remove_unclaimed(folder: Path) -> None:
    """Remove the files that holders who died have left: see `claimed`."""
    for path in folder.iterdir():
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            if _try(handle, fcntl.LOCK_EX) and is_at(handle, path):
                os.unlink(path)
        finally:
            os.close(handle)


def hold(folder: Path) -> int | None:
    """Hold a folder, among others who do: while anybody does, nobody can `seize` it.

    Returns:
        A file number to close, which ends it; None where the folder isn't there (any more).
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    fcntl.flock(handle, fcntl.LOCK_SH)  # who has seized it is quick
    if is_at(handle, folder):
        return handle
    os.close(handle)
    return None


def seize(folder: Path) -> int | None:
    """Hold a folder that nobody holds, alone; None where that can't be had now."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if _try(handle, fcntl.LOCK_EX) and is_at(handle, folder):
        return handle
    os.close(handle)
    return None


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file is (still) the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _try(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
