"""``adaptercache merge``: the command; what it writes is tested where that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptercache import BaseModel

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """An adapter, and a base model whose head shares the embedding's weight."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    table = BaseModel.from_config(CONFIG)
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    tensors = {f"{path}.weight": torch.ones(entry.shape) for path, entry in table.modules.items()}
    del tensors["lm_head.weight"]
    save_file(tensors, base / "model.safetensors")
    weights = {}
    for path in ("model.layers.0.self_attn.q_proj", "lm_head"):
        outputs, inputs = table.modules[path].shape
        weights[f"{path}.lora_A.weight"] = torch.ones(2, inputs)
        weights[f"{path}.lora_B.weight"] = torch.ones(outputs, 2)
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "lm_head"]}
    save_file(weights, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter, base


def test_a_model_is_written(run: Any, paths: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("merge", *paths, tmp_path / "merged", "--untie", "--json")
    assert done.code == 0, done.err
    assert done.json["status"] == "written"
    assert done.json["changed"] == ["lm_head", "model.layers.0.self_attn.q_proj"]
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert not torch.equal(tensors["lm_head.weight"], torch.ones(10, 8))
    assert torch.equal(tensors["model.embed_tokens.weight"], torch.ones(10, 8))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_a_refusal_names_the_option(run: Any, paths: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("merge", *paths, tmp_path / "merged", "--json")
    assert done.code == 1
    assert done.json["refusal"]["by"] == "merger"
    assert done.json["refusal"]["option"] == "--untie"
    done = run("merge", *paths, tmp_path / "merged")
    assert (done.code, done.out) == (1, "")
    assert "--untie" in done.err
    assert not (tmp_path / "merged").exists()


def test_an_output_that_exists_is_a_wrong_use(run: Any, paths: tuple[Path, Path]) -> None:
    done = run("merge", *paths, paths[1], "--untie")
    assert done.code == 2
    assert "exists" in done.err


@pytest.mark.parametrize("output", ["missing/out", "file/out", "x" * 250, "dangling"])
def test_where_it_cannot_write_it_says_so(
    run: Any, paths: tuple[Path, Path], tmp_path: Path, output: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    done = run("merge", *paths, tmp_path / output, "--untie", "--json")
    if output == "dangling":  # it exists: a wrong use of the command
        assert (done.code, done.out) == (2, "")
    else:
        assert (done.code, done.json["refusal"]["error"]) == (1, "LoadFailed")
