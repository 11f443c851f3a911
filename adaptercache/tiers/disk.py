"""DISK: content under its digest, published whole or not at all, shared by a host's processes.

root/objects/<digest>/             adapter_config.json and the weight file as published, and
                                   files.json, their sums
                     /<layout digest>.safetensors        the packed file of a layout
root/index/<hash of the id>.json   which content an id stood for, at which revision
root/flights/<hash of the id>      locked by the process that brings the adapter here
root/tmp/<cache>/                  what a running cache is writing; removed when it has died
root/lock, root/used               the budget: see `adaptercache.disk.budget`
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from torch import Tensor

from adaptercache.disk.contents import Contents, flush
from adaptercache.disk.holds import Holds
from adaptercache.disk.locks import claimed, hold
from adaptercache.disk.notes import Notes
from adaptercache.disk.place import Place
from adaptercache.disk.shelf import Room, Shelf, remove
from adaptercache.disk.transfer import Stream, Transfer
from adaptercache.errors import AdapterCacheError, CapacityError
from adaptercache.identity import AdapterKey, Digest
from adaptercache.packing import PackedFile

__all__ = ["FULL", "DiskTier"]

log = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM}) | FULL


class DiskTier:
    """The local files. Any number of processes, each with its own `DiskTier`, share one directory.

    Thread-safe; all methods do I/O and belong to movers. ``changing`` is held around a change of
    ``objects`` together with the ledger's record of it; it is never taken while the cache's lock
    is held. What another process evicts, this one finds out when it reads.

    A disk that can't be written serves what is on it; what needs to write raises OSError.

    Args:
        root: its directory, made if it isn't there; None: a temporary one, removed by `close`.
        num_bytes: the budget that all processes keep together; None: there is none.
    """

    def __init__(self, root: str | os.PathLike[str] | None, num_bytes: int | None = None) -> None:
        self._place = Place(root)
        self.root = self._place.root
        self._contents = Contents(self.root / "objects")
        self._notes = Notes(self.root / "index", self._place.fresh, self._is_here)
        self._holds = Holds(self.folder)
        self._shelf = Shelf(self._place, self._contents, self._notes, self._holds, num_bytes)
        self._transfer = Transfer()
        self._said: set[str] = set()
        self.changing = Lock()
        try:
            self._place.open()
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            self.say_once(f"{self.root} can't be written: it serves what is there ({error})")

    def say_once(self, text: str) -> None:
        """A warning; the same again is not logged."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)

    # -- what is here

    def scan(self) -> list[tuple[Digest, int]]:
        """All content that is here, with its bytes, the least recently used first."""
        return [(entry.digest, entry.size) for entry in self._contents.scan()]

    def count(self) -> int:
        """How many contents are here."""
        return self._contents.count()

    def used(self) -> int:
        """Bytes of all content, and what downloads have set aside: by the count that all processes
        keep where there is a budget, which is never below the truth."""
        return self._shelf.used()

    def tidy(self, present: Collection[Digest]) -> None:
        """Remove the notes of what isn't here; for the start, with what `scan` has found."""
        if self._place.is_open:
            self._notes.sweep(present)

    def size(self, digest: Digest) -> int:
        """Bytes of the files of one content."""
        return self._contents.size(digest)

    def folder(self, digest: Digest) -> Path:
        """Where content lies, if it is here."""
        return self._contents.folder(digest)

    def packed_path(self, digest: Digest, layout_digest: bytes) -> Path:
        """Where the packed file of a layout lies, if it is here."""
        return self.folder(digest) / f"{layout_digest.hex()}.safetensors"

    def _is_here(self, digest: Digest) -> bool:
        return self.folder(digest).is_dir()

    def note(self, key: AdapterKey, digest: Digest, source: str | None = None) -> None:
        """Remember which content an id stands for, in the source of that name."""
        self._notes.write(key, digest, source)

    def last(self, adapter_id: str, source: str) -> AdapterKey | None:
        """What an id was when that source was last asked, if its content is here."""
        return self._notes.last(adapter_id, source)

    def lookup(self, key: AdapterKey, source: str | None = None) -> Digest | None:
        """The content that an id stood for at this revision, if it is here, and unless it was the
        revision of a source of another name."""
        return self._notes.find(key, source)

    def forget(self, adapter_id: str, source: str | None) -> None:
        """An id stands for nothing (any more) in the source of that name; None: in one without a
        name. Content stays, and so does what the id is in other sources.

        Raises:
            OSError: the disk can't be written.
        """
        self._notes.forget_id(adapter_id, source)

    def hold(self, digest: Digest) -> bool:
        """Keep content from being evicted until it was read, for some seconds. A use of it.

        Returns:
            False where it isn't here.
        """
        is_here = self._holds.take(digest)
        if is_here:
            self._contents.touch(digest)
        return is_here

    # -- what comes

    @contextmanager
    def flight(self, adapter_id: str, wait: Callable[[], None]) -> Iterator[None]:
        """Be the only one, of all processes, who brings an adapter here.

        Args:
            wait: called while somebody else does; sleeps a little, or raises to give up.

        Raises:
            OSError: the disk can't be written.
        """
        self._place.open()
        name = hashlib.sha256(adapter_id.encode("utf-8", "surrogatepass")).hexdigest()
        with claimed(self.root / "flights" / name, wait):
            yield

    def new_folder(self) -> Path:
        """An empty folder for what is not published yet; the caller removes it if it fails."""
        folder = self._place.fresh()
        folder.mkdir()
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a folder that was not published."""
        remove([folder])

    def fill(self, path: Path, size: int, stream: Stream, look: Callable[[], None]) -> None:
        """Write a new file of ``size`` bytes with several threads: see `Transfer.fill`."""
        self._transfer.fill(path, size, stream, look)

    def set_aside(self, nbytes: int, may_evict: Callable[[Digest], bool]) -> Room:
        """Set bytes of the budget aside for what will be written. What was not used for longest by
        any process is evicted for it, as far as nobody reads it.

        Args:
            may_evict: asked about each that could go; it goes if the answer is yes.

        Raises:
            CapacityError: it can never fit.
            OSError: the disk can't be written.
        """
        return self._shelf.set_aside(nbytes, may_evict)

    def give_back(self, nbytes: int) -> None:
        """Bytes that were set aside are not needed any more."""
        self._shelf.give_back(nbytes)

    def publish(self, folder: Path, digest: Digest, claimed: int = 0) -> None:
        """Make a finished folder the content of ``digest``, and hold that. Call with ``changing``
        held, between `seal` and `make_durable`: these wait for the device, and nobody else should.

        Where it is there already, its files are replaced, one by one: it is the same content, but
        one of them may have been found broken.

        Args:
            claimed: bytes that were set aside for it, and are no longer.
        """
        self._shelf.publish(folder, digest, claimed)

    def seal(self, folder: Path) -> None:
        """A folder whose files are flushed has all that it will have: flush that, too.

        Raises:
            OSError: the disk can't be written.
        """
        flush(folder)

    def make_durable(self, digest: Digest) -> None:
        """Have what was published outlast a loss of power; if that fails, it is there till then."""
        try:
            self._contents.flush(digest)
        except OSError as error:
            self.say_once(f"{self.root}: what is new may not outlast a loss of power ({error})")

    # -- what goes

    def make_free(self, nbytes: int, may_evict: Callable[[Digest], bool]) -> bool:
        """Evict though the budget doesn't ask for it: the device itself is full.

        Returns:
            Whether anything went.
        """
        return self._shelf.make_free(nbytes, may_evict)

    def delete(self, digest: Digest) -> None:
        """Remove content, unless another process reads it: then it goes when room is needed. Call
        with ``changing`` held, and only if the ledger has no copy."""
        self._shelf.delete(digest)

    # -- what is read

    @contextmanager
    def reading(self, digest: Digest) -> Iterator[None]:
        """Keep content from being evicted while it is read.

        Raises:
            FileNotFoundError: it isn't here; another process may have evicted it.
        """
        handle = hold(self.folder(digest))
        if handle is None:
            raise FileNotFoundError(errno.ENOENT, "not on the disk any more", digest.hex())
        try:
            self._contents.touch(digest)
            yield
        finally:
            os.close(handle)
            self._holds.drop(digest)

    @contextmanager
    def rejecting(self, packed: Path) -> Iterator[None]:
        """Remove a packed file that turns out to be broken, so that it is made anew."""
        try:
            yield
        except CapacityError:  # of CPU memory
            raise
        except (AdapterCacheError, OSError):
            with suppress(OSError):
                self._shelf.remove_file(packed)
            raise

    def read_into(
        self,
        packed: PackedFile,
        views: Sequence[Tensor],
        arrived: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Read a packed file's vector into these tensors, with several threads.

        The checksum is verified at the first read of a file by this process.

        Args:
            views: ``uint8 [n]``, together as long as the vector.
            arrived: called on this thread, as the bytes come, with how many of them, from the
                beginning on, are in place. That they are the right ones is known only in the end.

        Raises:
            LoadFailed: the file ends early, or its bytes are not those that were written.
            OSError: it can't be read.
        """
        self._transfer.read_into(packed, views, arrived)

    def close(self) -> None:
        """Stop the threads; remove what is temporary."""
        self._holds.close()
        self._transfer.close()
        self._place.close()
