"""A cache's place among the processes that share a directory: a folder that says that it lives."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import uuid
import weakref
from contextlib import suppress
from pathlib import Path

from adaptercache.disk.locks import exclusive, remove_unclaimed

__all__ = ["Place"]


class Place:
    """Makes the directory, and in it a folder for what this cache is writing. Thread-safe.

    The folder is locked as long as its process lives, and removed by `close`, at the process' end,
    or by whoever next finds it unlocked.

    Args:
        root: of the disk tier; None: a temporary one, removed by `close`.
    """

    def __init__(self, root: str | os.PathLike[str] | None) -> None:
        given = tempfile.mkdtemp(prefix="adaptercache-") if root is None else root
        self.root = Path(given).absolute()  # wherever the process goes
        self._all = self.root / "tmp"
        self.own = self._all / uuid.uuid4().hex
        self._doomed = self.root if root is None else self.own
        self._lock = threading.Lock()
        self._shared = [self.root / name for name in ("objects", "index", "flights", "tmp")]
        self._alive = -1  # the lock on our own folder
        self._is_closed = False
        self._end: weakref.finalize[..., Place] | None = None

    @property
    def is_open(self) -> bool:
        return self._end is not None

    def open(self) -> None:
        """Take the place, if that hasn't been done, or folders of it have gone since; nothing once
        it was closed.

        Raises:
            OSError: the directory can't be written.
        """
        with self._lock:
            if self._is_closed:
                return
            folders = (*self._shared, self.own)
            if self._end is not None and all(map(Path.is_dir, folders)):
                return
            for folder in self._shared:  # anew, where somebody has tidied up here
                folder.mkdir(parents=True, exist_ok=True)
            if self._end is not None:
                if self.own.is_dir():  # still locked, and what is being written is in it
                    return
                self._end.detach()
                os.close(self._alive)
            with exclusive(self.root / "lock"):  # against another cache that starts here now
                self.remove_dead()
                remove_unclaimed(self.root / "flights")
                self.own.mkdir(exist_ok=True)
                self._alive = os.open(self.own, os.O_RDONLY)
                fcntl.flock(self._alive, fcntl.LOCK_EX)
            self._end = weakref.finalize(self, _remove, os.getpid(), self._alive, self._doomed)

    def fresh(self) -> Path:
        """A name that nobody has, on the same file system."""
        return self.own / uuid.uuid4().hex

    def remove_dead(self) -> None:
        """Remove what caches left that died: nobody holds the lock on their folder any more. Call
        with ``root/lock`` held."""
        for folder in self._all.iterdir():
            if folder == self.own:
                continue
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

    def close(self) -> None:
        """Give the place up, for good."""
        with self._lock:  # not in the midst of `open`, which would make anew what goes here
            self._is_closed = True
            if self._end is not None:
                self._end()
            else:
                shutil.rmtree(self._doomed, ignore_errors=True)


def _remove(owner: int, alive: int, folder: Path) -> None:
    if os.getpid() == owner:  # not at the end of a child that was forked
        # Renamed first: whoever publishes out of it meanwhile has done so by then, or fails. A
        # folder that is renamed while it is being removed would lose its files where it is now.
        doomed = folder.with_name(f"{folder.name}.gone")
        with suppress(OSError):
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    os.close(alive)
