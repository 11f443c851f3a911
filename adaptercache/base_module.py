"""One weight of a base model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from adaptercache.errors import AdapterInvalid

__all__ = ["BaseModule", "ModuleKind", "broken_base"]

ModuleKind: TypeAlias = Literal["linear", "conv1d", "embedding", "parameter"]


@dataclass(frozen=True, slots=True)
class BaseModule:
    """One weight of the base model.

    Args:
        kind: ``"conv1d"`` is the transposed linear layer of GPT-2; ``"parameter"`` is a bare
            parameter, such as the stacked experts of a MoE layer.
        shape: linear and conv1d ``(out, in)``; embedding ``(vocabulary, hidden)``; a parameter its
            own shape.
        is_transposed: of a parameter: its module's class says that it is ``[experts, in, out]``.
    """

    kind: ModuleKind
    shape: tuple[int, ...]
    is_transposed: bool = False


def broken_base(where: str, found: object, expected: str) -> AdapterInvalid:
    return AdapterInvalid(
        "the base model's config or table is broken", where=where, found=found, expected=expected
    )
