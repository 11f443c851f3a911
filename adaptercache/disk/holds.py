"""Content that this process is about to read, held so that no other process evicts it meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from adaptercache.disk.locks import hold
from adaptercache.identity import Digest

__all__ = ["Holds"]

LASTS_S = 10.0
MOST = 64


class Holds:
    """One hold a content, from when it was found or published until it was read: for some seconds
    at most, and for so many contents at most, the latest. Thread-safe.

    Args:
        folder_of: where content lies.
    """

    def __init__(self, folder_of: Callable[[Digest], Path]) -> None:
        self._folder_of = folder_of
        self._lock = threading.Lock()
        self._held: OrderedDict[Digest, tuple[int, float]] = OrderedDict()
        self._timer: threading.Timer | None = None
        self._closed = False

    def take(self, digest: Digest) -> bool:
        """Hold it, or hold it longer. False: it isn't there."""
        with self._lock:
            if self._closed:
                return False
            before = self._held.pop(digest, None)
            handle = before[0] if before is not None else hold(self._folder_of(digest))
            if handle is None:
                return False
            self._held[digest] = (handle, time.monotonic() + LASTS_S)
            if len(self._held) > MOST:
                self._let_go(next(iter(self._held)))
            if self._timer is None:
                self._start_timer()
            return True

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._held

    def drop(self, digest: Digest) -> None:
        """It was read, or is to be deleted."""
        with self._lock:
            if digest in self._held:
                self._let_go(digest)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for digest in list(self._held):
                self._let_go(digest)
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            if timer is not threading.current_thread():
                timer.join()

    def _let_go(self, digest: Digest) -> None:
        os.close(self._held.pop(digest)[0])

    def _start_timer(self) -> None:
        self._timer = threading.Timer(LASTS_S, self._drop_old)
        self._timer.name = "adaptercache-holds"
        self._timer.daemon = True
        self._timer.start()

    def _drop_old(self) -> None:
        """An idle process must not keep others from evicting."""
        with self._lock:
            now = time.monotonic()
            for digest in [digest for digest, (_, until) in self._held.items() if until <= now]:
                self._let_go(digest)
            self._timer = None
            if self._held and not self._closed:
                self._start_timer()
