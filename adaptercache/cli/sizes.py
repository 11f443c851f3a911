"""Sizes as people write them: ``8GiB``, ``512MB``, ``1.5 TiB``, ``65536``."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["format_size", "parse_size"]

_BINARY = ("KiB", "MiB", "GiB", "TiB")
_UNITS = {
    "": 1,
    "B": 1,
    **{"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{unit: 1 << 10 * power for power, unit in enumerate(_BINARY, start=1)},
}
_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?) ?(?P<unit>[A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes, at least one; a fraction of a byte is cut off.

    Units are exact and differ by case: ``MB`` is 10⁶ bytes, ``MiB`` 2²⁰; bare numbers are bytes.

    Raises:
        ValueError: it is not of that form, or less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{text!r} is no size: give bytes, or a number with one of {units}")
    size = int(Decimal(match["number"]) * _UNITS[match["unit"]])
    if size < 1:
        raise ValueError(f"{text!r} is no size: give at least one byte")
    return size


def format_size(nbytes: int) -> str:
    """``83886080`` as ``80 MiB``: in the largest binary unit that leaves at least one."""
    size, unit = float(nbytes), "B"
    for larger in _BINARY:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{round(size, 2):,g} {unit}" if size < 1e5 else f"{size:,.0f} {unit}"
