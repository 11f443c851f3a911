"""Who an adapter is: the key that was asked for, and the digest of what was found.

An adapter id and a revision say what was asked for. Neither says what the bytes are: an object
store's ETag is opaque, and a directory can be rewritten under one name. The digest does. It
names every copy on disk, in CPU memory and on the GPU, and roots the prefix-cache keys, so that
a republished adapter can never be taken for the one before it, and one that was evicted and
loaded again keeps its cached KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["AdapterKey", "Digest", "check_id", "check_own_id", "content_digest"]

Digest: TypeAlias = bytes
"""32 bytes over an adapter's content; independent of any layout. Made by `content_digest`."""

_DOMAIN = b"adaptercache content v1"


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """What was asked for: an adapter id, and the source's revision token for it.

    Equal revisions mean "unchanged", nothing more.
    """

    adapter_id: str
    revision: str


def check_id(adapter_id: str | None) -> str | None:
    """An adapter id as it is; None is the base model. Raises TypeError for anything else."""
    if adapter_id is not None and not isinstance(adapter_id, str):
        raise TypeError(f"adapter id {adapter_id!r}: give a str, or None for the base model")
    return adapter_id


def check_own_id(adapter_id: str) -> str:
    """The id of an adapter, as it is. Raises TypeError for anything else, the base model too."""
    if not isinstance(adapter_id, str):
        raise TypeError(f"adapter id {adapter_id!r:.80}: give a str")
    return adapter_id


def content_digest(parts: Iterable[tuple[str, bytes | memoryview]]) -> Digest:
    """The digest of named byte strings, in whatever order they come.

    Args:
        parts: ``(label, bytes)``; labels are distinct and say all that the bytes don't (module
            path, which matrix, dtype, shape, scaling).

    Returns:
        32 bytes. SHA-256 over the sorted labels and the SHA-256 of each part, all length-prefixed,
        under a domain of its own. Each part is hashed by itself, so callers may do it in threads.
    """
    leaves = sorted((label.encode(), hashlib.sha256(data).digest()) for label, data in parts)
    root = hashlib.sha256(len(_DOMAIN).to_bytes(4, "little") + _DOMAIN)
    root.update(len(leaves).to_bytes(8, "little"))
    for label, leaf in leaves:
        root.update(len(label).to_bytes(8, "little") + label + leaf)
    return root.digest()
