"""What comes onto the disk and what goes, so that all processes together keep the budget."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from adaptercache.disk.budget import Budget
from adaptercache.disk.contents import Contents, Entry
from adaptercache.disk.holds import Holds
from adaptercache.disk.notes import Notes
from adaptercache.disk.place import Place
from adaptercache.errors import CapacityError
from adaptercache.identity import Digest

__all__ = ["Room", "Shelf"]

_MANY = 1000  # contents: from here on one count makes room for several downloads


class Room(NamedTuple):
    """Whether bytes were set aside; and what is here, where it was counted for that."""

    granted: bool
    present: frozenset[Digest] | None = None


class Shelf:
    """See `DiskTier`, which has the contracts. Thread-safe.

    Args:
        num_bytes: of the budget; None: there is none.
    """

    def __init__(
        self, place: Place, contents: Contents, notes: Notes, holds: Holds, num_bytes: int | None
    ) -> None:
        self._place, self._contents = place, contents
        self._notes, self._holds = notes, holds
        self._budget = Budget(place.root, place.own)
        self._num_bytes = num_bytes

    def publish(self, folder: Path, digest: Digest, claimed: int) -> None:
        with self._budget.locked():
            self._budget.add(max(0, self._contents.growth(folder, digest)))
            self._contents.publish(folder, digest)
            self._budget.claim(-claimed)
            self._holds.take(digest)

    def used(self) -> int:
        used = self._budget.used() if self._num_bytes is not None else None
        return sum(entry.size for entry in self._contents.scan()) if used is None else used

    def set_aside(self, nbytes: int, may_evict: Callable[[Digest], bool]) -> Room:
        self._place.open()
        limit = self._num_bytes
        if limit is None:
            return Room(True)
        if nbytes > limit:
            raise CapacityError("disk_bytes can't hold it", needed=nbytes, limit=limit)
        doomed: list[Path] = []
        with self._budget.locked():
            used, entries = self._budget.used(), None
            if used is None or used + nbytes > limit:
                self._place.remove_dead()  # and what they had set aside
                entries = self._contents.scan()
                used = sum(entry.size for entry in entries) + self._budget.claims()
                self._budget.set(used)
                excess = used + nbytes - limit
                if excess > 0:
                    spare = limit // 100 if len(entries) > _MANY else 0
                    doomed, freed = self._evict(entries, excess + spare, may_evict)
                    used -= freed
            granted = used + nbytes <= limit
            if granted:
                self._budget.claim(nbytes)
        remove(doomed)
        counted = frozenset(entry.digest for entry in entries) if entries is not None else None
        return Room(granted, counted)

    def give_back(self, nbytes: int) -> None:
        if self._num_bytes is not None:
            with self._budget.locked():
                self._budget.claim(-nbytes)

    def make_free(self, nbytes: int, may_evict: Callable[[Digest], bool]) -> bool:
        with self._budget.locked():
            doomed, _ = self._evict(self._contents.scan(), nbytes, may_evict)
        remove(doomed)
        return bool(doomed)

    def delete(self, digest: Digest) -> None:
        self._holds.drop(digest)
        with self._budget.locked():
            doomed, _ = self._evict([Entry(0, digest, 1)], 1, lambda digest: True)
        remove(doomed)

    def remove_file(self, file: Path) -> None:
        with self._budget.locked():
            size = file.stat().st_size
            file.unlink()
            self._budget.add(-size)

    def _evict(
        self, entries: Iterable[Entry], nbytes: int, may_evict: Callable[[Digest], bool]
    ) -> tuple[list[Path], int]:
        """Take contents away until ``nbytes`` have gone. Returns where they are now, for the caller
        to remove without the lock, and their bytes."""
        doomed, freed = [], 0
        # What we hold ourselves goes last, but it goes: holds keep other processes out.
        for entry in sorted(entries, key=lambda entry: entry.digest in self._holds):
            if freed >= nbytes:
                break
            self._holds.drop(entry.digest)  # our own would keep us out, too
            to = self._place.fresh()
            size = self._contents.take_away(entry.digest, to, may_evict)
            if size is not None:
                self._budget.add(-size)
                self._notes.forget(entry.digest)
                doomed.append(to)
                freed += size
        return doomed, freed


def remove(folders: Iterable[Path]) -> None:
    """Remove folders and what is in them, as far as that can be done."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
