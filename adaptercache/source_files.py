"""What a source says of itself and of an adapter's files: names that may be used, and bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

from adaptercache.disk.contents import SUMS
from adaptercache.disk.transfer import Stream
from adaptercache.errors import AdapterInvalid, LoadFailed
from adaptercache.identity import AdapterKey
from adaptercache.tiers.remote import Source

__all__ = ["check_names", "name_of", "stream_of"]

PIECE_BYTES = 1 << 20
_PACKED = re.compile(r"[0-9a-f]{64}\.safetensors", re.IGNORECASE)


def check_names(names: Iterable[str]) -> None:
    """A name never leads out of the folder, nor is it one that our own files have there."""
    for name in names:
        is_ours = _PACKED.fullmatch(name) or name == SUMS
        if name in ("", ".", "..") or "/" in name or "\0" in name or is_ours:
            raise AdapterInvalid("the source gives a file a strange name", found=f"{name!r:.200}")


def name_of(source: Source | None) -> str | None:
    """What tells a source from others; None where it doesn't say."""
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else None


def stream_of(source: Source, key: AdapterKey, name: str) -> Stream:
    """A file of a source in pieces: as the source itself gives them, or by reading."""
    streams = getattr(source, "stream", None)
    if streams is not None:
        return partial(streams, key.adapter_id, key.revision, name)

    def stream(start: int, stop: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(stop - start, PIECE_BYTES)))
        while start < stop:
            into = buffer[: stop - start]
            got = source.read(key.adapter_id, key.revision, name, start, into)
            if got != len(into):
                raise LoadFailed(
                    f"{name} is shorter than the source declares", adapter_id=key.adapter_id
                )
            yield into
            start += got

    return stream
