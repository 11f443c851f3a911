"""An adapter of another trainer, once its matrices lie as PEFT's do."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from adaptercache.checkpoint.names import Side
from adaptercache.checkpoint.pairs import Pair
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["ForeignAdapter", "ForeignName", "alpha_for", "checked_pair", "pair_up"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignAdapter:
    """What is left to be written.

    Args:
        pairs: A ``[rank, in]`` and B ``[out, rank]`` of every module, by its path in transformers'
            model; views of the source's tensors where they can be. Their names are the source's.
        alphas: alpha for each rank among the pairs.
        base_model: the base that the source names in PEFT's own field, if any.
    """

    pairs: tuple[Pair, ...]
    alphas: Mapping[int, float]
    base_model: str | None = None


@dataclass(frozen=True, slots=True)
class ForeignName:
    """The name of a LoRA tensor, taken apart: whose it is, and which of the two matrices."""

    module: str
    side: Side


def pair_up(names: Iterable[tuple[str, ForeignName]]) -> dict[str, tuple[str, str]]:
    """The names of A and B by module, in the source's order.

    Raises:
        AdapterInvalid: one of them is missing, or there are none at all.
    """
    sides: dict[str, dict[Side, str]] = {}
    for text, name in names:
        sides.setdefault(name.module, {})[name.side] = text
    if not sides:
        raise AdapterInvalid("the adapter has no weights", found="no tensors", expected="LoRA")
    for module, found in sides.items():
        if len(found) < 2:
            raise AdapterInvalid(
                "one matrix of LoRA without the other",
                where=module,
                found=", ".join(found.values()),
                expected="lora_a and lora_b",
            )
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def alpha_for(scale: float, rank: int) -> float:
    """The alpha with ``alpha / rank == scale``.

    Between two neighbouring numbers there may be none if the rank is no power of two. Then it is
    the same scale in float32, which is what both sides multiply with.

    Raises:
        AdapterUnsupported: there is none in float32 either.
    """
    product = scale * rank
    for alpha in (product, math.nextafter(product, math.inf), math.nextafter(product, 0.0)):
        if alpha / rank == scale:
            return alpha
    if _float32(product / rank) == _float32(scale):
        return product
    raise AdapterUnsupported(
        f"scale {scale!r} at rank {rank}, which no lora_alpha gives",
        where="the scaling",
        remedy="round it to float32",
    )


def _float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def checked_pair(
    module: str,
    a: torch.Tensor,
    b: torch.Tensor,
    names: tuple[str, str],
    *,
    is_embedding: bool = False,
) -> Pair:
    """A module's matrices as a pair that PEFT could hold.

    Raises:
        AdapterInvalid: they are empty, or disagree on the rank.
        AdapterUnsupported: they are no matrices, or not of a floating-point type.
    """
    for name, tensor in zip(names, (a, b), strict=True):
        if tensor.dim() != 2:
            raise AdapterUnsupported(
                f"a LoRA tensor of {tensor.dim()} dimensions",
                where=f"{name}: {tuple(tensor.shape)}",
                remedy="train plain LoRA of linear layers",
            )
        if tensor.dtype not in _DTYPES:
            raise AdapterUnsupported(
                f"LoRA tensors of {tensor.dtype}",
                where=name,
                remedy="save them as bfloat16 or float32",
            )
    if a.shape[0] != b.shape[1] or not a.numel() or not b.numel():
        raise AdapterInvalid(
            "lora_a and lora_b don't fit each other",
            where=module,
            found=f"{names[0]} as A {tuple(a.shape)}, {names[1]} as B {tuple(b.shape)}",
            expected="A [rank, in], B [out, rank]",
        )
    return Pair(module, is_embedding, 0, a, b, names)
