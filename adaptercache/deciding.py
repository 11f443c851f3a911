"""The cache's one lock, and what is done when it is let go.

The lock covers decisions only: microseconds on plain tables. Whatever takes longer, or is a
user's code, is put on the ledger's outbox meanwhile and run after the lock is released.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from adaptercache.errors import CacheClosed
from adaptercache.ledger import Ledger

__all__ = ["Deciding"]

log = logging.getLogger(__name__)


def complain(text: str) -> None:
    """Log the exception that is being handled, whatever the handlers of `logging` do."""
    with suppress(Exception):
        log.exception(text)


class Deciding:
    """``with deciding:`` holds the lock; then whatever can be started now is started.

    Not reentrant. Thread-safe.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self._process = os.getpid()
        self.advance: Callable[[], None] = lambda: None
        """Starts what can be started; called with the lock held."""
        self._ledger = ledger

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.go_on()
        finally:
            self.lock.release()
        self.tell()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Hold the lock; what was put on the outbox is told afterwards, whatever is raised."""
        try:
            with self.lock:
                yield
        finally:
            self.tell()

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Hold the lock; then, if a pending lease waits for room, see whether it has come."""
        with self.lock:
            yield
            if self._ledger.waiting.needs_room:
                self.go_on()
        self.tell()

    def go_on(self) -> None:
        """Start what can be started now. Call with the lock held."""
        if not self.closed:
            self.advance()

    def check_open(self) -> None:
        """Raises CacheClosed once the cache is closed, RuntimeError in a forked child, which has
        none of the threads. Call with the lock held."""
        if self.closed:
            raise CacheClosed()
        if os.getpid() != self._process:
            raise RuntimeError("this cache was made before the fork: make one in each process")

    def tell(self) -> None:
        """Run what is on the outbox: futures, hooks, log lines. Without the lock."""
        if not self._ledger.outbox:
            return
        with self.lock:
            acts, self._ledger.outbox = self._ledger.outbox, []
        interrupt: BaseException | None = None
        for act in acts:  # each is somebody's own: none keeps the next from being run
            try:
                act()
            except KeyboardInterrupt as caught:
                interrupt = caught
            except BaseException:
                complain("a hook, or a handler of logging, failed")
        if interrupt is not None:
            raise interrupt
