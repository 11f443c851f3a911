"""Which content an id stood for, at which revision: one small file an id.

A note is a hint, never the truth: it counts only where the content that it names is there. So no
order of a crash makes it wrong, and notes of what is gone are only to be swept up.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from adaptercache.identity import AdapterKey, Digest

__all__ = ["Notes"]


class Notes:
    """The files below one folder. Thread-safe, and safe among processes.

    Args:
        folder: where they are.
        fresh: a new name on the same file system, for a file that is then renamed.
        is_here: whether content is there.
    """

    def __init__(
        self, folder: Path, fresh: Callable[[], Path], is_here: Callable[[Digest], bool]
    ) -> None:
        self._folder, self._fresh, self._is_here = folder, fresh, is_here
        self._lock = threading.Lock()
        self._of: dict[Digest, set[str]] = {}

    def write(self, key: AdapterKey, digest: Digest, source: str | None = None) -> None:
        """``key`` stands for this content, says the source of that name."""
        name, fresh = _name(key.adapter_id), self._fresh()
        note = {"id": key.adapter_id, "revision": key.revision, "digest": digest.hex()}
        note |= {"source": source} if source is not None else {}
        fresh.write_text(json.dumps(note))
        os.replace(fresh, self._folder / name)
        self._remember(digest, name)

    def find(self, key: AdapterKey, source: str | None = None) -> Digest | None:
        """The content that an id stood for at this revision, if it is here, and if no source of
        another name has said so: revisions of two sources have nothing to do with each other."""
        name = _name(key.adapter_id)
        note = _read(self._folder / name)
        if note is None or (note.get("id"), note.get("revision")) != (key.adapter_id, key.revision):
            return None
        if source is not None and note.get("source", source) != source:
            return None
        digest = _digest_of(note)
        if digest is None or not self._is_here(digest):
            return None
        self._remember(digest, name)
        return digest

    def last(self, adapter_id: str, source: str) -> AdapterKey | None:
        """What an id was when that source was last asked, if its content is here."""
        note = _read(self._folder / _name(adapter_id))
        if note is None or (note.get("id"), note.get("source")) != (adapter_id, source):
            return None
        key = AdapterKey(adapter_id, str(note.get("revision")))
        return key if self.find(key) is not None else None

    def forget_id(self, adapter_id: str, source: str | None) -> None:
        """The id stands for nothing (any more) in the source of that name; None: in one without a
        name. What it is in others stays."""
        path = self._folder / _name(adapter_id)
        note = _read(path)
        if note is not None and note.get("source") == source:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def forget(self, digest: Digest) -> None:
        """Remove the notes of content that was deleted, as far as this process knows of them."""
        with self._lock:
            names = self._of.pop(digest, set())
        for name in names:
            self._remove_if(name, lambda found: found == digest)

    def sweep(self, present: Collection[Digest]) -> None:
        """Remove all notes of what isn't here, and what else lies among them.

        Args:
            present: what was here a moment ago; only of others it is looked up.
        """
        for name in os.listdir(self._folder):
            note = _read(f"{self._folder}/{name}")
            digest = _digest_of(note) if note is not None else None
            if digest is None or not (digest in present or self._is_here(digest)):
                self._remove_if(name, lambda found: found is None or not self._is_here(found))
            else:
                self._remember(digest, name)

    def _remember(self, digest: Digest, name: str) -> None:
        with self._lock:
            self._of.setdefault(digest, set()).add(name)

    def _remove_if(self, name: str, is_stale: Callable[[Digest | None], bool]) -> None:
        """Remove a note unless it was just written anew. (Where it is written in between, it is
        lost: then the id is fetched once more.)"""
        path = self._folder / name
        note = _read(path)
        if is_stale(_digest_of(note) if note is not None else None):
            with suppress(OSError):
                os.unlink(path)


def _name(adapter_id: str) -> str:
    return f"{hashlib.sha256(adapter_id.encode('utf-8', 'surrogatepass')).hexdigest()}.json"


def _read(path: Path | str) -> dict[str, object] | None:
    try:
        handle = os.open(path, os.O_RDONLY)  # there are many, at the start: none is buffered
        try:
            note = json.loads(os.read(handle, 1 << 20))
        finally:
            os.close(handle)
    except (OSError, ValueError, RecursionError):
        return None
    return note if isinstance(note, dict) else None


def _digest_of(note: dict[str, object]) -> Digest | None:
    try:
        return bytes.fromhex(str(note["digest"]))
    except (KeyError, ValueError):
        return None
