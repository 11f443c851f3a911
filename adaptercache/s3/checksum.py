"""The checksums that a store keeps of an object, and whether bytes have them."""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Checksum"]

_STEP = 8 << 20


def _hashed(name: str) -> Callable[[memoryview], bytes]:
    return lambda data: hashlib.new(name, data, usedforsecurity=False).digest()


def _crc(name: str, nbytes: int) -> Callable[[memoryview], bytes]:
    def computed(data: memoryview) -> bytes:
        from awscrt import checksums

        update, value = getattr(checksums, name), 0
        for at in range(0, len(data), _STEP):
            value = update(data[at : at + _STEP], value)
        return int(value).to_bytes(nbytes, "big")

    return computed


_ALGORITHMS: dict[str, Callable[[memoryview], bytes]] = {
    "ChecksumCRC64NVME": _crc("crc64nvme", 8),
    "ChecksumCRC32C": _crc("crc32c", 4),
    "ChecksumCRC32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "ChecksumSHA256": _hashed("sha256"),
    "ChecksumSHA1": _hashed("sha1"),
}


@dataclass(frozen=True, slots=True)
class Checksum:
    """One checksum of an object: over all its bytes, or (of an upload in parts) over the
    checksums of its parts.

    Args:
        name: as in the store's answer, ``ChecksumCRC32``.
        value: of the digest's bytes.
        parts: how many parts it is made of; 0: over all bytes.
    """

    name: str
    value: bytes
    parts: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Checksum | None:
        """The cheapest checksum in the answer to a HEAD, or None: the store has kept none."""
        for name in _ALGORITHMS:
            text = answer.get(name)
            if text:
                encoded, _, parts = str(text).partition("-")
                return cls(name, b64decode(encoded), int(parts or 0))
        return None

    def fits(self, data: memoryview, part_size: int) -> bool:
        """Whether these are the bytes. ``part_size``: of all parts but the last."""
        compute = _ALGORITHMS[self.name]
        if not self.parts:
            return compute(data) == self.value
        digests = b"".join(compute(part) for part in _parts(data, part_size))
        return compute(memoryview(digests)) == self.value

    def can_have(self, size: int, part_size: int) -> bool:
        """Whether parts of that size make up the object; parts of several sizes can't be told."""
        return not self.parts or -(-size // part_size) == self.parts


def _parts(data: memoryview, part_size: int) -> Iterator[memoryview]:
    for at in range(0, len(data), part_size):
        yield data[at : at + part_size]
