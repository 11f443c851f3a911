"""The files of an adapter's directory: which of them are read, and how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adaptercache.checkpoint.json_object import parse_object
from adaptercache.checkpoint.options import ReadOptions
from adaptercache.checkpoint.pickle_file import read_pickle
from adaptercache.checkpoint.regular_file import open_regular
from adaptercache.checkpoint.safetensors_file import open_safetensors
from adaptercache.errors import AdapterInvalid, AdapterUnsupported, LoadFailed

__all__ = ["read_config", "read_tensors"]

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_LARGEST_CONFIG = 4 << 20

_OTHER_LAYOUTS = {
    "adapters.safetensors": "the layout of MLX-LM",
    "pytorch_lora_weights.safetensors": "the layout of diffusers",
    "adapter_model.tensors": "the layout of tensorizer",
    "model.lora_weights.npy": "the layout of TensorRT-LLM",
}


def read_config(directory: Path) -> dict[str, Any]:
    """The content of ``adapter_config.json``, bounded in size and depth.

    Raises:
        AdapterInvalid: it (or the directory) is missing, too large, no file or no JSON object.
        LoadFailed: the operating system can't read it.
    """
    path = directory / _CONFIG
    with _reading(path):
        if not directory.is_dir():
            raise AdapterInvalid("there is no such adapter directory", where=str(directory))
        if not path.exists():
            raise AdapterInvalid(
                "the adapter has no config", where=str(directory), expected=_CONFIG
            )
        with open_regular(path) as file:
            data = file.read(_LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise AdapterInvalid(
            "the adapter's config is too large",
            where=str(path),
            found=f"more than {_LARGEST_CONFIG} bytes",
        )
    return parse_object(data, str(path))


def read_tensors(directory: Path, options: ReadOptions) -> dict[str, torch.Tensor]:
    """The tensors of the weights file by name: of safetensors always first.

    Raises:
        AdapterInvalid: there is no weights file, or it is broken.
        AdapterUnsupported: there is only a pickle, or another tool's layout; or tokens were added.
        LoadFailed: the operating system can't read it, or it was changed meanwhile.
    """
    with _reading(directory):
        if (directory / "new_embeddings.safetensors").exists():
            raise AdapterUnsupported(
                "added tokens (new_embeddings.safetensors)",
                where=str(directory),
                remedy="merge it into the base model",
            )
        if (directory / _WEIGHTS).exists():
            return open_safetensors(directory / _WEIGHTS)
        for name in _PICKLES:
            if (directory / name).exists():
                return read_pickle(directory / name, options)
        for name, layout in _OTHER_LAYOUTS.items():
            if (directory / name).exists():
                raise AdapterUnsupported(
                    layout, where=str(directory / name), remedy="convert it to PEFT's layout"
                )
    raise AdapterInvalid("the adapter has no weights file", where=str(directory), expected=_WEIGHTS)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoadFailed(f"can't read {path}") from error
