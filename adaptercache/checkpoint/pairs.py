"""The A and B of each module in a file: paired up, checked by themselves, nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from adaptercache.checkpoint.features import unknown_tensor
from adaptercache.checkpoint.names import BaseCopy, LoraName, Side, canonical, parse_name
from adaptercache.checkpoint.slices import edges
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["Contents", "Pair", "check_values", "sort_tensors"]

_LARGEST_WEIGHT = torch.finfo(torch.float32).max
_LARGEST_DELTA = 1e38

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A and B as the file has them: two-dimensional, floating point and not empty.

    Args:
        module: the path that PEFT knew the module by; patterns match against it.
        is_embedding, depth: as in `LoraName`.
        a: ``[rank, in]``, or a stack of experts' in one axis.
        b: ``[out, rank]``, likewise.
        names: of the two tensors in the file.
        wrapped: as in `LoraName`.
    """

    module: str
    is_embedding: bool
    depth: int
    a: torch.Tensor
    b: torch.Tensor
    names: tuple[str, str]
    wrapped: str = ""

    def with_values(self, read: Callable[[str], torch.Tensor]) -> Pair:
        """The pair with its tensors read (see `StoredTensors`)."""
        a, b = (read(name) for name in self.names)
        return replace(self, a=a, b=b)


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a weights file holds.

    Args:
        pairs: its LoRA.
        copies: its copies of base weights by their names, with their shapes.
    """

    pairs: tuple[Pair, ...]
    copies: Mapping[str, tuple[BaseCopy, tuple[int, ...]]]


def sort_tensors(tensors: Mapping[str, torch.Tensor]) -> Contents:
    """Accounts for every tensor of a file.

    Raises:
        AdapterInvalid: an A or B is missing, given twice or empty.
        AdapterUnsupported: a tensor is neither LoRA nor a copy of a base weight, or a LoRA tensor
            has another number of dimensions or another dtype.
    """
    _refuse_empty(tensors)
    copies: dict[str, tuple[BaseCopy, tuple[int, ...]]] = {}
    sides: dict[tuple[str, bool, int], dict[Side, tuple[str, LoraName]]] = {}
    for name in tensors:
        match parse_name(name):
            case None:
                raise unknown_tensor(name)
            case BaseCopy() as copy:
                copies[name] = (copy, tuple(tensors[name].shape))
            case LoraName() as parsed:
                place = (canonical(parsed.module), parsed.is_embedding, parsed.depth)
                found = sides.setdefault(place, {})
                if parsed.side in found:
                    raise AdapterInvalid(
                        "two tensors for one matrix",
                        where=parsed.module,
                        found=f"{found[parsed.side][0]} and {name}",
                        expected="one",
                    )
                found[parsed.side] = (name, parsed)
    return Contents(tuple(_pair(found, tensors) for found in sides.values()), copies)


def _refuse_empty(tensors: Mapping[str, torch.Tensor]) -> None:
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if empty or not tensors:
        raise AdapterInvalid(
            "the adapter's weights are empty",
            where=empty[0] if empty else "the weights file",
            found=f"{len(empty)} of {len(tensors)} tensors have no elements",
            expected="weights",
            remedy="usually DeepSpeed ZeRO-3 saved without gathering: gather, then save again",
        )


def _pair(found: Mapping[Side, tuple[str, LoraName]], tensors: Mapping[str, torch.Tensor]) -> Pair:
    if len(found) < 2:
        ((side, (name, parsed)),) = found.items()
        other = "lora_B" if side == "A" else "lora_A"
        raise AdapterInvalid(
            f"lora_{side} without {other}", where=parsed.module, found=name, expected="both"
        )
    (name_a, parsed), (name_b, _) = found["A"], found["B"]
    for name in (name_a, name_b):
        _check(name, tensors[name])
    return Pair(
        parsed.module,
        parsed.is_embedding,
        parsed.depth,
        tensors[name_a],
        tensors[name_b],
        (name_a, name_b),
        parsed.wrapped,
    )


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise AdapterUnsupported(
            f"a LoRA tensor of {tensor.dim()} dimensions",
            where=f"{name}: {tuple(tensor.shape)}",
            remedy="convolutions, and experts in three dimensions, are not served: save with PEFT",
        )
    if tensor.dtype not in _DTYPES:
        raise AdapterUnsupported(
            f"LoRA tensors of {tensor.dtype}", where=name, remedy="save them as bfloat16 or float32"
        )


def check_values(pair: Pair, scaling: float) -> None:
    """Reads both tensors: ΔW is finite, in float32.

    Raises:
        AdapterInvalid: one of them holds NaN or infinity, or numbers so large that ΔW may.
    """
    a, b = (
        _largest(name, tensor) for name, tensor in zip(pair.names, (pair.a, pair.b), strict=True)
    )
    if not a * b * pair.a.shape[0] * max(1.0, scaling) < _LARGEST_DELTA:
        raise AdapterInvalid(
            "the weights are too large",
            where=pair.module,
            found=f"A up to {a:.3g}, B up to {b:.3g}, scaling {scaling:.3g}",
            expected="a ΔW within float32",
        )


def _largest(name: str, tensor: torch.Tensor) -> float:
    # One pass without a mask: NaN passes through both edges, and infinity is one of them.
    low, high = edges(tensor)
    if not (low >= -_LARGEST_WEIGHT and high <= _LARGEST_WEIGHT):
        raise AdapterInvalid(
            "the weights are not finite",
            where=name,
            found="NaN, infinity, or a number beyond float32",
            expected="numbers",
            remedy="usually training diverged: publish an earlier checkpoint",
        )
    return max(-low, high)
