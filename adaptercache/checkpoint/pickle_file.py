"""Weights in a pickle, for callers who allow it; even so, nothing is executed."""

from __future__ import annotations

import os
import zipfile
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from adaptercache.checkpoint.regular_file import open_regular
from adaptercache.errors import AdapterInvalid

__all__ = ["read_pickle"]


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of ``adapter_model.bin`` or ``.pt`` by name, through ``weights_only``.

    Raises:
        AdapterInvalid: it can't be read, holds something else than plain tensors, or would take
            more memory than the file has.
        OSError: it can't be opened.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = _load(file, size, path)
    sound = isinstance(content, dict) and all(
        isinstance(name, str) and _is_plain(tensor) for name, tensor in content.items()
    )
    if not sound:
        raise AdapterInvalid(
            "the pickle holds something else",
            where=str(path),
            expected="dense tensors in memory by name",
        )
    # A view can claim any shape over a few bytes. Twice: tied weights are stored once.
    claimed = sum(tensor.nbytes for tensor in content.values())
    if claimed > 2 * size:
        raise AdapterInvalid(
            "the pickle's tensors are larger than its file",
            where=str(path),
            found=f"{claimed} bytes of tensors in a file of {size}",
            expected="each tensor with its own data",
        )
    return {name: tensor.detach() for name, tensor in content.items()}


def _load(file: BufferedReader, size: int, path: Path) -> Any:
    try:
        if zipfile.is_zipfile(file):
            _refuse_inflation(file, size)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises whatever it likes
        raise AdapterInvalid(
            "the pickle can't be read", where=str(path), found=f"{error!s:.300}"
        ) from error


def _refuse_inflation(file: BufferedReader, size: int) -> None:
    with zipfile.ZipFile(file) as archive:
        inflated = sum(entry.file_size for entry in archive.infolist())
    if inflated > size:
        raise ValueError(f"{inflated} bytes compressed into {size}")


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )
