"""Adapters as verified folders on this host: for whoever reads PEFT's files itself.

An `AdapterCache` serves tensors. An engine that has a loader of its own wants the files, and wants
them to stay where they are for as long as it may read them. This is the disk tier for that: the
same directory, budget and flights that caches of other processes use, without their packed files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from cachetools import TTLCache

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import Checkpoint, ReadOptions, read_checkpoint
from adaptercache.disk.contents import sums_size
from adaptercache.disk_room import ROOM_WAIT_S, claimed
from adaptercache.download import Downloads, files_of, tried_again
from adaptercache.errors import (
    AdapterCacheError,
    AdapterInvalid,
    AdapterUnsupported,
    CacheClosed,
    LoadFailed,
    as_load_error,
    forget_locals,
)
from adaptercache.held_folder import HeldFolder
from adaptercache.identity import AdapterKey, Digest, check_own_id
from adaptercache.open_counts import OpenCounts
from adaptercache.source_files import name_of
from adaptercache.stats import Stats
from adaptercache.tiers.disk import DiskTier
from adaptercache.tiers.remote import Source, open_source

__all__ = ["AdapterFiles"]

log = logging.getLogger(__name__)

REFUSED_TTL_S, MOST_REFUSED = 60.0, 1024
DOWN_TTL_S = 2.0
LOAD_ERRORS = (AdapterCacheError, OSError)


class AdapterFiles:
    """Opens adapters of a source by id, through the disk tier. Thread-safe; blocks.

    Any number of processes share one ``disk_dir``, caches among them; all keep its budget together.
    What is opened has been read whole, fits ``base`` and has the digest that names its folder.

    Args:
        source: as that of an `AdapterCache`.
        base: the model that the adapters are for.
        disk_dir: the directory of the disk tier.
        disk_bytes: its budget; None: there is none.
        options: how adapters are read.
        check: called with what was read and the folder that it is in, before anybody gets it;
            raises `AdapterUnsupported` or `AdapterInvalid` to refuse it.
        make_room: called, in the thread that opens, while all that is on the disk is held by
            somebody: gets somebody in this process to release something, if it can.
        wait_s: how long opening waits for room.
        clock: seconds, monotonic.

    Raises:
        NotADirectoryError, ValueError, ModuleNotFoundError: as `open_source` does.
        OSError: the disk can't be read.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Source,
        base: BaseModel,
        *,
        disk_dir: str | os.PathLike[str],
        disk_bytes: int | None,
        options: ReadOptions | None = None,
        check: Callable[[Checkpoint, Path], None] = lambda checkpoint, folder: None,
        make_room: Callable[[], object] = lambda: None,
        wait_s: float = ROOM_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if disk_bytes is not None and (type(disk_bytes) is not int or disk_bytes < 1):
            raise ValueError(f"disk_bytes is {disk_bytes!r:.80}: give bytes, 1 or more, or None")
        self._source, self._base = open_source(source), base
        self._owns_source = self._source is not source
        self._options = options or ReadOptions()
        self._check, self._make_room = check, make_room
        self._wait_s, self._clock = wait_s, clock
        self._disk = DiskTier(Path(disk_dir).absolute(), disk_bytes)
        self._disk_bytes = disk_bytes
        self._downloads = Downloads(self._disk, clock)
        self._refused: TTLCache[AdapterKey, AdapterCacheError] = TTLCache(
            MOST_REFUSED, REFUSED_TTL_S, clock
        )
        self._down: TTLCache[str, BaseException] = TTLCache(MOST_REFUSED, DOWN_TTL_S, clock)
        self._reading = threading.BoundedSemaphore(min(4, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._counts = OpenCounts()
        self._disk.tidy({digest for digest, _ in self._disk.scan()})
        self._set_aside(0)  # a budget that was made smaller holds from the start

    # -- what a user asks for

    def open(self, adapter_id: str) -> HeldFolder:
        """The adapter as its source has it now, held. Concurrent calls bring it here once.

        Where the source can't be asked, what the disk has of the adapter is opened instead.

        Raises:
            AdapterNotFound: the source has none of that id.
            AdapterInvalid, AdapterUnsupported: it is refused, and why. That is remembered for a
                minute, as long as its revision stays.
            CapacityError: ``disk_bytes`` can't hold it.
            LoadFailed: the source can't be read, or all that is on the disk is held.
            CacheClosed: `close` was called.
        """
        check_own_id(adapter_id)
        started, deadline = self._clock(), time.monotonic() + self._wait_s
        self._counts.began()
        try:
            held, nbytes = tried_again(lambda: self._open(adapter_id, deadline), self._make_free)
        except BaseException as error:
            failed: BaseException = error
            if self._downloads.is_closed:  # whatever it was that was no longer there
                failed = CacheClosed(adapter_id=adapter_id)
            elif isinstance(error, LOAD_ERRORS):
                failed = as_load_error(error, adapter_id)
            self._counts.failed(failed)
            raise failed from failed.__cause__
        self._counts.opened(nbytes, self._clock() - started)
        return held

    def newer(self, held: HeldFolder) -> HeldFolder | None:
        """What the source has in the place of ``held`` by now, held; None: the same content.

        Raises:
            AdapterCacheError: as `open` does.
        """
        try:
            revision = self._downloads.revision(self._source, held.adapter_id)
        except OSError as error:
            raise as_load_error(error, held.adapter_id) from error
        if revision == held.revision:
            return None
        fresh = self.open(held.adapter_id)
        if fresh.digest != held.digest:
            return fresh
        held.revision = fresh.revision
        fresh.release()
        return None

    def stats(self) -> Stats:
        """Counters since the start, and gauges: those of the disk tier; all others are empty."""
        budget = self._disk_bytes or 0
        return self._counts.stats(self._disk.count(), self._disk.used(), budget)

    def close(self) -> None:
        """Give up what is being downloaded. Folders that are held stay held; open none any more."""
        self._downloads.close()
        self._disk.close()
        close_source = getattr(self._source, "close", None)
        if close_source is not None and self._owns_source:
            close_source()

    # -- from the source, or the disk

    def _open(self, adapter_id: str, deadline: float) -> tuple[HeldFolder, int | None]:
        """The folder, and how many bytes were brought for it; None: it was here."""
        self._downloads.look()
        key = self._key(adapter_id)
        with self._lock:
            refused = self._refused.get(key)
        if refused is not None:
            raise refused.copy_for(adapter_id)
        try:
            held = self._take(key)
            if held is not None:
                return held, None
            with self._disk.flight(adapter_id, self._downloads.wait):
                held = self._take(key)  # another may have brought it here meanwhile
                return (held, None) if held is not None else self._download(key, deadline)
        except (AdapterInvalid, AdapterUnsupported) as error:
            forget_locals(error)
            with self._lock:
                self._refused[key] = error
            raise

    def _key(self, adapter_id: str) -> AdapterKey:
        """The adapter at its source's revision; at that of the disk where the source is down."""
        with self._lock:
            down = self._down.get(adapter_id)
        try:
            if down is not None:
                raise LoadFailed("the source could not be asked a moment ago") from down
            return AdapterKey(adapter_id, self._downloads.revision(self._source, adapter_id))
        except (LoadFailed, OSError) as error:
            if down is None:
                forget_locals(error)
                with self._lock:
                    self._down[adapter_id] = error
            name = name_of(self._source)
            last = self._disk.last(adapter_id, name) if name is not None else None
            if last is None:
                raise
            log.warning("adapter %r: what is on the disk serves: %s", adapter_id, error)
            return last

    def _take(self, key: AdapterKey) -> HeldFolder | None:
        """What the disk has of a key, held and verified; None: it has nothing, or nothing whole."""
        digest = self._disk.lookup(key, name_of(self._source))
        if digest is None:
            return None
        with ExitStack() as holding:
            try:
                holding.enter_context(self._disk.reading(digest))
                checkpoint = self._read(self._disk.folder(digest))
            except FileNotFoundError:  # another process has just evicted it
                return None
            except (AdapterInvalid, LoadFailed) as error:
                log.warning("adapter %r: its files are broken: %s", key.adapter_id, error)
                return None
            if checkpoint.digest != digest:
                log.warning("adapter %r: its files have changed", key.adapter_id)
                return None
            self._check(checkpoint, self._disk.folder(digest))
            return self._given(key, digest, holding.pop_all())

    def _download(self, key: AdapterKey, deadline: float) -> tuple[HeldFolder, int]:
        folder = self._disk.new_folder()
        try:
            files = files_of(self._source, key)
            nbytes = sum(files.values())
            size = nbytes + sums_size(files)
            # Claimed as a whole: two downloads that each hold a part would wait for ever.
            with claimed(self._disk, size, self._set_aside, deadline, self._ask_for_room) as claim:
                self._downloads.bring(self._source, key, files, folder)
                checkpoint = self._read(folder)
                self._check(checkpoint, folder)
                self._disk.seal(folder)
                with self._disk.changing, ExitStack() as holding:
                    self._disk.publish(folder, checkpoint.digest, claim.nbytes)
                    claim.nbytes = 0
                    self._disk.note(key, checkpoint.digest, name_of(self._source))
                    holding.enter_context(self._disk.reading(checkpoint.digest))
                    given = self._given(key, checkpoint.digest, holding.pop_all())
                self._disk.make_durable(checkpoint.digest)
                return given, nbytes
        except (AdapterInvalid, AdapterUnsupported) as error:
            # The temporary folder would tell nobody anything.
            error.where = error.where.replace(f"{folder}/", "").replace(str(folder), "")
            raise
        finally:
            self._disk.discard(folder)

    def _read(self, folder: Path) -> Checkpoint:
        with self._reading:
            checkpoint = read_checkpoint(folder, self._base, options=self._options)
            assert checkpoint.digest, "computed here, where few do it at a time"
            return checkpoint

    def _given(self, key: AdapterKey, digest: Digest, holding: ExitStack) -> HeldFolder:
        holding.callback(self._counts.released)
        return HeldFolder(key, digest, self._disk.folder(digest), holding)

    # -- room

    def _set_aside(self, nbytes: int) -> bool:
        return self._evicting(lambda may_go: self._disk.set_aside(nbytes, may_go).granted)

    def _ask_for_room(self) -> None:
        self._downloads.look()
        self._make_room()

    def _make_free(self) -> bool:
        self._disk.say_once(f"{self._disk.root}: the device is full before disk_bytes are used")
        return self._evicting(lambda may_go: self._disk.make_free(1, may_go))

    def _evicting(self, act: Callable[[Callable[[Digest], bool]], bool]) -> bool:
        """``act``, and a count of what it evicts. What is held in any process it can't evict."""
        asked: set[Digest] = set()

        def may_go(digest: Digest) -> bool:
            asked.add(digest)
            return True

        with self._disk.changing:
            done = act(may_go)
            gone = sum(not self._disk.folder(digest).exists() for digest in asked)
        self._counts.evicted(gone)
        return done
