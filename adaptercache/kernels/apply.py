"""`add_lora`: what a model's layers call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptercache.kernels.reference import add_lora_reference
from adaptercache.kernels.segments import LoraBatch

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
    outputs = _outputs(y, x, batch, modules, layer)
    batch.wait(layer)
    if x.is_cuda:
        from adaptercache.kernels.launch import add_lora_triton  # triton: only where it is used

        add_lora_triton(outputs, x, batch, modules, layer)
        return
    for output, module in zip(outputs, modules, strict=True):
        add_lora_reference(output, x, batch, module, layer, dtype=torch.float32)


def _outputs(
    y: Tensor | Sequence[Tensor], x: Tensor, batch: LoraBatch, modules: Sequence[str], layer: int
) -> list[Tensor]:
    """One output a module; everything is checked before anything is computed."""
    if batch.has_ended:
        raise RuntimeError("the batch's with block has ended: make all of a step's launches in it")
    if isinstance(modules, str):
        raise TypeError(f"modules is one string: give ({modules!r},)")
    stack = batch.stack
    sites = [stack.layout.sites[stack.site(layer, module)] for module in modules]
    widths = [site.out_features for site in sites]
    if isinstance(y, Tensor):
        if y.dim() != 2 or y.shape[1] != sum(widths):
            raise ValueError(f"y is {list(y.shape)}, expected [{batch.num_rows}, {sum(widths)}]")
        outputs = list(y.split(widths, dim=1))
    else:
        outputs = list(y)
    if len(outputs) != len(modules):
        raise ValueError(f"y is {len(outputs)} tensors, for {len(modules)} modules")
    expected = [("x", x, site.in_features) for site in sites]
    expected += [("y", out, width) for out, width in zip(outputs, widths, strict=True)]
    for name, tensor, width in expected:
        if tensor.shape != (batch.num_rows, width):
            raise ValueError(
                f"{name} is {list(tensor.shape)}, expected [{batch.num_rows}, {width}] for "
                f"{', '.join(modules)}"
            )
        if width > 1 and tensor.stride(1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}: rows may be apart, columns must not be"
            )
        if tensor.dtype != stack.dtype or tensor.device != stack.device:
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device}; the arena is {stack.dtype} on "
                f"{stack.device}"
            )
    return outputs
