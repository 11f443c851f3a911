"""Products on the tensor cores, whatever the type of the weights."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dot_into", "dot_rounded"]


@triton.jit
def dot_into(sums, x, a, IN_FLOAT32: tl.constexpr):
    """Semantics: ``sums + x @ a``, float32; x and a are of one type."""
    if IN_FLOAT32:
        return tl.dot(x.to(tl.float32), a.to(tl.float32), sums, input_precision="ieee")
    if x.dtype == tl.float32:
        return tl.dot(x, a, sums, input_precision="tf32x3")
    return tl.dot(x, a, sums)


@triton.jit
def dot_rounded(h, b, IN_FLOAT32: tl.constexpr):
    """Semantics: ``h @ b``, float32, with float32 ``h`` rounded to as many bits as ``b`` has.

    The tensor cores take both of one type. The rounding errors of h, being independent, come to
    those of rounding the result once, so that y's error is √2 of the least there can be. float16
    could not hold a large h: it goes in as TF32, which has as many bits and float32's range.
    """
    if IN_FLOAT32:
        return tl.dot(h, b.to(tl.float32), input_precision="ieee")
    if b.dtype == tl.float32:
        return tl.dot(h, b, input_precision="tf32x3")
    if b.dtype == tl.float16:
        bits = (h.to(tl.int32, bitcast=True) + 0x1000) & ~0x1FFF  # the tensor cores only cut off
        return tl.dot(bits.to(tl.float32, bitcast=True), b.to(tl.float32), input_precision="tf32")
    return tl.dot(h.to(b.dtype), b)
