"""One weight of a base model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from adaptercache.errors import AdapterInvalid

__all__ = ["LARGEST_SIZE", "MOST_LAYERS", "BaseModule", "ModuleKind", "broken_base"]

LARGEST_SIZE = (1 << 31) - 1
"""Of one dimension of a weight: far over any model's."""

MOST_LAYERS = 10_000
"""The table of a base has a line for each module of each layer."""

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
    """The error for a field, or a line of a table, that no model can have."""
    if isinstance(found, int) and found.bit_length() > 64:  # Python won't write out the longest
        found = f"a number of {found.bit_length()} bits"
    return AdapterInvalid(
        "the base model's config or table is broken", where=where, found=found, expected=expected
    )
