"""A JSON object from a stranger, read strictly.

``json.loads`` takes NaN, lets the last of two equal keys win and gives up on deep nesting with a
``RecursionError``. In an adapter's files each of these is a reason to refuse.
"""

from __future__ import annotations

import json
from typing import Any

from adaptercache.errors import AdapterInvalid

__all__ = ["parse_object"]

_DEEPEST = 64


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """``data`` as a JSON object.

    Args:
        data: UTF-8, bounded by the caller.
        where: the file, for the error.

    Raises:
        AdapterInvalid: not JSON, not an object, a key given twice, a number that is none, or
            nested more than 64 deep.
    """
    try:
        _check_depth(data)
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_distinct,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise AdapterInvalid(
            "not valid JSON", where=where, found=error, expected="a JSON object"
        ) from error
    if not isinstance(value, dict):
        raise AdapterInvalid(
            "not a JSON object",
            where=where,
            found=type(value).__name__,
            expected="a JSON object",
        )
    return value


def _check_depth(data: bytes) -> None:
    # Before the parser recurses. Brackets inside of strings count too, at worst to refuse a file
    # that has more than 64 of them unclosed in its names.
    if data.count(b"[") + data.count(b"{") <= _DEEPEST:
        return
    depth = 0
    for byte in data.translate(None, delete=_NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} deep")


_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return members


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")
