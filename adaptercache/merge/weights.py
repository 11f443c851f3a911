"""The sum itself: one weight with its ΔW."""

from __future__ import annotations

import torch
from torch import Tensor

from adaptercache.checkpoint import Checkpoint
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["added", "check_dtype", "weight_of_head"]


def added(checkpoint: Checkpoint, path: str, weight: Tensor) -> Tensor:
    """The weight with its ΔW, in the weight's dtype and orientation."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = checkpoint.delta(path, wide)
    if checkpoint.base.modules[path].kind == "conv1d":
        delta = delta.T
    merged = (weight.to(wide) + delta.to(weight.device)).to(weight.dtype)
    if not bool(torch.isfinite(merged).all()):
        raise AdapterInvalid(
            "the merged weight is not finite", where=path, expected=f"what {weight.dtype} holds"
        )
    return merged


def weight_of_head(checkpoint: Checkpoint, head: str, weight: Tensor) -> Tensor:
    """The weight that a head gets of its own."""
    return added(checkpoint, head, weight) if head in checkpoint.modules else weight.clone()


def check_dtype(name: str, dtype: str, is_float: bool) -> None:
    if not is_float:
        raise AdapterUnsupported(
            f"merging into a quantised weight ({dtype})",
            where=name,
            remedy="merge into the base model's full weights, then quantise",
        )
