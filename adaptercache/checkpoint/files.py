"""The files of an adapter's directory: which of them are read, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaptercache.checkpoint.features import CONVERT
from adaptercache.checkpoint.json_object import parse_object
from adaptercache.checkpoint.options import ReadOptions
from adaptercache.checkpoint.pickle_file import read_pickle
from adaptercache.checkpoint.safetensors_file import open_safetensors
from adaptercache.checkpoint.stored import StoredTensors
from adaptercache.errors import AdapterInvalid, AdapterUnsupported, LoadFailed
from adaptercache.regular_file import open_regular

__all__ = ["find_weights", "open_tensors", "read_config", "read_object"]

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_LARGEST_CONFIG = 4 << 20

_OTHER_LAYOUTS = {
    "adapters.safetensors": ("the layout of MLX-LM", CONVERT),
    "pytorch_lora_weights.safetensors": ("the layout of diffusers", "convert it to PEFT's layout"),
    "adapter_model.tensors": ("the layout of tensorizer", "convert it to PEFT's layout"),
    "model.lora_weights.npy": ("the layout of TensorRT-LLM", "convert it to PEFT's layout"),
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
            raise AdapterInvalid(
                "there is no such adapter directory",
                where=str(directory),
                found="a file" if directory.exists() else "nothing",
                expected="the directory of the adapter's files",
            )
        if not path.exists():
            raise AdapterInvalid(
                "the adapter has no config", where=str(directory), expected=_CONFIG
            )
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a config file, bounded in size and depth.

    Raises:
        AdapterInvalid: it is too large, no file or no JSON object.
        LoadFailed: the operating system can't read it.
    """
    with _reading(path), open_regular(path) as file:
        data = file.read(_LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise AdapterInvalid(
            "the adapter's config is too large",
            where=str(path),
            found=f"more than {_LARGEST_CONFIG} bytes",
        )
    return parse_object(data, str(path))


def find_weights(has: Callable[[str], bool], where: str) -> str | None:
    """Which file of a folder holds an adapter's weights: of safetensors first; None: there is none.

    Whoever copies an adapter asks this, so that what lies beside the weights and changes what they
    mean is not left behind.

    Args:
        has: whether the folder has a file of that name.
        where: the folder, for the error.

    Raises:
        AdapterUnsupported: tokens were added, or there is only another tool's layout.
    """
    if has("new_embeddings.safetensors"):
        raise AdapterUnsupported(
            "added tokens (new_embeddings.safetensors)",
            where=where,
            remedy="merge it into the base model",
        )
    for name in (_WEIGHTS, *_PICKLES):
        if has(name):
            return name
    for name, (layout, remedy) in _OTHER_LAYOUTS.items():
        if has(name):
            raise AdapterUnsupported(layout, where=f"{where}/{name}", remedy=remedy)
    return None


@contextmanager
def open_tensors(directory: Path, options: ReadOptions) -> Iterator[StoredTensors]:
    """The tensors of the weights file: of safetensors always first, and read when asked for.

    Raises:
        AdapterInvalid: there is no weights file, or it is broken.
        AdapterUnsupported: there is only a pickle, or another tool's layout; or tokens were added.
        LoadFailed: the operating system can't read it, or it was changed meanwhile.
    """
    with _reading(directory):
        name = find_weights(lambda name: (directory / name).exists(), str(directory))
        if name is None:
            raise AdapterInvalid(
                "the adapter has no weights file", where=str(directory), expected=_WEIGHTS
            )
        if name in _PICKLES:
            _refuse_pickle(directory / name, options)
            yield StoredTensors.in_memory(read_pickle(directory / name))
            return
        with open_safetensors(directory / name) as stored:
            yield stored


def _refuse_pickle(path: Path, options: ReadOptions) -> None:
    if not options.allow_pickle:
        remedy = "save it as safetensors, or read it with ReadOptions(allow_pickle=True)"
        if path.suffix == ".pt":
            remedy = f"if torchtune wrote it, {CONVERT}; else {remedy}"
        raise AdapterUnsupported(
            f"weights in a pickle ({path.name})", where=str(path), remedy=remedy
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoadFailed(f"can't read {path}") from error
