"""Keys for the KV cache's blocks of prefix, rooted in the adapter's content.

A block of KV can serve every request that begins with the same tokens, computed by the same
weights. Its key says both: it is a hash over who computes the block, the key of the block before
it and the block's own tokens. So it covers all tokens from the first on, and the adapter by its
digest: one that was evicted and loaded again finds its KV, and one that was published anew under
an old name never finds that of the one before it.

    key  = SHA-256(root | key before it, or 32 zero bytes | tokens, 4 little-endian bytes each)
    root = SHA-256(tag | block size                                      for the base model
                  [| digest | the adapter's first token in the block]    and for an adapter)

The parts of a root are length-prefixed, and given the root those of a key have fixed lengths: no
two ways to fill them in make the same bytes. Keys are not cut short, for a collision would hand
out another prompt's KV.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain, repeat
from operator import index
from struct import iter_unpack
from typing import TYPE_CHECKING, cast

from adaptercache.identity import Digest

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["prefix_keys"]

_TAG = b"adaptercache prefix v1"
_KEY_BYTES = 32
_TOKEN_BYTES = 4


def prefix_keys(
    token_ids: Sequence[int] | Buffer,
    *,
    block_size: int,
    adapter: Digest | None = None,
    adapter_from_token: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """One key of 32 bytes for every full block of ``block_size`` tokens; a rest gets none.

    The keys are the same in every process and on every machine.

    Args:
        token_ids: a list of ints, or a one-dimensional array whose items are the ids. An array of
            uint32 (``array("I")``, NumPy) is read where it is, without a copy.
        block_size: tokens a block.
        adapter: the adapter's digest (``lease.digest``); None for the base model, whose keys are
            the same for everybody.
        adapter_from_token: the base model computes the tokens before this position in
            ``token_ids``, the adapter the others (aLoRA). Blocks that end at or before
            it have the base model's keys.
        parent: the key of the block before ``token_ids``, to go on where an earlier call
            stopped. ``adapter_from_token`` still counts from the start of ``token_ids``; 0 if the
            adapter set in before that.

    Raises:
        ValueError: a token id is negative or over 32 bits, or another argument out of range.
        TypeError: an argument of another kind.
    """
    block_size, adapter_from_token = index(block_size), index(adapter_from_token)  # NumPy's, too
    if block_size < 1 or adapter_from_token < 0:
        raise ValueError(
            f"block_size must be >= 1 and adapter_from_token >= 0, "
            f"not {block_size} and {adapter_from_token}"
        )
    for name, value in (("adapter", adapter), ("parent", parent)):
        if value is not None and (size := memoryview(value).nbytes) != _KEY_BYTES:
            raise ValueError(f"{name} must be {_KEY_BYTES} bytes, not {size}")
    tokens = _little_endian(token_ids)
    block_bytes = block_size * _TOKEN_BYTES
    blocks = iter_unpack(f"{block_bytes}s", tokens[: len(tokens) // block_bytes * block_bytes])
    roots = _roots(block_size, adapter, adapter_from_token)  # they have no end: the blocks do
    key = bytes(_KEY_BYTES) if parent is None else bytes(parent)
    keys = []
    for root, (block,) in zip(roots, blocks, strict=False):
        key = sha256(root + key + block).digest()
        keys.append(key)
    return keys


def _roots(block_size: int, adapter: Digest | None, adapter_from_token: int) -> Iterator[bytes]:
    """Who computes each block, from the first on, without end.

    Of the block in which the adapter sets in, that is the adapter from that token on: the same
    tokens give other KV if it sets in one token later.
    """
    base = _root(block_size.to_bytes(8, "little"))
    if adapter is None:
        return repeat(base)
    of_base, within = divmod(adapter_from_token, block_size)
    first, others = (
        _root(block_size.to_bytes(8, "little"), adapter, position.to_bytes(8, "little"))
        for position in (within, 0)
    )
    return chain(repeat(base, of_base), [first], repeat(others))


def _root(*parts: bytes) -> bytes:
    prefixed = (len(part).to_bytes(8, "little") + part for part in (_TAG, *parts))
    return sha256(b"".join(prefixed)).digest()


def _little_endian(token_ids: Sequence[int] | Buffer) -> memoryview:
    """The ids as bytes; those of an array of uint32 are not copied."""
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]  # asking is the only way to know
    except TypeError:
        ids = cast("Sequence[int]", token_ids)
        if not hasattr(ids, "__getitem__"):  # an iterator, say
            ids = list(ids)
    else:
        if view.ndim != 1:
            raise ValueError(f"token_ids must have one dimension, not {view.ndim}")
        if view.format == "I" and view.c_contiguous and sys.byteorder == "little":
            return view.cast("B")
        try:
            ids = view.tolist()
        except NotImplementedError:  # an array of another byte order, or of objects
            ids = list(cast("Sequence[int]", token_ids))
    try:
        words = array("I", ids)
    except OverflowError:
        at = next(at for at, token in enumerate(ids) if not 0 <= token < 1 << 32)
        raise ValueError(f"token id {ids[at]} at position {at} doesn't fit 32 bits") from None
    if sys.byteorder == "big":
        words.byteswap()
    return memoryview(words).cast("B")
