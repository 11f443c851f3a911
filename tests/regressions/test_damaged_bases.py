"""A base model whose files change while it is merged, or that are damaged, and what `merge` can't
write: half of each model, or errors of Python's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import checkpoint_from_tensors
from adaptercache.cli.bases import base_beside
from adaptercache.errors import AdapterInvalid, LoadFailed
from adaptercache.merge import base_of_files, merge
from adaptercache.merge import shards as merge_shards

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
}
BASE = BaseModel.from_config(CONFIG)
Q = "model.layers.0.self_attn.q_proj"


def adapter(dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{Q}.lora_{side}.weight": torch.randn(shape, generator=generator, dtype=dtype)
        for side, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    return checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 4}, BASE)


def model(folder: Path, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    tensors = {
        f"{path}.weight": torch.full(module.shape, value, dtype=dtype)
        for path, module in BASE.modules.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_base_republished_meanwhile_is_no_half_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = model(tmp_path / "base"), model(tmp_path / "other", 2.0)
    pieces = merge_shards.Shard.pieces

    def republish(self: Any, stored: Any) -> Any:
        if (other / "model.safetensors").exists():
            os.replace(other / "model.safetensors", base / "model.safetensors")
        return pieces(self, stored)

    monkeypatch.setattr(merge_shards.Shard, "pieces", republish)
    with pytest.raises(LoadFailed, match="changed while it was read"):
        merge(adapter(), base, tmp_path / "merged")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base", "other"]


def test_a_base_in_float64_gets_a_delta_in_float64(tmp_path: Path) -> None:
    base = model(tmp_path / "base", 0.0, torch.float64)
    checkpoint = adapter(torch.float64)
    merge(checkpoint, base, tmp_path / "merged")
    got = load_file(tmp_path / "merged" / "model.safetensors")[f"{Q}.weight"]
    weights = checkpoint.modules[Q]
    assert torch.equal(got, weights.scaling * (weights.b @ weights.a))


def header(content: object) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header({"__metadata__": ["pt"]}),
        header({"__metadata__": "pt"}),
        header({"__metadata__": 5}),
        header(b"[" * 100_000),
    ],
)
def test_a_header_that_is_damaged_is_said_to_be_that(content: bytes, tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(AdapterInvalid, match="base model's files are broken"):
        base_of_files(base)


@pytest.mark.parametrize("content", ['{"metadata": 5, "weight_map": {}}', "[" * 100_000])
def test_so_is_an_index(content: str, tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    (base / "model.safetensors.index.json").write_text(content)
    with pytest.raises(AdapterInvalid, match="base model's files are broken"):
        base_of_files(base)


def test_a_name_too_long_for_a_file_has_no_base_beside_it() -> None:
    assert base_beside(Path("a" * 300)) is None
