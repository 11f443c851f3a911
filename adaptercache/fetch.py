"""REMOTE → DISK: from a source's files to a packed file, whole, under its content's digest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from adaptercache.catalog import Known
from adaptercache.checkpoint import Checkpoint, ReadOptions, read_checkpoint
from adaptercache.disk.contents import sums_size
from adaptercache.disk_room import DiskRoom
from adaptercache.download import Downloads, files_of, tried_again
from adaptercache.errors import (
    AdapterCacheError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    LoadFailed,
)
from adaptercache.identity import AdapterKey, Digest
from adaptercache.layout import LoraLayout
from adaptercache.packing import (
    VectorSpec,
    pack,
    packed_size,
    read_packed_header,
    spec_of,
    write_packed,
)
from adaptercache.source_files import name_of
from adaptercache.tiers.disk import DiskTier
from adaptercache.tiers.remote import Source, TensorSource

__all__ = ["Fetched", "Fetcher"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What is on disk now: ``nbytes`` were read from the source (0: it was here).

    ``unasked``: why the source couldn't be asked. Then it is what the disk had last.
    """

    key: AdapterKey
    digest: Digest
    elements: int
    nbytes: int
    unasked: AdapterCacheError | None = None


class Fetcher:
    """Brings adapters onto the disk. Thread-safe; runs on movers, and blocks.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        source: Source | None,
        puts: TensorSource,
        disk: DiskTier,
        room: DiskRoom,
        layout: LoraLayout,
        options: ReadOptions,
        clock: Callable[[], float],
    ) -> None:
        self._source, self._puts = source, puts
        self._disk, self._room = disk, room
        self._layout = layout
        self._options = options
        self._downloads = Downloads(disk, clock)
        # Downloads wait for the network, many side by side; this takes cores and memory.
        self._packing = threading.BoundedSemaphore(min(4, os.cpu_count() or 1))
        self._removed: set[str] = set()  # ids of which the disk may still have a note

    def look_again(self, adapter_id: str) -> None:
        """Whether it was missing a short while ago doesn't matter now."""
        self._downloads.look_again(adapter_id)

    def removed(self, adapter_id: str) -> None:
        """What the disk had last of this id is not served from now on. Doesn't block."""
        self._removed.add(adapter_id)

    def forget_removed(self, adapter_id: str) -> None:
        """Have the disk forget what it had of an id that was `removed`: from our source, or put.
        What another process has under that id from a source of another name is not ours.

        Raises:
            OSError: the disk can't be written.
        """
        if adapter_id in self._removed:
            for name in {name_of(self._source), name_of(self._puts)}:
                self._disk.forget(adapter_id, name)
            self._removed.discard(adapter_id)

    def close(self) -> None:
        """Give up what is being downloaded, and waiting for others who do."""
        self._downloads.close()

    def fetch(self, adapter_id: str, known: Known | None = None) -> Fetched:
        """The adapter as its source has it now, packed and on disk.

        Args:
            known: what a tier has of it; if the source still has that, nothing is brought.

        Raises:
            AdapterCacheError, OSError: as the source's methods, `read_checkpoint` and `pack` do.
        """
        with suppress(OSError):  # before it says what the id is now
            self.forget_removed(adapter_id)
        return tried_again(lambda: self._fetch(adapter_id, known), self._make_free)

    def _fetch(self, adapter_id: str, known: Known | None) -> Fetched:
        source = self._puts if adapter_id in self._puts else self._source
        try:
            key = AdapterKey(adapter_id, self._revision(source, adapter_id))
        except (LoadFailed, OSError) as error:
            if known is None and (last := self._last(source, adapter_id)) is not None:
                what = "the source can't be asked; what the disk had last is served"
                unasked = LoadFailed(what, adapter_id=adapter_id)
                unasked.__cause__ = error
                return replace(last, unasked=unasked)
            raise
        assert source is not None, "it has just told the revision"
        if known is not None and known.revision == key.revision:
            return Fetched(key, known.digest, known.elements, 0)
        name = name_of(source)
        found = self._find(key, name)
        if found is not None:
            return found
        with self._disk.flight(adapter_id, self._downloads.wait):
            # Another process may have brought it here meanwhile.
            found = self._find(key, name) or self._rebuild(source, key)
            return found or self._download(source, key)

    def _last(self, source: Source | None, adapter_id: str) -> Fetched | None:
        """What an id was when this source could be asked, if the disk has it whole."""
        name = name_of(source)
        if name is None or adapter_id in self._removed:
            return None
        key = self._disk.last(adapter_id, name)
        if key is None or (found := self._find(key, name)) is not None:
            return found if key is not None else None
        with self._disk.flight(adapter_id, self._downloads.wait):
            return self._find(key, name) or self._rebuild(source, key)

    def _revision(self, source: Source | None, adapter_id: str) -> str:
        if source is None:
            raise AdapterNotFound("there is no source", adapter_id=adapter_id)
        is_put = source is self._puts
        return self._downloads.revision(source, adapter_id, may_remember=not is_put)

    # -- what is on the disk already

    def _find(self, key: AdapterKey, source: str | None) -> Fetched | None:
        """What the disk has, packed for our layout, of an id at this revision of that source."""
        digest = self._held(key, source)
        spec = self._packed_spec(digest) if digest is not None else None
        return Fetched(key, digest, spec.elements, 0) if digest and spec else None

    def _held(self, key: AdapterKey, source: str | None) -> Digest | None:
        """The content of a key, if it is here: kept from being evicted until it was read."""
        with self._disk.changing:
            digest = self._disk.lookup(key, source)
            if digest is None or not self._disk.hold(digest):
                return None
            self._room.record(digest)
        return digest

    def _packed_spec(self, digest: Digest) -> VectorSpec | None:
        """What the packed file of our layout holds, if there is a whole one."""
        path = self._disk.packed_path(digest, self._layout.digest)
        try:
            packed = read_packed_header(path, self._layout)
        except (AdapterInvalid, OSError):  # absent, stale or broken: it is made again
            return None
        return packed.spec if packed.content == digest else None

    def _rebuild(self, source: Source | None, key: AdapterKey) -> Fetched | None:
        """Pack what the disk has as it was published: for another layout, or once more. None where
        the disk hasn't got it, or not whole: it is downloaded again."""
        digest = self._held(key, name_of(source))
        if digest is None:
            return None
        with self._packing:
            try:
                checkpoint = self._read(self._disk.folder(digest))
            except (AdapterInvalid, LoadFailed):
                return None
            if checkpoint.digest != digest:
                return None
            folder = self._disk.new_folder()
            try:
                self._publish(folder, source, key, checkpoint, 0)
            finally:
                self._disk.discard(folder)
            return Fetched(key, digest, spec_of(checkpoint, self._layout).elements, 0)

    # -- what isn't

    def _download(self, source: Source, key: AdapterKey) -> Fetched:
        folder = self._disk.new_folder()
        try:
            files = files_of(source, key)
            nbytes = sum(files.values())
            with self._room.claimed(nbytes):
                self._downloads.bring(source, key, files, folder)
            with self._packing:
                checkpoint = self._read(folder)
                spec = spec_of(checkpoint, self._layout)
                # Claimed anew, as one sum: two downloads that each hold a part would wait for ever.
                self._publish(folder, source, key, checkpoint, nbytes + sums_size(files))
            return Fetched(key, checkpoint.digest, spec.elements, nbytes)
        except (AdapterInvalid, AdapterUnsupported) as error:
            # The temporary folder would tell nobody anything.
            error.where = error.where.replace(f"{folder}/", "").replace(str(folder), "")
            raise
        finally:
            self._disk.discard(folder)

    def _read(self, folder: Path) -> Checkpoint:
        return read_checkpoint(folder, self._layout.base, options=self._options)

    def _publish(
        self,
        folder: Path,
        source: Source | None,
        key: AdapterKey,
        checkpoint: Checkpoint,
        nbytes: int,
    ) -> None:
        """Pack into ``folder``, which has files of ``nbytes``, and publish it."""
        digest = checkpoint.digest
        size = nbytes + packed_size(self._layout, spec_of(checkpoint, self._layout))
        with self._room.claimed(size) as claim:
            spec, vector = pack(checkpoint, self._layout)
            path = folder / self._disk.packed_path(digest, self._layout.digest).name
            write_packed(path, self._layout, digest, spec, vector)
            self._disk.seal(folder)
            with self._disk.changing:
                self._disk.publish(folder, digest, claim.nbytes)
                claim.nbytes = 0
                self._disk.note(key, digest, name_of(source))
                self._room.record(digest)
            self._disk.make_durable(digest)

    def _make_free(self) -> bool:
        self._disk.say_once(f"{self._disk.root}: the device is full before disk_bytes are used")
        return self._room.make_free(2 * self._layout.max_elements * self._layout.itemsize)
