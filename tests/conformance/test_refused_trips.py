"""What the real PEFT saves and we can't serve: refused by the feature's name, and never read as if
it were plain LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", minversion="0.21")  # the newest features
pytest.importorskip("transformers", minversion="5")

import trips
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import read_checkpoint
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

BLOCKS = BdLoraConfig(target_modules_bd_b=["q_proj"], nblocks=2)


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("use_dora", {"use_dora": True}),
        ("lora_bias", {"lora_bias": True}),
        ("bias='all'", {"bias": "all"}),
        ("bias='lora_only'", {"bias": "lora_only"}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("layer_replication", {"layer_replication": [[0, 2], [1, 2]]}),
        ("trainable_token_indices", {"trainable_token_indices": [3]}),
        ("alora_invocation_tokens", {"alora_invocation_tokens": [5, 6]}),
        ("use_qalora", {"use_qalora": True, "qalora_group_size": 16}),
        ("use_bdlora", {"use_bdlora": BLOCKS}),
        ("kasa_config", {"kasa_config": KasaConfig()}),
        ("monteclora_config", {"monteclora_config": MontecloraConfig()}),
        ("velora_config", {"velora_config": VeloraConfig()}),
        *(
            (f"init_lora_weights='{name}'", {"init_lora_weights": name})
            for name in ("pissa", "pissa_niter_4", "olora")
        ),
    ],
)
def test_a_feature_that_is_not_served(tmp_path: Path, word: str, options: dict[str, Any]) -> None:
    assert_refused(tmp_path, "qwen2", word, {"target_modules": ["q_proj"], **options})


@pytest.mark.parametrize(
    ("family", "word", "options"),
    [
        ("llava", "4 dimensions", {"target_modules": ["patch_embedding"]}),
        (
            "gpt_oss",
            "LoRA of the parameter .*gate_up_proj_bias",
            {"target_modules": [], "target_parameters": ["experts.gate_up_proj_bias"]},
        ),
        (
            "qwen2",
            "ensure_weight_tying",
            {
                "target_modules": ["embed_tokens"],
                "ensure_weight_tying": True,
                "rank_pattern": {"embed_tokens": 3},
            },
        ),
    ],
)
def test_a_place_that_is_not_served(
    tmp_path: Path, family: str, word: str, options: dict[str, Any]
) -> None:
    assert_refused(tmp_path, family, word, options)


def assert_refused(path: Path, family: str, word: str, options: dict[str, Any]) -> None:
    trips.save(path, family, {"r": 2, **options})
    with pytest.raises(AdapterUnsupported, match=word):
        read_checkpoint(path, BaseModel.from_model(trips.base_model(family)))


def test_patterns_that_mean_other_ranks_once_they_are_saved(tmp_path: Path) -> None:
    # Both fit. PEFT sorts them as it saves, so that the first is another, and can't load it again.
    ranks = {"q_proj": 3, "layers.0.self_attn.q_proj": 4}
    trips.save(tmp_path, "llama", {"r": 2, "target_modules": ["q_proj"], "rank_pattern": ranks})
    with pytest.raises(trips.NotLoadable):
        trips.merged(tmp_path, "llama")
    with pytest.raises(
        AdapterInvalid, match=r"rank 3 in the tensors.*rank 4 by r and rank_pattern"
    ):
        read_checkpoint(tmp_path, BaseModel.from_model(trips.base_model("llama")))
