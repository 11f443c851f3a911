"""Adapters written byte by byte, sound or not: shared by the tests of what a stranger may send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adaptercache.base_model import BaseModel, BaseModule

BASE = BaseModel({"q_proj": BaseModule("linear", (4, 4))})
A, B = "q_proj.lora_A.weight", "q_proj.lora_B.weight"
CONFIG: dict[str, Any] = {"r": 1, "lora_alpha": 1}

Entry = tuple[str, list[int], bytes]
"""A tensor as a file has it: dtype, shape, data."""


def floats(*values: float) -> bytes:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes()


ROW: Entry = ("F32", [1, 4], floats(1, 2, 3, 4))
COLUMN: Entry = ("F32", [4, 1], floats(1, 2, 3, 4))


def safetensors_bytes(entries: Mapping[str, Entry]) -> bytes:
    """A file whose header says what its data are."""
    header, data = {}, b""
    for name, (dtype, shape, content) in entries.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    return with_header(text + b" " * (-len(text) % 8), data)  # aligned, as others write it


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def write_adapter(
    folder: Path,
    weights: Mapping[str, Entry] | bytes | None = None,
    config: Mapping[str, Any] | bytes = CONFIG,
) -> Path:
    if weights is None:
        weights = {A: ROW, B: COLUMN}
    content = weights if isinstance(weights, bytes) else safetensors_bytes(weights)
    (folder / "adapter_model.safetensors").write_bytes(content)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "adapter_config.json").write_bytes(text)
    return folder
