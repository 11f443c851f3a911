"""The oracle: what every kernel must compute, in plain torch.

Semantics:
    y[t] += scaling[s] · (x[t] A[s]ᵀ) B[s]ᵀ   with s = slot of token t, nothing where s = −1

It gathers each adapter's matrices from the arena's cells, so that it depends on the tables and
the paged layout exactly as kernels do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.work import rows_by_slot

__all__ = ["add_lora_reference"]


def add_lora_reference(
    y: Tensor, x: Tensor, batch: LoraBatch, module: str, layer: int, *, dtype: torch.dtype
) -> None:
    """Add one module's LoRA term to ``y``, in place.

    Args:
        y: ``[num_rows, out]``, rows may be strided.
        x: ``[num_rows, in]``.
        dtype: that the arithmetic is done in; the sum is rounded once, into y.
    """
    for slot, rows in rows_by_slot(batch.segments).items():
        found = batch.stack.dense(slot, layer, module)
        if found is None:
            continue
        a, b, scaling = found
        picked = torch.tensor(list(rows), device=x.device)
        term = (x[picked].to(dtype) @ a.to(dtype).t()) @ b.to(dtype).t() * scaling
        y[picked] = (y[picked].to(dtype) + term).to(y.dtype)
