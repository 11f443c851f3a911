"""The bytes of an object, in order, over as many requests as it takes.

Every request asks for a range of the very object that was found (``If-Match``), and its answer is
believed only where it says that it is that range of that object. What has come is never asked for
again: after a failure the next request goes on where the last one ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from adaptercache.errors import LoadFailed
from adaptercache.s3.client import Connection
from adaptercache.s3.failures import MISSING, REPLACED, Broken, code_of, pauses

__all__ = ["StoredObject", "stream"]

WORTHWHILE_BYTES = 64 << 10  # what a request must bring so that its failure isn't counted
CHUNK_BYTES = 1 << 20  # a piece is what has come, up to that: few, where many are read at once


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object at one time. ``etag`` is opaque: compared, never computed."""

    bucket: str
    key: str
    size: int
    etag: str


class _Stalled(OSError):
    """Bytes come, but too slowly."""


class _Wrong(OSError):
    """An answer that isn't the range that was asked for: an error page, or a proxy's invention."""


def stream(
    connection: Connection, found: StoredObject, start: int, stop: int, extra: dict[str, Any]
) -> Iterator[bytes]:
    """Bytes ``[start, stop)`` of an object, in order, in pieces of any size.

    Raises:
        LoadFailed: the object was replaced or deleted meanwhile.
        S3Failure: the store can't be read.
    """
    options = connection.options
    waits = pauses(options.tries)
    at = start
    while at < stop:
        client = None
        before = at
        try:
            client = connection.client()
            for piece in _range(client, connection, found, at, stop, extra):
                at += len(piece)
                yield piece
        except Broken as error:
            if code_of(error) in REPLACED | MISSING:
                raise _replaced(found) from error
            if at - before >= WORTHWHILE_BYTES:
                waits = pauses(options.tries)  # it gets on
            what = f"reading s3://{found.bucket}/{found.key} at byte {at}"
            connection.survive(error, client, what, next(waits, None))
            yield b""  # so that who has waited in vain so long may give up


def _range(
    client: Any,
    connection: Connection,
    found: StoredObject,
    at: int,
    stop: int,
    extra: dict[str, Any],
) -> Iterator[bytes]:
    """As much of the range as one request brings: all of it, or an error."""
    options = connection.options
    answer = client.get_object(
        Bucket=found.bucket,
        Key=found.key,
        Range=f"bytes={at}-{stop - 1}",
        IfMatch=found.etag,
        **extra,
    )
    body = answer["Body"]
    try:
        _check(answer, found, at, stop)
        raw = getattr(body, "_raw_stream", body)  # read1 returns what has come, and doesn't wait
        read = getattr(raw, "read1", raw.read)
        limit_s = options.stall_timeout_s + (stop - at) / options.slowest_bytes_per_s
        deadline = time.monotonic() + limit_s
        while at < stop:
            piece = read(min(CHUNK_BYTES, stop - at))
            if not piece:
                raise _Wrong(f"the answer ended {stop - at} bytes early")
            at += len(piece)
            yield piece
            if at < stop and time.monotonic() > deadline:
                raise _Stalled(f"{stop - at} bytes are missing after {limit_s:.0f} s")
    except BaseException:
        body.close()  # never to be used for another request: the rest of this answer is in it
        raise
    raw.read()  # nothing is left: so the connection goes back to the pool


def _replaced(found: StoredObject) -> LoadFailed:
    return LoadFailed(f"s3://{found.bucket}/{found.key} was replaced meanwhile")


def _check(answer: dict[str, Any], found: StoredObject, at: int, stop: int) -> None:
    if answer.get("ETag", found.etag) != found.etag:  # the store has ignored the condition
        raise _replaced(found)
    got = (answer.get("ContentRange"), answer.get("ContentLength"))
    wanted = (f"bytes {at}-{stop - 1}/{found.size}", stop - at)
    if "ETag" not in answer or (got != wanted and got != (None, found.size)):
        raise _Wrong(f"the answer is of {got[0]} with {got[1]} bytes, not of {wanted[0]}")
    if got[0] is None and (at, stop) != (0, found.size):
        raise _Wrong("the store answered with the whole object for a range of it")
