"""PEFT on a compiled base knows each module by a path with ``_orig_mod`` in it, and matches
patterns against that. We matched them against the path without, and had another scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adaptercache import AdapterUnsupported, BaseModel
from adaptercache.base_model import BaseModule
from adaptercache.checkpoint import read_checkpoint
from adaptercache.checkpoint.names import LoraName, parse_name

PATH = "model.layers.0.self_attn.q_proj"


def scaling(folder: Path, prefix: str, patterns: dict[str, int], **config: Any) -> float:
    tensors = {
        f"{prefix}{PATH}.lora_A.weight": torch.ones(2, 4),
        f"{prefix}{PATH}.lora_B.weight": torch.ones(4, 2),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"r": 2, "lora_alpha": 4, "alpha_pattern": patterns, "peft_version": "0.21.2"}
    (folder / "adapter_config.json").write_text(json.dumps({**content, **config}))
    base = BaseModel({PATH: BaseModule("linear", (4, 4))})
    return read_checkpoint(folder, base).modules[PATH].scaling


@pytest.mark.parametrize("prefix", ["base_model.model._orig_mod.", "base_model.model.module."])
@pytest.mark.parametrize("key", [r"^model\.layers\.0\..*", r"_orig_mod\..*|module\..*"])
def test_what_fits_one_of_the_two_paths_is_refused(tmp_path: Path, prefix: str, key: str) -> None:
    with pytest.raises(AdapterUnsupported, match=r"with its wrappers.*remedy: write patterns"):
        scaling(tmp_path, prefix, {key: 64})


@pytest.mark.parametrize("key", ["q_proj", "layers.0.self_attn.q_proj", f"{PATH}", r".*\.0\..*"])
def test_what_fits_the_end_of_the_path_fits_both(tmp_path: Path, key: str) -> None:
    assert scaling(tmp_path, "base_model.model._orig_mod.", {key: 64}) == 32


def test_a_wrapper_outside_of_pefts_model_was_never_seen_by_it(tmp_path: Path) -> None:
    prefix = "_orig_mod.module.base_model.model."
    assert scaling(tmp_path, prefix, {r"^model\.layers\.0\..*": 64}) == 32


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        (f"base_model.model.{PATH}.lora_A.weight", ""),
        (f"module.base_model.model.{PATH}.lora_A.default.weight", ""),
        (f"base_model.model._orig_mod.{PATH}.lora_A.default.weight", f"_orig_mod.{PATH}"),
        (
            "base_model.model.model.layers.0._fsdp_wrapped_module.q_proj.base_layer.lora_A.weight",
            "model.layers.0._fsdp_wrapped_module.q_proj",
        ),
        ("base_model.model.embed_tokens._orig_mod.lora_embedding_A", "embed_tokens._orig_mod"),
    ],
)
def test_the_path_with_its_wrappers(name: str, wrapped: str) -> None:
    parsed = parse_name(name)
    assert isinstance(parsed, LoraName)
    assert parsed.wrapped == wrapped


@pytest.mark.parametrize("key", [r"^model\.layers\.0\..*", r"_orig_mod\..*", "q_proj"])
def test_pefts_own_scaling_or_a_refusal(tmp_path: Path, key: str) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    pytest.importorskip("transformers", minversion="5")
    import trips

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], alpha_pattern={key: 64})
    with trips.quiet():
        model = peft.get_peft_model(torch.compile(trips.base_model("llama")), config)
        model.save_pretrained(tmp_path)
    scalings = {
        name.partition("_orig_mod.")[2]: module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert len(scalings) == 2
    try:
        read = read_checkpoint(tmp_path, BaseModel.from_model(trips.base_model("llama"))).modules
    except AdapterUnsupported:
        assert key != "q_proj"
        return
    assert {path: weights.scaling for path, weights in read.items()} == scalings
