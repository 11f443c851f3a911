"""A base model's config that claims absurd sizes: a table with a line for each of its 10¹² layers
was begun, and never ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterCacheError, AdapterInvalid, AdapterUnsupported, BaseModel

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}
BUILT_IN = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
SIZES = [key for key, value in LLAMA.items() if type(value) is int]


def refusal(content: dict[str, Any], seconds: float) -> AdapterCacheError:
    begin = time.monotonic()
    with pytest.raises(AdapterCacheError) as raised:
        BaseModel.from_config(content)
    assert time.monotonic() - begin < seconds
    return raised.value


@pytest.mark.timeout(20)
@pytest.mark.parametrize("family", BUILT_IN)
@pytest.mark.parametrize("key", [*SIZES, "head_dim"])
@pytest.mark.parametrize("value", [10**12, 1 << 40, 10**400])
def test_a_size_that_no_model_has_is_named(family: str, key: str, value: int) -> None:
    error = refusal({**LLAMA, "model_type": family, key: value}, 1.0)
    assert isinstance(error, AdapterInvalid)
    assert error.where == key
    assert len(str(error)) < 1000


def test_more_layers_than_any_model_has_are_refused() -> None:
    assert refusal({**LLAMA, "num_hidden_layers": 10_001}, 1.0).where == "num_hidden_layers"
    assert len(BaseModel.from_config({**LLAMA, "num_hidden_layers": 10_000}).modules) == 70_002


def test_labels_that_no_model_has_are_refused() -> None:
    classifier = {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}
    assert refusal({**classifier, "num_labels": 10**12}, 1.0).where == "num_labels"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("gpt2", "n_layer"),
        ("mixtral", "num_hidden_layers"),
        ("deepseek_v3", "n_routed_experts"),
        ("opt", "num_hidden_layers"),
        ("llama", "num_labels"),
    ],
)
@pytest.mark.parametrize("value", [20_000, 10**12])
def test_what_transformers_would_lay_out_is_bounded_too(
    model_type: str, key: str, value: int
) -> None:
    pytest.importorskip("transformers", minversion="5")
    other_head = {"architectures": ["LlamaForTokenClassification"]} if model_type == "llama" else {}
    error = refusal({**LLAMA, "model_type": model_type, **other_head, key: value}, 5.0)
    assert isinstance(error, AdapterInvalid)
    assert error.where == key


def test_a_count_of_another_name_is_bounded_by_the_work_that_it_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr("adaptercache.base_model._MOST_CALLS", 50)
    with pytest.raises(AdapterUnsupported, match="mixtral") as raised:
        BaseModel.from_config({**LLAMA, "model_type": "mixtral", "architectures": None})
    assert "more than 50" in str(raised.value.__cause__)


def test_a_sub_models_sizes_are_looked_at(tmp_path: Path) -> None:
    content = {"model_type": "llava", "text_config": {**LLAMA, "num_hidden_layers": 10**12}}
    assert refusal(content, 1.0).where == "text_config.num_hidden_layers"


@pytest.mark.parametrize("size", [1 << 31, 10**400])
def test_a_table_of_absurd_shapes_is_refused(size: int) -> None:
    with pytest.raises(AdapterInvalid, match=r"where: a\.b"):
        BaseModel.from_table({"a.b": {"kind": "linear", "shape": [size, 4]}})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, " " * (65 << 20)])
def test_a_config_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(AdapterInvalid, match=r"config\.json"):
        BaseModel.from_config(tmp_path)


def test_a_config_of_many_layers_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert len(BaseModel.from_config(tmp_path).modules) == 16
