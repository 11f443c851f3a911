"""CRC-32 of bytes whose parts were summed apart: by several threads, while each part was hot.

A CRC is a remainder of polynomials, so the sum of a whole is that of its first part, times x to the
bits of the second, plus that of the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

__all__ = ["join_crc32"]

_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest bit first
_ONE = 1 << 31


def join_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of a whole.

    Args:
        parts: ``(CRC-32, bytes)`` of each part, in order.
    """
    whole = 0
    for crc, nbytes in parts:
        whole = _product(_power(nbytes), whole) ^ crc
    return whole


@lru_cache(64)
def _power(nbytes: int) -> int:
    """x to the bits of ``nbytes``, modulo the polynomial."""
    result, square = _ONE, _ONE >> 8  # 1, and x⁸
    while nbytes:
        if nbytes & 1:
            result = _product(square, result)
        square = _product(square, square)
        nbytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    """a·b modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
