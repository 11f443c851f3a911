"""`add_lora`: what a model's layers call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptercache.kernels.reference import add_lora_reference
from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.stack import Group

__all__ = ["add_lora"]


def add_lora(
    y: Tensor | Sequence[Tensor],
    x: Tensor,
    batch: LoraBatch,
    modules: Sequence[str],
    layer: int,
) -> None:
    """Add the LoRA term of modules that share their input: ``y += scaling · (x Aᵀ) Bᵀ``.

    Every token uses its own adapter; tokens of the base model and padding rows are left alone.
    The arithmetic is float32, and rounded once, into y.

    Args:
        y: the modules' outputs, changed in place: one tensor ``[num_rows, sum of out]`` with the
            modules side by side, or one ``[num_rows, out]`` a module. Rows may be strided.
        x: their input, ``[num_rows, in]``, of the arena's dtype (not quantised).
        batch: of this step.
        modules: names, in the order of y: ``("q_proj", "k_proj", "v_proj")``.
        layer: of the decoder.

    Raises:
        ValueError: an unknown module or layer, or a shape that doesn't fit.
        TypeError: a dtype or device that is not the arena's.
        RuntimeError: the batch's ``with`` block has ended.

    Thread-safe as far as y is the caller's own.
    """
    group = batch.stack.group(layer, modules)
    _check(y, x, batch, group)
    batch.wait(layer)
    if x.is_cuda:
        from adaptercache.kernels.launch import add_lora_triton  # triton: only where it is used

        add_lora_triton(y, x, batch, group)
        return
    outputs = y.split(group.widths, dim=1) if isinstance(y, Tensor) else y
    for output, module in zip(outputs, group.modules, strict=True):
        add_lora_reference(output, x, batch, module, layer, dtype=torch.float32)


def _check(y: Tensor | Sequence[Tensor], x: Tensor, batch: LoraBatch, group: Group) -> None:
    """Everything, before anything is computed."""
    if batch.has_ended:
        raise RuntimeError("the batch's with block has ended: make all of a step's launches in it")
    _check_tensor("x", x, group.in_features, batch, group)
    if isinstance(y, Tensor):
        _check_tensor("y", y, sum(group.widths), batch, group)
        return
    if len(y) != len(group.modules):
        raise ValueError(f"y is {len(y)} tensors, for {len(group.modules)} modules")
    for output, width in zip(y, group.widths, strict=True):
        _check_tensor("y", output, width, batch, group)


def _check_tensor(name: str, tensor: Tensor, width: int, batch: LoraBatch, group: Group) -> None:
    if tensor.shape != (batch.num_rows, width):
        raise ValueError(
            f"{name} is {list(tensor.shape)}, expected [{batch.num_rows}, {width}] for "
            f"{', '.join(group.modules)}"
        )
    if width > 1 and tensor.stride(1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}: rows may be apart, columns must not be"
        )
    stack = batch.stack
    if tensor.dtype != stack.dtype or tensor.device != stack.device:
        raise TypeError(
            f"{name} is {tensor.dtype} on {tensor.device}; the arena is {stack.dtype} on "
            f"{stack.device}"
        )
