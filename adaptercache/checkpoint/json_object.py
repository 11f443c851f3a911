"""A JSON object from a stranger, read strictly and in bounded memory.

``json.loads`` takes NaN, lets the last of two equal keys win, gives up on deep nesting with a
``RecursionError`` and builds whatever is asked of it: ``{}`` takes 30 times the memory of its text.
In an adapter's files each of these is a reason to refuse.
"""

from __future__ import annotations

import json
from typing import Any

from adaptercache.errors import AdapterInvalid

__all__ = ["MOST_VALUES", "parse_object"]

MOST_VALUES = 1 << 18
"""Values in a document, keys included: about 20 MB once parsed, and a quarter of a second."""

_DEEPEST = 64
_LONGEST_INTEGER = 20
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def parse_object(data: bytes, where: str, *, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """``data`` as a JSON object.

    Args:
        data: UTF-8, its length bounded by the caller.
        where: the file, for the error.
        most_values: how many values (and keys) it may have.

    Raises:
        AdapterInvalid: not JSON, not an object, a key given twice, a number that is none, text
            that is none, too many values, or nested more than 64 deep.
    """
    try:
        value = _parse(data, most_values)
        problem = None
    except (ValueError, RecursionError) as error:
        problem = f"{error!s:.200}"  # not the error itself: it holds the whole text
    if problem is not None:
        raise AdapterInvalid("not valid JSON", where=where, found=problem, expected="a JSON object")
    if not isinstance(value, dict):
        raise AdapterInvalid(
            "not a JSON object",
            where=where,
            found=type(value).__name__,
            expected="a JSON object",
        )
    return value


def _parse(data: bytes, most_values: int) -> object:
    _check_structure(data, most_values)
    value: object = json.loads(
        data.decode("utf-8"),
        object_pairs_hook=_distinct,
        parse_constant=_refuse_constant,
        parse_int=_integer,
    )
    if b"\\u" in data:  # escapes can spell half a character, which is no text
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _check_structure(data: bytes, most_values: int) -> None:
    """Counts before the parser builds anything, and before it recurses."""
    values = sum(data.count(mark) for mark in b",:[{")  # those inside of strings too
    if max(values, data.count(b'"') // 4) > most_values:
        raise ValueError(f"more than {most_values} values")
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(unescaped.split(b'"')[::2])  # of strings: their brackets mean nothing
    depth = 0
    for byte in outside.translate(None, delete=_NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} deep")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name!r:.80} is given twice")
            seen.add(name)
    return members


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
