"""Where tests run, and what a lease's slot names there."""

from __future__ import annotations

import torch
from torch import Tensor

from adaptercache.cache import AdapterCache
from adaptercache.lease import Lease

__all__ = ["any_device", "held_weights"]


def any_device() -> str:
    """``"cuda"`` where torch sees a GPU, else ``"cpu"``: tests that use it run on both."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def held_weights(
    cache: AdapterCache, lease: Lease, layer: int, module: str
) -> tuple[Tensor, Tensor, float] | None:
    """``(A [r, in], B [out, r], scaling)`` as the lease's slot names them now, read back from the
    arena into CPU tensors; None where the adapter has nothing there."""
    found = cache._gpu.stack.dense(lease.slot, layer, module)
    return (found[0].cpu(), found[1].cpu(), found[2]) if found is not None else None
