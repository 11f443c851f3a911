"""Your own dense tensors, checked before they are copied into a stack (`LoraStack.from_dense`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from adaptercache.kernels.integers import integer
from adaptercache.layout import MAX_RANK

__all__ = ["Dense", "read_dense"]

Tensors = tuple[Tensor, Tensor, "Sequence[float] | Tensor"]


@dataclass(frozen=True, slots=True)
class Dense:
    """What was given, checked: tensors that go together, and their numbers."""

    num_slots: int
    max_rank: int
    """The largest r."""
    ranks: list[int]
    """Of each slot."""
    matrices: dict[tuple[int, str], tuple[Tensor, Tensor]]
    scalings: dict[tuple[int, str], list[float]]

    @property
    def table(self) -> dict[str, dict[str, object]]:
        """The base as a table (see `BaseModel.from_table`)."""
        return {
            f"layers.{layer}.{module}": {"kind": "linear", "out_in": [b.shape[1], a.shape[2]]}
            for (layer, module), (a, b) in self.matrices.items()
        }


def read_dense(dense: Mapping[tuple[int, str], Tensors], ranks: Sequence[int] | None) -> Dense:
    """Check all of it.

    Raises:
        ValueError: nothing given; or keys, shapes, dtypes, devices, ranks or scalings that don't go
            together, or that can't be.
        TypeError: something of another type than it must be.
    """
    if not isinstance(dense, Mapping):
        raise TypeError(f"dense is of type {type(dense).__name__}: give a dict")
    if not dense:
        raise ValueError("no tensors were given")
    matrices: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    scalings: dict[tuple[int, str], list[float]] = {}
    value: Any
    for key, value in dense.items():
        where = _name(key)
        if not isinstance(value, (tuple, list)) or len(value) != 3:
            raise TypeError(f"{where}: give (A, B, scalings)")
        a, b, its = value
        for name, tensor in (("A", a), ("B", b)):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{where}: {name} is of type {type(tensor).__name__}: give a tensor"
                )
        matrices[key], scalings[key] = (a, b), _scalings(where, its)
        _check_shapes(where, a, b, len(scalings[key]))
    _check_alike(matrices)
    key, (a, _) = max(matrices.items(), key=lambda each: each[1][0].shape[1])
    if not 1 <= a.shape[1] <= MAX_RANK:
        raise ValueError(f"{_name(key)}: r is {a.shape[1]}: 1 to {MAX_RANK}")
    return Dense(len(a), a.shape[1], _ranks(ranks, len(a), a.shape[1]), matrices, scalings)


def _name(key: Any) -> str:
    """Of a key, in messages."""
    types = [type(part) for part in key] if isinstance(key, tuple) else None
    if types != [int, str] or "." in key[1]:
        raise ValueError(f"{key!r:.80}: a key is (layer, module), such as (0, 'q_proj')")
    layer, module = key
    if layer < 0:
        raise ValueError(f"layer {layer}: layers count from 0 on")
    return f"layer {layer}, {module!r}"


def _scalings(where: str, scalings: Any) -> list[float]:
    """As numbers that float32 holds."""
    if isinstance(scalings, Tensor) and scalings.dim() != 1:
        raise ValueError(f"{where}: scalings are {list(scalings.shape)}; expected [slots]")
    numbers = []
    for slot, scaling in enumerate(_listed(scalings, f"{where}: scalings")):
        its = f"{where}: scaling {scaling!r:.80} of slot {slot}"
        if isinstance(scaling, Tensor) and not scaling.dim():
            scaling = scaling.item()
        if not isinstance(scaling, Real):
            raise TypeError(f"{its}: a number")
        numbers.append(float(scaling))
        if not isfinite(numbers[-1]) or abs(numbers[-1]) > torch.finfo(torch.float32).max:
            raise ValueError(f"{its}: float32 holds no such number")
    return numbers


def _listed(values: Any, what: str) -> list[Any]:
    """One a slot, as a list; also of numpy."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, Mapping) or not hasattr(values, "__getitem__"):
        kind = type(values).__name__
        raise TypeError(f"{what} is of type {kind}: give a list, or a tensor [slots]")
    return list(values)


def _check_shapes(where: str, a: Tensor, b: Tensor, scalings: int) -> None:
    shapes = f"{where}: A is {list(a.shape)}, B is {list(b.shape)}"
    if a.dim() != 3 or b.dim() != 3:
        raise ValueError(f"{shapes}; expected [slots, r, in] and [slots, out, r]")
    if b.shape[::2] != a.shape[:2] or scalings != len(a):
        raise ValueError(f"{shapes}, with {scalings} scalings; slots or r differ")
    if not a.shape[2] or not b.shape[1]:
        raise ValueError(f"{shapes}: in and out are 1 at least")
    if a.dtype != b.dtype:
        raise ValueError(f"{where}: A is {a.dtype}, B is {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"{where}: A is on {a.device}, B on {b.device}")


def _check_alike(matrices: Mapping[tuple[int, str], tuple[Tensor, Tensor]]) -> None:
    """As the first: both that differ are named, since either may be the odd one."""
    (first, (its_a, _)), *others = matrices.items()
    for key, (a, _) in others:
        for one, other in (
            (f"of {len(a)} slots", f"of {len(its_a)} slots"),
            (a.dtype, its_a.dtype),
            (f"on {a.device}", f"on {its_a.device}"),
        ):
            if one != other:
                raise ValueError(f"{_name(key)}: A is {one}, that of {_name(first)} {other}")


def _ranks(ranks: Any, num_slots: int, most: int) -> list[int]:
    """Of each slot."""
    if ranks is None:
        return [most] * num_slots
    ranks = _listed(ranks, "ranks")
    if len(ranks) != num_slots:
        raise ValueError(f"{len(ranks)} ranks for {num_slots} slots: one each")
    found = []
    for slot, rank in enumerate(ranks):
        what = f"slot {slot} is of rank {rank!r:.80}"
        found.append(integer(rank, what))
        if not 0 <= found[-1] <= most:
            raise ValueError(f"{what}: A and B hold 0 to {most}")
    return found
