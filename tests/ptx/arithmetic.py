"""What an instruction makes of registers, of all threads at once."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptx.program import UnknownInstruction

Lanes: TypeAlias = "NDArray[Any]"
"""A register: a number of each thread, uint64 with no bits beyond its width; bool: a predicate."""


def read(bits: Lanes, kind: str) -> Lanes:
    """A register's bits as what the instruction takes them for."""
    if kind == "pred":
        return bits.astype(bool)
    if kind == "f32":
        return np.asarray(bits.astype(np.uint32).view(np.float32))
    if kind == "bf16":
        return read(bits << np.uint64(16), "f32")
    if kind == "f16":
        return np.asarray(bits.astype(np.uint16).view(np.float16).astype(np.float32))
    unused = 64 - int(kind[1:])
    number: Lanes = bits.astype(np.int64 if kind[0] == "s" else np.uint64)
    number = (number << unused) >> unused
    return number


def bits_of(value: Lanes, width: int = 64) -> Lanes:
    if value.dtype == np.float32:
        return np.asarray(value.view(np.uint32).astype(np.uint64))
    return value if value.dtype == bool else read(value, f"u{width}")


def bfloat16(value: Lanes) -> Lanes:
    """The bits, rounded to the nearest, and to even between two."""
    bits = bits_of(value)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.asarray(np.where(np.isnan(value), np.uint64(0x7FFF), rounded))


def float16(value: Lanes) -> Lanes:
    """The bits, rounded likewise."""
    bits = value.astype(np.float16).view(np.uint16).astype(np.uint64)
    return np.asarray(np.where(np.isnan(value), np.uint64(0x7FFF), bits))


def _quotient(a: Lanes, b: Lanes) -> Lanes:
    toward_0: Lanes = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
    return toward_0


def _permuted(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    if (selector & np.uint64(0x8888)).any():
        raise UnknownInstruction("prmt that repeats a sign")
    both, result = a | (b << np.uint64(32)), np.zeros_like(a)
    for place in map(np.uint64, range(0, 32, 8)):
        byte = (selector >> (place // np.uint64(2))) & np.uint64(7)
        result |= ((both >> (byte * np.uint64(8))) & np.uint64(0xFF)) << place
    return result


def _fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return (a.astype(np.float64) * b + c).astype(np.float32)


COMPARE: dict[str, Callable[..., Lanes]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq")},
    "ne": lambda a, b: (a < b) | (a > b),  # of a NaN it is false
    "num": lambda a, b: (a == a) & (b == b),
}
ARITHMETIC: dict[str, Callable[..., Lanes]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "neg": lambda a: -a,
    "abs": np.abs,
    "mul": lambda a, b: a * b,
    "mul.lo": lambda a, b: a * b,
    "mul.wide": lambda a, b: a * b,
    "mul.hi": lambda a, b: (a * b) >> 32,
    "mad.lo": lambda a, b, c: a * b + c,
    "mad.wide": lambda a, b, c: a * b + c,
    "fma": _fused,
    "div": _quotient,
    "rem": lambda a, b: a - b * _quotient(a, b),
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shl": lambda a, n: np.asarray(np.where(n < 64, a << np.minimum(n, 63), 0)),
    "shr": lambda a, n: a >> np.minimum(n, 63),
    "bfe": lambda a, at, count: (a << (64 - at - count)) >> (64 - count),
    "prmt": _permuted,
    "selp": lambda a, b, which: np.asarray(np.where(which, a, b)),
}
OF_FLOAT32 = {"add", "sub", "mul", "fma", "neg", "abs", "selp"}
ROUNDED: dict[str, Callable[..., Lanes]] = {
    "cvt.f32.bf16": lambda a: bits_of(read(a, "bf16")),
    "cvt.rn.bf16.f32": lambda a: bfloat16(read(a, "f32")),
    "cvt.rn.bf16x2.f32": lambda a, b: (
        bfloat16(read(a, "f32")) << np.uint64(16) | bfloat16(read(b, "f32"))
    ),
    "cvt.f32.f16": lambda a: bits_of(read(a, "f16")),
    "cvt.rn.f16.f32": lambda a: float16(read(a, "f32")),
    "cvt.rn.f16x2.f32": lambda a, b: (
        float16(read(a, "f32")) << np.uint64(16) | float16(read(b, "f32"))
    ),
}


@cache
def operation(op: str) -> Callable[..., Lanes] | None:
    """From the sources' bits to the target's; None: there is none."""
    if op in ROUNDED:
        return ROUNDED[op]
    name, _, kind = op.rpartition(".")
    name = name.removesuffix(".rn")
    if (to := re.fullmatch(r"cvt\.[su](16|32|64)", name)) and re.fullmatch(r"[su]\d+", kind):
        return lambda a: bits_of(read(a, kind), int(to[1]))
    if not re.fullmatch(r"pred|f32|[sub](16|32|64)", kind):
        return None
    function = COMPARE.get(name[5:]) if name[:5] == "setp." else ARITHMETIC.get(name)
    is_missing = name in ARITHMETIC and kind == "f32" and name not in OF_FLOAT32
    if function is None or is_missing or (name == "mul.hi" and kind[1:] != "32"):
        return None
    wide = f"{kind[0]}64"
    last = {"selp": "pred", "mad.wide": wide}.get(name, kind)
    width = 64 if name.endswith(".wide") or kind == "pred" else int(kind[1:])

    def compute(*sources: Lanes) -> Lanes:
        kinds = [kind, kind, last][: len(sources)]
        return bits_of(function(*map(read, sources, kinds)), width)

    return compute
