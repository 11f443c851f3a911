"""Weights in a pickle, for callers who allow it; even so, nothing is executed."""

from __future__ import annotations

import os
import threading
import warnings
import zipfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from adaptercache.errors import AdapterInvalid
from adaptercache.regular_file import open_regular

__all__ = ["read_pickle"]

_CHANGING_FILTERS = threading.Lock()


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
    strange = next(_strange_in(content), None)
    if strange is not None:
        raise AdapterInvalid(
            "the pickle holds something else",
            where=str(path),
            found=strange,
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
    # Its bytes have to be its values: a pickle can also say that they are the negated ones.
    return {name: tensor.detach().resolve_neg() for name, tensor in content.items()}


def _load(file: BufferedReader, size: int, path: Path) -> Any:
    try:
        if zipfile.is_zipfile(file):
            _refuse_inflation(file, size)
        file.seek(0)
        # What torch warns of is no reason to refuse, also where warnings are errors. The filters
        # are the process's: of threads that change them at once, the last would leave ours.
        with _CHANGING_FILTERS, warnings.catch_warnings():
            warnings.simplefilter("ignore")
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


def _strange_in(content: Any) -> Iterator[str]:
    """What of it is no dense tensor in CPU memory under a name: the name and the kind."""
    if not isinstance(content, dict):
        yield type(content).__name__
        return
    for name, tensor in content.items():
        if not isinstance(name, str):
            yield f"the key {name!r:.80}"
        elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            yield f"{name:.200}: {type(tensor).__name__}"
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            layout = "quantised" if tensor.is_quantized else tensor.layout
            yield f"{name:.200}: a tensor of layout {str(layout).removeprefix('torch.')}"
        elif tensor.device.type != "cpu":
            yield f"{name:.200}: a tensor on {tensor.device.type}"
