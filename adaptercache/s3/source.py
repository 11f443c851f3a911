"""Adapters in a bucket: a "folder" an adapter, as PEFT's files lie in a directory.

An adapter's objects are those whose keys begin with ``<prefix>/<id>/``, the slash included, so
``sql/1`` never takes what belongs to ``sql/10``. Only its config and its weights are read.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError
from cachetools import LRUCache

from adaptercache.checkpoint.files import find_weights
from adaptercache.errors import AdapterInvalid, AdapterNotFound, LoadFailed
from adaptercache.s3.checksum import Checksum
from adaptercache.s3.client import Connection
from adaptercache.s3.failures import FORBIDDEN, MISSING, REPLACED, code_of
from adaptercache.s3.options import Location, S3Options
from adaptercache.s3.ranges import StoredObject, stream

__all__ = ["S3Source"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LONGEST_KEY = 1024  # bytes: S3's own bound


class S3Source:
    """A `Source`: ``s3://bucket/prefix`` in any store that speaks S3. Thread-safe.

    The revision is made of the ETags and sizes of config and weights. A look at an adapter is one
    LIST; where that is forbidden, a HEAD for each of the two files.

    Args:
        url: ``s3://bucket/prefix``.
        options: how the store is spoken to.
        session: a `boto3.Session` with credentials of your own making.

    Raises:
        ValueError: ``url`` is no such name.
    """

    def __init__(self, url: str, options: S3Options | None = None, *, session: Any = None) -> None:
        self._at = Location.parse(url)
        self._options = options or S3Options()
        self._connection = Connection(self._options, session)
        self._extra = {"RequestPayer": "requester"} if self._options.requester_pays else {}
        self._found: LRUCache[tuple[str, str], dict[str, StoredObject]] = LRUCache(4096)
        self._lock = threading.Lock()
        self._may_list = True

    @property
    def name(self) -> str:
        """Of the store and the place in it."""
        return f"{self._options.endpoint_url or ''} s3://{self._at.bucket}/{self._at.prefix}"

    def __repr__(self) -> str:
        return f"S3Source('s3://{self._at.bucket}/{self._at.prefix}')"

    # -- the methods of a source

    def revision(self, adapter_id: str) -> str:
        objects = self._look(adapter_id)
        marks: list[object] = [self._options.endpoint_url, self._at.bucket]
        marks += [[found.key, found.size, found.etag] for found in objects.values()]
        revision = hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:32]
        with self._lock:
            self._found[adapter_id, revision] = objects
        return revision

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        return {name: found.size for name, found in self._objects(adapter_id, revision).items()}

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        size = self._object(adapter_id, revision, name).size
        stop = max(offset, min(size, offset + len(into)))
        at = 0
        for piece in self.stream(adapter_id, revision, name, offset, stop):
            into[at : at + len(piece)] = piece
            at += len(piece)
        return at

    def ids(self) -> Iterable[str]:
        """All adapter ids: of every folder with a config. Lists all keys below the prefix."""
        for page in self._pages(self._at.prefix, delimiter=""):
            for entry in page.get("Contents", ()):
                folder, _, name = str(entry["Key"]).rpartition("/")
                if name == CONFIG and len(folder) > len(self._at.prefix):
                    yield folder[len(self._at.prefix) :]

    # -- what it can do beyond them

    def stream(
        self, adapter_id: str, revision: str, name: str, start: int, stop: int
    ) -> Iterator[bytes]:
        """Bytes ``[start, stop)`` of a file, in order, in pieces of any size."""
        found = self._object(adapter_id, revision, name)
        return stream(self._connection, found, start, stop, self._extra)

    def check(self, adapter_id: str, revision: str, name: str, data: memoryview) -> None:
        """Compare a whole file with the checksum that the store keeps of it, if it keeps one.

        Raises:
            LoadFailed: these are other bytes.
        """
        found = self._object(adapter_id, revision, name)
        answer = self._head_again(found, {"ChecksumMode": "ENABLED"})
        checksum = Checksum.of(answer)
        if checksum is None:
            return
        part_size = len(data)
        if checksum.parts:
            part_size = int(self._head_again(found, {"PartNumber": 1})["ContentLength"])
            if not checksum.can_have(found.size, part_size):
                return
        if not checksum.fits(data, part_size):
            raise LoadFailed(
                f"the bytes of {self._url(found.key)} don't have the checksum that the store keeps",
                adapter_id=adapter_id,
            )

    def close(self) -> None:
        """Close the connections to the store."""
        self._connection.close()

    # -- looking

    def _objects(self, adapter_id: str, revision: str) -> dict[str, StoredObject]:
        with self._lock:
            found = self._found.get((adapter_id, revision))
        if found is None:  # long ago
            if self.revision(adapter_id) != revision:
                raise LoadFailed("the adapter was republished meanwhile", adapter_id=adapter_id)
            with self._lock:
                found = self._found[adapter_id, revision]
        return found

    def _object(self, adapter_id: str, revision: str, name: str) -> StoredObject:
        return self._objects(adapter_id, revision)[name]

    def _look(self, adapter_id: str) -> dict[str, StoredObject]:
        folder = self._folder(adapter_id)
        here = self._list(folder) if self._may_list else None
        if here is None:
            return self._head_both(adapter_id, folder)
        if not here:
            raise AdapterNotFound(f"nothing at {self._url(folder)}", adapter_id=adapter_id)
        if CONFIG not in here:
            raise AdapterInvalid(
                f"no {CONFIG}", where=self._url(folder), found=sorted(here), adapter_id=adapter_id
            )
        weights = find_weights(here.__contains__, self._url(folder).rstrip("/"))
        return {name: here[name] for name in (CONFIG, weights) if name is not None}

    def _folder(self, adapter_id: str) -> str:
        """What the keys of an adapter begin with; an id never leads out of the prefix."""
        parts = adapter_id.split("/")
        is_name = "\0" not in adapter_id and not any(part in ("", ".", "..") for part in parts)
        folder = f"{self._at.prefix}{adapter_id}/"
        try:
            is_name = is_name and len(f"{folder}{WEIGHTS}".encode()) <= _LONGEST_KEY
        except UnicodeEncodeError:  # a lone surrogate
            is_name = False
        if not is_name:
            raise AdapterNotFound("not an adapter's name", adapter_id=adapter_id)
        return folder

    def _list(self, folder: str) -> dict[str, StoredObject] | None:
        """The objects directly in a folder, by name; None where we may not list."""
        here: dict[str, StoredObject] = {}
        try:
            for page in self._pages(folder, delimiter="/"):
                for entry in page.get("Contents", ()):
                    key = str(entry["Key"])
                    found = StoredObject(self._at.bucket, key, int(entry["Size"]), entry["ETag"])
                    here[key.removeprefix(folder)] = found
        except ClientError:  # forbidden
            self._may_list = False
            return None
        here.pop("", None)  # the folder itself, as some tools make one
        return here

    def _pages(self, prefix: str, delimiter: str) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            wanted = {"Bucket": self._at.bucket, "Prefix": prefix, "Delimiter": delimiter}
            wanted |= token | self._extra
            page: dict[str, Any] = self._connection.ask(
                f"listing {self._url(prefix)}", _listing(wanted), expected=FORBIDDEN
            )
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _head_both(self, adapter_id: str, folder: str) -> dict[str, StoredObject]:
        """Config and weights, where only objects may be read."""
        found = {}
        for name in (CONFIG, WEIGHTS):
            key = f"{folder}{name}"
            try:
                answer = self._head(key, {}, MISSING | FORBIDDEN)
            except ClientError as error:
                if code_of(error) in FORBIDDEN:
                    what = (
                        f"{self._url(key)} is forbidden, or not there: without the right to list "
                    )
                    what += "the bucket (s3:ListBucket), the store doesn't tell which"
                else:
                    what = f"there is no {self._url(key)}"
                raise AdapterNotFound(what, adapter_id=adapter_id) from error
            found[name] = StoredObject(
                self._at.bucket, key, int(answer["ContentLength"]), answer["ETag"]
            )
        return found

    def _head(self, key: str, more: dict[str, Any], expected: frozenset[str]) -> dict[str, Any]:
        answer: dict[str, Any] = self._connection.ask(
            f"looking at {self._url(key)}",
            lambda client: client.head_object(
                Bucket=self._at.bucket, Key=key, **more, **self._extra
            ),
            expected=expected,
        )
        return answer

    def _head_again(self, found: StoredObject, more: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._head(found.key, {"IfMatch": found.etag, **more}, MISSING | REPLACED)
        except ClientError as error:
            raise LoadFailed(f"{self._url(found.key)} was replaced meanwhile") from error

    def _url(self, key: str) -> str:
        return f"s3://{self._at.bucket}/{key}"


def _listing(wanted: dict[str, str]) -> Callable[[Any], dict[str, Any]]:
    def ask(client: Any) -> dict[str, Any]:
        page: dict[str, Any] = client.list_objects_v2(**wanted)
        return page

    return ask
