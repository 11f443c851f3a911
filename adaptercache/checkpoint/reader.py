"""From an adapter's files to a `Checkpoint`: every tensor finds its place, or raises."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint.config import LoraConfig
from adaptercache.checkpoint.files import open_tensors, read_config
from adaptercache.checkpoint.fitting import fit
from adaptercache.checkpoint.options import DEFAULT_OPTIONS, ReadOptions
from adaptercache.checkpoint.stored import StoredTensors
from adaptercache.checkpoint.weights import Checkpoint
from adaptercache.errors import AdapterInvalid

__all__ = ["checkpoint_from_tensors", "read_checkpoint"]


def read_checkpoint(
    path: str | os.PathLike[str], base: BaseModel, *, options: ReadOptions = DEFAULT_OPTIONS
) -> Checkpoint:
    """Reads the PEFT adapter in a directory and fits it to its base model.

    The whole adapter is consumed, or refused by name; nothing in it is executed. Its tensors are in
    memory of their own: what becomes of the files later doesn't matter. A file that is refused
    costs at most twice its size in memory, or 32 MiB more. May block on the file system; safe to
    call from several threads.

    Args:
        path: the directory of ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: the model that the adapter is for.
        options: what is allowed, and what the files don't say.

    Raises:
        AdapterInvalid: a file is missing or broken, or doesn't fit the base.
        AdapterUnsupported: it uses a feature that isn't served.
        LoadFailed: the operating system can't read a file, or it was changed meanwhile.
    """
    directory = Path(path)
    config = LoraConfig.from_peft(read_config(directory), ignored_keys=options.ignored_config_keys)
    with open_tensors(directory, options) as stored:
        return fit(stored, config, base, options)


def checkpoint_from_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    base: BaseModel,
    *,
    options: ReadOptions = DEFAULT_OPTIONS,
) -> Checkpoint:
    """The same for an adapter in memory: its state dict and the content of its config.

    The checkpoint shares tensors that are in CPU memory: don't write to them while it lives. Those
    on a device are copied.

    Raises:
        AdapterInvalid, AdapterUnsupported: as `read_checkpoint`.
    """
    parsed = LoraConfig.from_peft(config, ignored_keys=options.ignored_config_keys)
    on_cpu = {name: _dense(name, tensor) for name, tensor in tensors.items()}
    return fit(StoredTensors.in_memory(on_cpu), parsed, base, options)


def _dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """In CPU memory, its bytes its values."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise AdapterInvalid(
            "a tensor without dense values",
            where=name,
            found="a tensor on meta" if tensor.is_meta else f"a tensor of layout {tensor.layout}",
            expected="a dense tensor",
        )
    return tensor.detach().cpu().resolve_neg()
