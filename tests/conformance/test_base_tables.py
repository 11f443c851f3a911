"""`BaseModel.from_config` lays out what `BaseModel.from_model` sees in the live model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5")

import transformers
import trips

from adaptercache.base_model import BaseModel

BUILT_IN = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")


def layout_of(config: Any, auto: str = "AutoModelForCausalLM") -> BaseModel:
    """Of the live model, without memory for its weights."""
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return BaseModel.from_model(model)


@pytest.mark.parametrize("family", trips.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_and_its_config_say_the_same(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = trips.base_model(family, dtype)
    model.save_pretrained(tmp_path)
    live = BaseModel.from_model(model)
    assert BaseModel.from_config(tmp_path) == live
    assert BaseModel.from_config(model.config.to_dict()).modules == live.modules
    assert (live.model_type, live.dtype) == (model.config.model_type, str(dtype)[len("torch.") :])


@pytest.mark.parametrize(
    ("family", "auto"),
    [
        (family, f"AutoModel{head}")
        for family in BUILT_IN
        for head in ("", "ForSequenceClassification", "ForTokenClassification")
        if (family, head) != ("gemma3_text", "ForTokenClassification")  # there is none
    ],
)
def test_other_heads(family: str, auto: str) -> None:
    config = trips.FAMILIES[family]()
    config.num_labels = 5
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    content = {**config.to_dict(), "architectures": [type(model).__name__]}
    assert BaseModel.from_config(content).modules == BaseModel.from_model(model).modules


@pytest.mark.parametrize("family", BUILT_IN)
def test_a_class_with_its_own_defaults(family: str, tmp_path: Path) -> None:
    config = type(trips.FAMILIES[family]())()
    config.save_pretrained(tmp_path)
    assert BaseModel.from_config(tmp_path).modules == layout_of(config).modules


@pytest.mark.parametrize("family", BUILT_IN)
@given(data=st.data())
def test_any_sizes(family: str, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 3))
    heads = kv_heads * data.draw(st.integers(1, 3))
    sizes = {
        "hidden_size": heads * 4 * data.draw(st.integers(1, 4)),
        "intermediate_size": data.draw(st.integers(1, 50)),
        "num_hidden_layers": data.draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": data.draw(st.integers(3, 60)),
        "pad_token_id": 0,
        "tie_word_embeddings": data.draw(st.booleans()),
    }
    if family != "phi3":
        sizes["head_dim"] = data.draw(st.integers(1, 9)) * 2
    config = type(trips.FAMILIES[family]())(**sizes, bos_token_id=1, eos_token_id=2)
    assert BaseModel.from_config(config.to_dict()).modules == layout_of(config).modules
    # A config need not say what its class assumes.
    assert BaseModel.from_config({"model_type": family, **sizes}).modules == (
        layout_of(transformers.AutoConfig.for_model(family, **sizes)).modules
    )
