"""Large tensors taken in slices, each small enough for torch to do it in the calling thread.

Torch shares a larger one out over its own threads and waits for the last of them: for matrices of
this size that costs more than it brings, and milliseconds each where the cores are busy, as they
are when several adapters load at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["edges", "slices_of"]

_ELEMENTS = 1 << 15  # the grain of torch's own threads


def slices_of(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a matrix ``[rows, columns]``, a slice at a time."""
    step = max(1, _ELEMENTS // max(1, columns))
    for first in range(0, rows, step):
        yield slice(first, first + step)


def edges(tensor: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest of its numbers; NaN where there is one.

    Args:
        tensor: of any shape, not empty.
    """
    if tensor.numel() <= _ELEMENTS:
        low, high = torch.aminmax(tensor)
        return float(low), float(high)
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    found = [torch.aminmax(part) for part in flat.split(_ELEMENTS)]
    low = torch.stack([part.min for part in found]).amin()
    high = torch.stack([part.max for part in found]).amax()
    return float(low), float(high)
