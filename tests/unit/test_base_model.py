from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

CONFIGS = Path(__file__).parent.parent / "conformance" / "configs"
BUILT_IN = ("llama", "mistral", "qwen2", "phi3")
NAMES = sorted(path.name.removesuffix(".modules.json") for path in CONFIGS.glob("*.modules.json"))
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")


def config_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return content


def table_of(name: str) -> BaseModel:
    return BaseModel.from_table(json.loads((CONFIGS / f"{name}.modules.json").read_text()))


@pytest.mark.parametrize("name", [n for n in NAMES if config_of(n)["model_type"] in BUILT_IN])
def test_the_built_in_table_is_that_of_the_live_model(name: str) -> None:
    assert BaseModel.from_config(config_of(name)).modules == table_of(name).modules


@pytest.mark.parametrize(
    "name", [n for n in NAMES if config_of(n)["model_type"] not in BUILT_IN and "tf5" in n]
)
def test_transformers_lays_out_any_other_model(name: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    assert BaseModel.from_config(config_of(name)).modules == table_of(name).modules


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_built_in_table_is_that_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    content = {**SMALL, "model_type": model_type, "pad_token_id": 0, "eos_token_id": 1}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**content)
        live = transformers.AutoModelForCausalLM.from_config(config)
    assert BaseModel.from_config(content).modules == BaseModel.from_model(live).modules


def test_a_multimodal_config_need_not_say_its_architecture() -> None:
    pytest.importorskip("transformers", minversion="5")
    content = {**config_of("tiny-llava.tf5.24"), "architectures": None}
    assert BaseModel.from_config(content).modules == table_of("tiny-llava.tf5.24").modules


def test_of_a_config_with_a_vision_part_the_model_that_sees_is_meant() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    # Llama 4's config stands for a text model too.
    text = {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size_mlp": 40}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    sizes = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    config = transformers.Llama4Config(text_config=text, vision_config=vision | sizes)
    with torch.device("meta"):
        live = transformers.Llama4ForConditionalGeneration(config)
    base = BaseModel.from_config({**config.to_dict(), "architectures": None})
    assert base.modules == BaseModel.from_model(live).modules


def test_a_model_that_nobody_knows_is_unsupported() -> None:
    with pytest.raises(AdapterUnsupported, match="no-such-model"):
        BaseModel.from_config({**SMALL, "model_type": "no-such-model"})


def test_a_path_a_directory_and_the_content_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "torch_dtype": "bfloat16"}))
    base = BaseModel.from_config(tmp_path)
    assert base == BaseModel.from_config(str(tmp_path / "config.json"))
    assert base.modules == BaseModel.from_config(SMALL).modules
    assert (base.model_type, base.dtype) == ("llama", "bfloat16")


@pytest.mark.parametrize(
    "key", ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, 0, -1, True, [], 1.5])
def test_a_broken_field_is_named(key: str, value: object) -> None:
    with pytest.raises(AdapterInvalid) as raised:
        BaseModel.from_config({**SMALL, key: value})
    assert raised.value.where == key


def test_silence_on_key_value_heads_means_full_heads_where_the_model_class_says_so() -> None:
    silent = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    k_proj = BaseModel.from_config(silent).modules["model.layers.0.self_attn.k_proj"]
    assert k_proj.shape == (32, 32)
    with pytest.raises(AdapterInvalid, match="num_key_value_heads"):
        BaseModel.from_config({**silent, "model_type": "mistral"})


@pytest.mark.parametrize("content", ["", "[]", "{", "\ufeff{}"])
def test_a_config_that_is_no_object_is_invalid(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(AdapterInvalid, match="config"):
        BaseModel.from_config(tmp_path)


def test_a_missing_config_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid, match=r"config\.json"):
        BaseModel.from_config(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [{}, {"kind": "linear"}, {"kind": "odd", "shape": [1, 2]}, {"kind": "linear", "out_in": [0]}],
)
def test_a_broken_table_entry_is_named(entry: dict[str, object]) -> None:
    with pytest.raises(AdapterInvalid, match=r"a\.b"):
        BaseModel.from_table({"a.b": entry})


class Conv1D(nn.Module):
    """As GPT-2's: a linear layer that stores its weight as [in, out]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))


class Experts(nn.Module):
    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.empty(3, 20, 32))
        self.scale = nn.Parameter(torch.empty(3))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 32))


def test_a_live_model_is_walked() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(97, 32),
            "proj": nn.Linear(32, 48),
            "conv": Conv1D(96, 32),
            "experts": Experts(),
            "router": Router(),
            "norm": nn.LayerNorm(32),
        }
    )
    assert BaseModel.from_model(model) == BaseModel(
        {
            "embed": BaseModule("embedding", (97, 32)),
            "proj": BaseModule("linear", (48, 32)),
            "conv": BaseModule("conv1d", (96, 32)),
            "experts.down_proj": BaseModule("parameter", (3, 20, 32), is_transposed=True),
            "router": BaseModule("parameter", (3, 32)),
        },
        dtype="float32",
    )


def test_importing_it_does_not_load_transformers() -> None:
    code = "import sys, adaptercache.base_model; sys.exit('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0
