"""Families of transformers beyond those of `test_attach`: PEFT's logits and tokens, row by row."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", minversion="0.21")
pytest.importorskip("transformers", minversion="5")

import peft
import transformers
import trips
from attached import cache_of

from adaptercache import LoraLayout
from adaptercache.integrations.transformers import attach

GREEDY = {"do_sample": False, "min_new_tokens": 5, "max_new_tokens": 5, "pad_token_id": 0}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64}
HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 67}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**MOE, "shared_expert_intermediate_size": 20}
SIZES = trips.SIZES
CONFIGS: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67},
    "CodeGen": {**OLD, "rotary_dim": 4},
    "Cohere": SIZES,
    "Ernie4_5": {**SIZES, "head_dim": 8},
    "Exaone4": SIZES,
    "Falcon": HEADS,
    "Gemma3nText": {
        **SIZES,
        "head_dim": 8,
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 67,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["full_attention"] * 2,
        "intermediate_size": [48, 48],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    },
    "Glm": {**SIZES, "head_dim": 8},
    "Glm4": {**SIZES, "head_dim": 8},
    "GptOss": {**SIZES, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
    "GPTBigCode": OLD,
    "GPTJ": {**OLD, "rotary_dim": 4},
    "GPTNeoX": {**HEADS, "intermediate_size": 48},
    "Granite": SIZES,
    "Mixtral": {**SIZES, "num_local_experts": 3},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 67},
    "Nemotron": SIZES,
    "Olmo": SIZES,
    "Olmo2": SIZES,
    "Phi": SIZES,
    "Qwen2Moe": {**SIZES, **SHARED},
    "Qwen3Moe": {**SIZES, **MOE, "head_dim": 8},
    "Qwen3Next": {
        **SIZES,
        **SHARED,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "RecurrentGemma": {**SIZES, "block_types": ["recurrent", "attention"]},
    "SmolLM3": SIZES,
    "StableLm": SIZES,
    "Starcoder2": SIZES,
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "vocab_size": 67},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_gives_what_peft_gives(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with trips.quiet():
        config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.eval().requires_grad_(False)
    theirs = [peft_model(model, rank, tmp_path / f"a{rank}") for rank in (2, 3)]
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1:, :2] = 0
    inputs = {"input_ids": torch.randint(6, 67, (3, 7)), "attention_mask": mask}
    with cache_of(model, tmp_path) as cache, attach(model, cache), trips.quiet():
        of_rows = ["a2", None, "a3"]
        logits = model(**inputs, adapters=of_rows).logits
        tokens = model.generate(**inputs, adapters=of_rows, **GREEDY)
        for row, its in enumerate([theirs[0], model, theirs[1]]):
            want = its(**inputs).logits[row]
            assert (logits[row] - want).abs().max() <= 1e-5 * want.abs().max()
            assert torch.equal(tokens[row], its.generate(**inputs, **GREEDY)[row])
            if its is not model:
                assert (want - model(**inputs).logits[row]).abs().max() > 1e-2 * want.abs().max()


def peft_model(model: Any, rank: int, path: Path) -> Any:
    """A copy of the model with an adapter on all that a layout serves; saved, too."""
    sites = LoraLayout.from_model(model).sites
    if type(model).__name__.startswith("Qwen3Next"):  # PEFT would take experts for the shared one
        sites = tuple(site for site in sites if ".mlp." not in site.path)
    options = {"r": rank, "target_modules": [site.path for site in sites]}
    with trips.quiet():
        config = peft.LoraConfig(init_lora_weights=False, **options)
        theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.data.copy_(0.25 * torch.randn(weight.shape))
        theirs.save_pretrained(path)
    return theirs
