"""`add_lora`: what a model's layers call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from adaptercache.kernels.reference import add_lora_reference
from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.spans import Span, share
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
    Modules that no adapter of the batch has launch nothing (see `LoraBatch`).
    Sums are float32; y is rounded once, and x Aᵀ may be rounded to the weights' precision before
    it is multiplied (docs/kernels.md).

    Args:
        y: the modules' outputs, changed in place: one tensor ``[num_rows, sum of out]`` with the
            modules side by side, or a list of one ``[num_rows, out]`` a module. Rows may be
            strided; columns lie side by side. Its memory is its own: not x's, and not twice there.
        x: their input, ``[num_rows, in]``, of the arena's dtype (not quantised).
        batch: of this step.
        modules: names, in the order of y: ``("q_proj", "k_proj", "v_proj")``.
        layer: of the decoder.

    Raises:
        ValueError: an unknown module or layer, a shape that doesn't fit, or memory that is shared.
        TypeError: a dtype or device that is not the arena's, or a tensor that asks for gradients.
        RuntimeError: the batch's ``with`` block has ended.

    What is refused leaves y as it was. Autograd and inference mode are not asked: y may be made in
    any mode. Thread-safe as far as y is the caller's own.
    """
    if not isinstance(batch, LoraBatch):
        raise TypeError(f"batch is of type {type(batch).__name__}: give a LoraBatch")
    group = batch.stack.group(layer, modules)
    _check(y, x, batch, group)
    batch.wait(layer)
    if batch.passes_over(group.modules):
        return
    if x.is_cuda:
        from adaptercache.kernels.launch import add_lora_triton  # triton: only where it is used

        add_lora_triton(y, x, batch, group)
        return
    with torch.inference_mode():  # else y could not be all that a kernel takes
        outputs = y.split(group.widths, dim=1) if isinstance(y, Tensor) else y
        add_lora_reference(outputs, x, batch, group)


def _check(y: Tensor | Sequence[Tensor], x: Tensor, batch: LoraBatch, group: Group) -> None:
    """Everything, before anything is computed."""
    if batch.has_ended:
        raise RuntimeError("the batch's with block has ended: make all of a step's launches in it")
    its_x = _check_tensor("x", x, group.in_features, batch, group.modules)
    if isinstance(y, Tensor):
        _check_output(y, its_x, sum(group.widths), batch, group.modules)
        return
    if not isinstance(y, (list, tuple)):
        raise TypeError(
            f"y is of type {type(y).__name__}: give a tensor, or a list with one a module"
        )
    if len(y) != len(group.modules):
        raise ValueError(f"y is {len(y)} tensors, for {len(group.modules)} modules")
    spans = [
        _check_output(output, its_x, width, batch, (module,))
        for output, width, module in zip(y, group.widths, group.modules, strict=True)
    ]
    for i, j in combinations(range(len(spans)), 2):
        if batch.num_rows and share(spans[i], spans[j], batch.num_rows):
            raise ValueError(
                f"y has memory twice: {group.modules[i]} and {group.modules[j]}, each needs its own"
            )


def _check_output(y: Tensor, x: Span, width: int, batch: LoraBatch, modules: Sequence[str]) -> Span:
    its = _check_tensor("y", y, width, batch, modules)
    rows = batch.num_rows
    if rows > 1 and its[1] < its[2]:
        raise ValueError(f"y has strides {y.stride()}: its rows overlap")
    if rows and share(its, x, rows):
        raise ValueError("y overlaps x: give it memory of its own")
    return its


def _check_tensor(
    name: str, tensor: Tensor, width: int, batch: LoraBatch, modules: Sequence[str]
) -> Span:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is of type {type(tensor).__name__}: give a tensor")
    if tensor.shape != (batch.num_rows, width):
        raise ValueError(
            f"{name} is {list(tensor.shape)}, expected [{batch.num_rows}, {width}] for "
            f"{', '.join(modules)}"
        )
    step, apart = tensor.stride()
    if width > 1 and apart != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}: rows may be apart, columns must not be"
        )
    stack = batch.stack
    if tensor.dtype != stack.dtype or tensor.device != stack.device:
        raise TypeError(
            f"{name} is {tensor.dtype} on {tensor.device}; the adapters are {stack.dtype} on "
            f"{stack.device}"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(f"add_lora has no gradients, and {name} asks for them: use torch.no_grad()")
    size = tensor.itemsize
    return tensor.data_ptr(), step * size, width * size
