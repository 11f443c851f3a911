"""Real PEFT adapters on tiny models, and files made wrong: each must load exactly, or be refused.

``README.md`` beside this says what a case holds. The golden deltas were made by PEFT, and are read
with the safetensors library, not with ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import read_checkpoint
from adaptercache.errors import AdapterCacheError, AdapterInvalid, AdapterUnsupported

HERE = Path(__file__).parent
CASES = {
    path.parent.name: json.loads(path.read_text())
    for path in sorted((HERE / "cases").glob("*/case.json"))
}
LOAD = [name for name, case in CASES.items() if case["expect"] == "load"]
REFUSE = [name for name, case in CASES.items() if case["expect"] == "refuse"]

# The error and a word of its message that names the cause.
REFUSALS: dict[str, tuple[type[AdapterCacheError], str]] = {
    "adalora_p0.20.0": (AdapterUnsupported, "ADALORA"),
    "alora_p0.20.0": (AdapterUnsupported, "alora_invocation_tokens"),
    "alpha0_p0.20.0": (AdapterInvalid, "where: lora_alpha; found: 0"),
    "bdlora_p0.20.0": (AdapterUnsupported, "use_bdlora"),
    "bias_all_p0.20.0": (AdapterUnsupported, "bias='all'"),
    "bias_lora_only_p0.11.1": (AdapterUnsupported, "bias='lora_only'"),
    "d_b_missing": (AdapterInvalid, "lora_A without lora_B"),
    "d_config_not_json": (AdapterInvalid, "JSON"),
    "d_config_r_zero": (AdapterInvalid, "where: r;"),
    "d_duplicate_module": (AdapterInvalid, "two tensors for one matrix"),
    "d_header_1gib": (AdapterInvalid, "header"),
    "d_header_overflow": (AdapterInvalid, "header"),
    "d_html_page": (AdapterInvalid, "HTML"),
    "d_lfs_pointer": (AdapterInvalid, "git-lfs"),
    "d_magnitude_tensor": (AdapterUnsupported, "DoRA"),
    "d_nan": (AdapterInvalid, "NaN"),
    "d_no_config": (AdapterInvalid, "adapter_config.json"),
    "d_no_tensors": (AdapterInvalid, "ZeRO-3"),
    "d_no_weights": (AdapterInvalid, "adapter_model.safetensors"),
    "d_rank_ab": (AdapterInvalid, "lora_A and lora_B disagree"),
    "d_rank_config_conflict": (AdapterInvalid, "disagree with the config's rank"),
    "d_shape_in": (AdapterInvalid, "found: A (4, 48), B (32, 4); expected: A [rank, 32]"),
    "d_stray_tensor": (AdapterUnsupported, "lm_head.weight"),
    "d_truncated": (AdapterInvalid, "truncated"),
    "d_unknown_layer": (AdapterInvalid, "layers.7"),
    "d_unknown_use_key": (AdapterUnsupported, "use_foo"),
    "d_zero_size": (AdapterInvalid, "ZeRO-3"),
    "dora_p0.20.0": (AdapterUnsupported, "DoRA"),
    "ia3_p0.20.0": (AdapterUnsupported, "IA3"),
    "kasa_p0.21.2": (AdapterUnsupported, "KaSA"),
    "layer_replication_p0.20.0": (AdapterUnsupported, "layer_replication"),
    "lora_bias_p0.20.0": (AdapterUnsupported, "lora_bias"),
    "modules_to_save_p0.20.0": (AdapterUnsupported, "modules_to_save"),
    "olora_p0.20.0": (AdapterUnsupported, "olora"),
    "patterns_rank_conflict_p0.20.0": (AdapterInvalid, "expected: rank 8"),
    "pickle_bin_p0.20.0": (AdapterUnsupported, "pickle"),
    "pissa_p0.20.0": (AdapterUnsupported, "pissa"),
    "prompt_tuning_p0.20.0": (AdapterUnsupported, "PROMPT_TUNING"),
    "qalora_p0.20.0": (AdapterUnsupported, "use_qalora"),
    "seq_cls_p0.20.0": (AdapterUnsupported, "modules_to_save"),
    "trainable_tokens_p0.20.0": (AdapterUnsupported, "trainable_token_indices"),
    "vera_p0.20.0": (AdapterUnsupported, "VERA"),
}


def base_of(case: dict[str, Any]) -> BaseModel:
    table = HERE / "configs" / case["base_config"].replace(".json", ".modules.json")
    return BaseModel.from_table(json.loads(table.read_text()))


def test_every_case_is_here() -> None:
    assert (len(LOAD), len(REFUSE)) == (68, 42)
    assert sorted(REFUSALS) == REFUSE


@pytest.mark.parametrize("name", LOAD)
def test_loads_exactly(name: str) -> None:
    case = CASES[name]
    checkpoint = read_checkpoint(HERE / "cases" / name, base_of(case))
    golden = load_file(HERE / "cases" / name / "golden.safetensors")
    assert set(checkpoint.modules) == set(golden)
    assert {path: w.rank for path, w in checkpoint.modules.items()} == case["ranks"]
    assert {path: w.scaling for path, w in checkpoint.modules.items()} == case["scales"]
    for path, want in golden.items():
        got = checkpoint.delta(path)
        assert got.dtype is torch.float32
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-5 * want.abs().max(), path


@pytest.mark.parametrize("name", LOAD)
def test_accounts_for_every_tensor(name: str) -> None:
    checkpoint = read_checkpoint(HERE / "cases" / name, base_of(CASES[name]))
    with safe_open(HERE / "cases" / name / "adapter_model.safetensors", "pt") as file:
        in_file = sorted(file.keys())
    skipped = [entry.name for entry in checkpoint.skipped]
    assert sorted([*checkpoint.consumed, *skipped]) == in_file
    assert all(name.endswith(".base_layer.weight") for name in skipped)


@pytest.mark.parametrize("name", REFUSE)
def test_refuses_by_name(name: str) -> None:
    error, word = REFUSALS[name]
    with pytest.raises(error) as raised:
        read_checkpoint(HERE / "cases" / name, base_of(CASES[name]))
    assert type(raised.value) is error
    assert word in str(raised.value)
