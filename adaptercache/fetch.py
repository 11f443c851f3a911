"""REMOTE → DISK: from a source's files to a packed file, whole, under its content's digest."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adaptercache.checkpoint import Checkpoint, ReadOptions, read_checkpoint
from adaptercache.errors import (
    AdapterCacheError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    LoadFailed,
)
from adaptercache.identity import AdapterKey, Digest
from adaptercache.layout import LoraLayout
from adaptercache.ledger import Ledger
from adaptercache.packing import (
    VectorSpec,
    pack,
    packed_size,
    read_packed_header,
    spec_of,
    write_packed,
)
from adaptercache.stats import Tier
from adaptercache.tiers.disk import DiskTier
from adaptercache.tiers.remote import Source, TensorSource

__all__ = ["Fetched", "Fetcher"]

PIECE_BYTES = 8 << 20
ROOM_WAIT_S = 30.0
TRIES = 3
_PACKED = re.compile(r"[0-9a-f]{64}\.safetensors", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What is on disk now: ``nbytes`` were read from the source (0: it was here)."""

    key: AdapterKey
    digest: Digest
    elements: int
    nbytes: int


class Fetcher:
    """Brings adapters onto the disk. Thread-safe; runs on movers, and blocks.

    Args:
        lock: the cache's; taken for decisions only.
    """

    def __init__(
        self,
        source: Source | None,
        puts: TensorSource,
        disk: DiskTier,
        layout: LoraLayout,
        options: ReadOptions,
        ledger: Ledger,
        lock: threading.Lock,
    ) -> None:
        self._source, self._puts = source, puts
        self._disk = disk
        self._layout = layout
        self._options = options
        self._ledger = ledger
        self._lock = lock

    def adopt(self) -> None:
        """Take over what earlier runs left on the disk, as far as the budget holds it."""
        for digest, size in self._disk.scan():
            with self._lock:
                self._ledger.published(digest, size)
        self.trim()

    def fetch(self, adapter_id: str) -> Fetched:
        """The adapter as its source has it now, packed and on disk.

        Raises:
            AdapterCacheError, OSError: as the source's methods, `read_checkpoint` and `pack` do.
        """
        for attempt in range(TRIES):
            try:
                return self._fetch(adapter_id)
            except LoadFailed:  # rewritten while we read it: the next revision may hold still
                if attempt == TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _fetch(self, adapter_id: str) -> Fetched:
        source = self._puts if adapter_id in self._puts else self._source
        if source is None:
            raise AdapterNotFound("there is no source", adapter_id=adapter_id)
        key = AdapterKey(adapter_id, source.revision(adapter_id))
        with self._disk.changing:
            digest = self._disk.lookup(key)
            if digest is not None:
                self._record(digest)
        if digest is not None:
            self.trim()
            spec = self._packed_spec(digest)
            if spec is not None:
                return Fetched(key, digest, spec.elements, 0)
            with self._folder() as folder:
                checkpoint = self._read_here(digest, folder)
                if checkpoint is not None:
                    return self._pack(folder, key, checkpoint, 0)
        return self._download(source, key)

    def _packed_spec(self, digest: Digest) -> VectorSpec | None:
        """What the packed file of our layout holds, if there is a whole one."""
        path = self._disk.packed_path(digest, self._layout.digest)
        try:
            return read_packed_header(path, self._layout).spec
        except (AdapterInvalid, OSError):  # absent, stale or broken: it is made again
            return None

    def _download(self, source: Source, key: AdapterKey) -> Fetched:
        with self._folder() as folder:
            files = source.files(key.adapter_id, key.revision)
            _check_names(files)
            nbytes = sum(files.values())
            with self._claimed(nbytes):
                for name, size in files.items():
                    _copy_file(source, key, name, size, folder / name)
            checkpoint = read_checkpoint(folder, self._layout.base, options=self._options)
            return self._pack(folder, key, checkpoint, nbytes)

    def _read_here(self, digest: Digest, folder: Path) -> Checkpoint | None:
        """Content that was published here for another layout, or another rank of a cut model; its
        files are then in ``folder`` too. None where they are not what they were, or gone."""
        try:
            for file in self._disk.folder(digest).iterdir():
                if not _PACKED.fullmatch(file.name):
                    os.link(file, folder / file.name)
            checkpoint = read_checkpoint(folder, self._layout.base, options=self._options)
        except (AdapterCacheError, OSError):
            return None
        return checkpoint if checkpoint.digest == digest else None

    def _pack(self, folder: Path, key: AdapterKey, checkpoint: Checkpoint, nbytes: int) -> Fetched:
        """Publish a folder with its packed file; ``nbytes`` came from the source."""
        spec = spec_of(checkpoint, self._layout)
        # Claimed anew, as one sum: two downloads that each hold a part would wait for ever. Of what
        # was here before, the files are linked and counted already.
        with self._claimed(nbytes + packed_size(self._layout, spec)):
            self._publish(folder, key, checkpoint)
        return Fetched(key, checkpoint.digest, spec.elements, nbytes)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """A folder for what is not published yet; gone at the end, but for what was."""
        folder = self._disk.new_folder()
        try:
            yield folder
        except (AdapterInvalid, AdapterUnsupported) as error:
            # The temporary folder would tell nobody anything.
            error.where = error.where.replace(f"{folder}/", "").replace(str(folder), "")
            raise
        finally:
            self._disk.discard(folder)

    def _publish(self, folder: Path, key: AdapterKey, checkpoint: Checkpoint) -> None:
        digest = checkpoint.digest
        spec, vector = pack(checkpoint, self._layout)
        path = folder / self._disk.packed_path(digest, self._layout.digest).name
        write_packed(path, self._layout, digest, spec, vector)
        with self._disk.changing:
            self._disk.publish(folder, digest)
            self._disk.note(key, digest)
            self._record(digest)

    def _record(self, digest: Digest) -> None:
        """The ledger knows that the files are here. ``changing`` is held."""
        size = self._disk.size(digest)
        with self._lock:
            self._ledger.published(digest, size)

    @contextmanager
    def _claimed(self, nbytes: int) -> Iterator[None]:
        """Bytes of the disk's budget, set aside until the files are recorded."""
        deadline = time.monotonic() + ROOM_WAIT_S
        while True:
            with self._lock:
                victims = self._ledger.claim_disk(nbytes)
            if victims is not None:
                break
            if time.monotonic() > deadline:
                raise LoadFailed("the disk tier is full of adapters that are being read")
            time.sleep(0.01)
        try:
            self.delete(victims)
            yield
        finally:
            with self._lock:
                self._ledger.disk.claimed -= nbytes

    def trim(self) -> None:
        """Evict what the disk's budget doesn't hold, as far as nobody reads it."""
        with self._lock:
            victims = self._ledger.claim_disk(0)
        self.delete(victims or [])

    def delete(self, digests: list[Digest]) -> None:
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


def _check_names(names: Iterable[str]) -> None:
    """A name never leads out of the folder, nor is it one that our packed files have there."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name or _PACKED.fullmatch(name):
            raise AdapterInvalid("the source gives a file a strange name", found=f"{name!r:.200}")


def _copy_file(source: Source, key: AdapterKey, name: str, size: int, to: Path) -> None:
    buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
    with open(to, "xb") as file:
        for offset in range(0, size, PIECE_BYTES):
            want = min(PIECE_BYTES, size - offset)
            got = source.read(key.adapter_id, key.revision, name, offset, buffer[:want])
            if got != want:
                raise LoadFailed(
                    f"{name} is shorter than the {size} bytes that the source declares",
                    adapter_id=key.adapter_id,
                )
            file.write(buffer[:want])
        file.flush()
        os.fsync(file.fileno())
