"""Takes back what was forgotten: leases that nobody released, promises that nobody took up."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Literal

from adaptercache.deciding import Deciding, complain
from adaptercache.ledger import Ledger
from adaptercache.lifts import Lifts
from adaptercache.waiting import Grant

__all__ = ["Janitor"]

log = logging.getLogger(__name__)
PROMISE_S = 1.0  # how long pages stay promised to a request that doesn't take them
LOOK_AT_PROMISE: Final = "look at the promise"


class Janitor:
    """One thread, until `close`. It takes back leases that were garbage-collected, and ends a
    promise of KV pages that nobody takes up while a lease waits for room. Thread-safe."""

    def __init__(self, deciding: Deciding, ledger: Ledger, lifts: Lifts) -> None:
        self._deciding, self._ledger, self._lifts = deciding, ledger, lifts
        self._lapses = 0.0  # when the last promise ends
        self._told: SimpleQueue[Grant | Literal["look at the promise"] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._tidy_up, name="adaptercache-janitor", daemon=True
        )
        self._thread.start()

    def abandon(self, grant: Grant) -> None:
        """A lease was garbage-collected. Takes no lock, so a finalizer may call it anywhere."""
        self._told.put(grant)

    def has_promised(self) -> None:
        """A promise lasts from now on."""
        self._lapses = time.monotonic() + PROMISE_S

    def watch_promise(self) -> None:
        """Somebody waits for the promise's end."""
        self._told.put(LOOK_AT_PROMISE)

    def close(self) -> None:
        """Stop the thread. Without the cache's lock."""
        self._told.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _tidy_up(self) -> None:
        lapses: float | None = None
        while True:
            try:
                told = self._told.get(timeout=lapses and max(0.0, lapses - time.monotonic()))
            except Empty:
                lapses = None
                try:
                    with self._deciding:
                        lapses = self._end_promise()
                except BaseException:  # the thread must live on
                    complain("ending a promise of KV pages failed")
                continue
            if told is None:
                return
            if isinstance(told, Grant):
                self._take_back(told)
            elif lapses is None:
                lapses = self._lapses

    def _end_promise(self) -> float | None:
        """End the promise, unless there is a newer one by now: then returns when to look again."""
        if time.monotonic() < self._lapses:
            return self._lapses
        self._lifts.end_promise()
        return None

    def _take_back(self, grant: Grant) -> None:
        text = "a lease on %r was dropped unreleased"
        fields = {"adapter_id": grant.adapter_id}
        line = partial(log.warning, text, grant.adapter_id, extra=fields)
        try:
            with self._deciding.freeing():
                self._ledger.release(grant)
                self._ledger.outbox.append(line)
        except BaseException:  # the thread must live on
            complain("taking back a lease that was dropped failed")
