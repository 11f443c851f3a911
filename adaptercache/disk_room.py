"""Room on the disk: what this cache's ledger knows, and what all processes have agreed on there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from adaptercache.identity import Digest
from adaptercache.ledger import Ledger
from adaptercache.stats import Tier
from adaptercache.tiers.disk import DiskTier

__all__ = ["ROOM_WAIT_S", "Claim", "DiskRoom", "NoRoom", "claimed"]

ROOM_WAIT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.05


class NoRoom(Exception):
    """All that is on the disk is held, and has been for as long as one waits. (Another try would
    wait as long again.)"""


class Claim:
    """Bytes that are set aside. ``nbytes`` is 0 once they have become content."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@contextmanager
def claimed(
    disk: DiskTier,
    nbytes: int,
    set_aside: Callable[[int], bool],
    deadline: float,
    make_room: Callable[[], object] = lambda: None,
) -> Iterator[Claim]:
    """Bytes of the disk's budget, set aside until they have become content.

    Args:
        set_aside: sets them aside, or says that all the rest is held.
        deadline: of the wait for somebody to let go of something, by `time.monotonic`.
        make_room: called before each wait; makes somebody let go, if it can.

    Raises:
        CapacityError: they can never fit.
        NoRoom: everything on the disk is held, and goes on being.
        OSError: the disk can't be written.
    """
    pause_s = FIRST_PAUSE_S
    while not set_aside(nbytes):
        if time.monotonic() > deadline:
            raise NoRoom("the disk tier is full of adapters that are being read")
        make_room()
        time.sleep(random.uniform(0, pause_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    claim = Claim(nbytes)
    try:
        yield claim
    finally:
        if claim.nbytes:
            disk.give_back(claim.nbytes)


class DiskRoom:
    """Evicts from the disk, and keeps the ledger's record of it true. Thread-safe; blocks.

    Args:
        lock: the cache's; taken for decisions only, and never while it is held by the caller.
    """

    def __init__(self, disk: DiskTier, ledger: Ledger, lock: threading.Lock) -> None:
        self._disk, self._ledger, self._lock = disk, ledger, lock

    def adopt(self) -> None:
        """Take over what earlier runs left on the disk, as far as the budget holds it."""
        found = self._disk.scan()
        with self._lock:
            for digest, size in found:
                self._ledger.disk.published(digest, size)
        self._disk.tidy({digest for digest, _ in found})
        with suppress(OSError):  # a disk that can't be written keeps what it has
            self.trim()

    def record(self, digest: Digest) -> None:
        """The ledger knows that the files are here. ``changing`` is held.

        Raises:
            FileNotFoundError: another process has just evicted them.
        """
        size = self._disk.size(digest)
        with self._lock:
            self._ledger.disk.published(digest, size)
            knows_too_much = self._ledger.disk.used > self._ledger.disk.num_bytes
        if knows_too_much:  # other processes have evicted some of it
            self._forget_all_but(frozenset(digest for digest, _ in self._disk.scan()))

    @contextmanager
    def claimed(self, nbytes: int) -> Iterator[Claim]:
        """Bytes of the disk's budget, set aside until they have become content.

        Raises:
            CapacityError: they can never fit.
            NoRoom: everything on the disk is being read, and goes on being.
            OSError: the disk can't be written.
        """
        deadline = time.monotonic() + ROOM_WAIT_S
        with claimed(self._disk, nbytes, self._set_aside, deadline) as claim:
            yield claim

    def trim(self) -> None:
        """Evict what the budget doesn't hold, as far as nobody reads it."""
        self._set_aside(0)

    def make_free(self, nbytes: int) -> bool:
        """Evict because the device is full. Returns whether anything went."""
        return self._disk.make_free(nbytes, self._give_up)

    def delete(self, digests: Iterable[Digest]) -> None:
        """Remove the files of content that was evicted, unless it has come back."""
        for digest in digests:
            with self._disk.changing:
                with self._lock:
                    is_back = self._ledger.disk.get(digest) is not None
                if not is_back:
                    self._disk.delete(digest)

    def drop(self, digest: Digest) -> None:
        """Evict content that nobody names any more and remove its files; later, if it is read."""
        with self._lock:
            copy = self._ledger.disk.get(digest)
            if copy is not None and copy.doomed and copy.idle:
                self._ledger.evict(Tier.DISK, digest, "superseded")
        self.delete([digest])

    def _set_aside(self, nbytes: int) -> bool:
        with self._disk.changing:
            room = self._disk.set_aside(nbytes, self._give_up)
            if room.present is not None:
                self._forget_all_but(room.present)
        return room.granted

    def _give_up(self, digest: Digest) -> bool:
        with self._lock:
            return self._ledger.give_up_on_disk(digest, "room")

    def _forget_all_but(self, present: frozenset[Digest]) -> None:
        """What other processes have evicted, as a count has shown. ``changing`` is held."""
        with self._lock:
            known = [copy.digest for copy in self._ledger.disk]
        for digest in known:
            if digest not in present:
                with self._lock:
                    self._ledger.give_up_on_disk(digest, "gone")
