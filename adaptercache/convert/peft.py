"""PEFT's two files, written so that the reader takes them, and read back before they are shown."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from adaptercache.checkpoint.config import LoraConfig
from adaptercache.checkpoint.files import open_tensors, read_config
from adaptercache.checkpoint.options import DEFAULT_OPTIONS
from adaptercache.checkpoint.pairs import Pair, check_values, sort_tensors
from adaptercache.convert.foreign import ForeignAdapter
from adaptercache.errors import AdapterInvalid
from adaptercache.packing import bytes_of

__all__ = ["write_peft"]

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def write_peft(folder: Path, adapter: ForeignAdapter, base_model: str | None) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``, flushed to the device.

    Takes memory for one tensor at a time.

    Args:
        folder: an empty directory that nobody looks at yet.

    Raises:
        AdapterInvalid: the weights are not finite, or two modules have one name.
        OSError: a file can't be written.
    """
    for pair in adapter.pairs:
        check_values(pair, 1.0)
    text = json.dumps(_config(adapter, base_model), indent=2)
    _write_new(folder / "adapter_config.json", iter([text.encode()]))
    tensors = [named for pair in adapter.pairs for named in _named(pair)]
    tensors.sort(key=lambda named: -named[1].itemsize)  # so that every tensor is aligned
    _write_new(folder / "adapter_model.safetensors", _safetensors(tensors))
    _read_back(folder, adapter)


def _named(pair: Pair) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"base_model.model.{pair.module}"
    if pair.is_embedding:
        yield f"{prefix}.lora_embedding_A", pair.a
        yield f"{prefix}.lora_embedding_B", pair.b
    else:
        yield f"{prefix}.lora_A.weight", pair.a
        yield f"{prefix}.lora_B.weight", pair.b


def _safetensors(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        if name in header:
            raise AdapterInvalid("two modules of one name", where=name, expected="one")
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in tensors:
        dense = tensor.contiguous()
        yield bytes_of(dense)


def _write_new(path: Path, chunks: Iterator[bytes | memoryview]) -> None:
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _config(adapter: ForeignAdapter, base_model: str | None) -> dict[str, object]:
    ranks = Counter(pair.a.shape[0] for pair in adapter.pairs)
    rank = max(ranks, key=lambda rank: (ranks[rank], rank))
    others = _patterns(adapter, rank)
    return {
        "peft_type": "LORA",
        "peft_version": "0.18.0",  # whose rule the patterns are for
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": _number(adapter.alphas[rank]),
        "rank_pattern": others,
        "alpha_pattern": {key: _number(adapter.alphas[own]) for key, own in others.items()},
        "target_modules": sorted(pair.module for pair in adapter.pairs),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _patterns(adapter: ForeignAdapter, rank: int) -> dict[str, int]:
    """Ranks by pattern, for the modules of another rank than most.

    A pattern fits each path that ends in it, and the first that fits counts. So a module of the
    usual rank whose path ends in another's gets a pattern too, and the longer stand first.
    """
    ranks = {pair.module: pair.a.shape[0] for pair in adapter.pairs}
    others = {path for path, own in ranks.items() if own != rank}
    caught = {path for path in ranks if others and others & set(_endings(path))}
    paths = sorted(others | caught, key=len, reverse=True)
    return {re.escape(path): ranks[path] for path in paths}


def _endings(path: str) -> Iterator[str]:
    while path:
        yield path
        _, _, path = path.partition(".")


def _number(value: float) -> int | float:
    """Whole numbers as PEFT writes them: 16, not 16.0."""
    return int(value) if value.is_integer() and value < 1 << 53 else value


def _read_back(folder: Path, adapter: ForeignAdapter) -> None:
    """Raises what the reader would raise, while nobody has seen the files yet."""
    config = LoraConfig.from_peft(read_config(folder))
    with open_tensors(folder, DEFAULT_OPTIONS) as stored:
        contents = sort_tensors(stored.outlines)
    meant = {pair.module: pair.a.shape[0] for pair in adapter.pairs}
    for pair in contents.pairs:
        if pair.module not in meant:  # a wrapper's name in it, which readers leave out
            raise AdapterInvalid(
                "PEFT's names can't say this module's",
                where=", ".join(sorted(meant.keys() - {each.module for each in contents.pairs})),
                expected="the path of a module of the base model",
                remedy="take the wrapper's part out of the tensors' names",
            )
        rank = config.rank_of(pair.module)
        scaling = config.scaling_of(pair.module, rank)
        assert (pair.a.shape[0], rank) == (meant[pair.module],) * 2, pair.module
        assert scaling == adapter.alphas[rank] / rank, pair.module
