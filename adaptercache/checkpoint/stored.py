"""Tensors whose values may still lie in a file: known by dtype and shape, read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["StoredTensors"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensors:
    """The tensors of one file, or of a dict.

    Args:
        outlines: dtype and shape of each by name; in a file, tensors on the meta device, which have
            no values that somebody could take for real ones.
        read: a tensor's values by its name, each read once. Of a file, only while it is open.
    """

    outlines: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]

    @classmethod
    def in_memory(cls, tensors: Mapping[str, torch.Tensor]) -> StoredTensors:
        """Of tensors that have their values."""
        return cls(tensors, tensors.__getitem__)

    def read_all(self) -> dict[str, torch.Tensor]:
        """Every tensor by name."""
        return {name: self.read(name) for name in self.outlines}
