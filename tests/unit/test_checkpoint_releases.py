"""``alpha_pattern`` as releases of PEFT matched it. Until 0.13 one search over the keys of both
patterns gave rank and alpha, so that we read another scaling than an adapter was trained with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from adaptercache import BaseModel
from adaptercache.checkpoint import read_checkpoint
from adaptercache.checkpoint.config import LoraConfig
from adaptercache.errors import AdapterUnsupported

PATHS = [
    f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")
]
KEYS = st.sampled_from(
    [
        *("q_proj", "v_proj", "proj", "self_attn.q_proj", "layers.0.self_attn.v_proj"),
        *(".*0.*", r"layers\.1\..*", "q_proj|v_proj", "(q|v)_proj", PATHS[0], PATHS[3]),
        *(re.escape(PATHS[1]), r"\w+.self_attn.v_proj"),
    ]
)
RANKS = st.dictionaries(KEYS, st.integers(2, 4), max_size=3)
ALPHAS = st.dictionaries(KEYS, st.integers(5, 9), max_size=3)


def by_0_6(path: str, ranks: Mapping[str, int], alphas: Mapping[str, int]) -> int:
    """What `LoraModel._create_and_replace` did until 0.13."""
    keys = chain(ranks, alphas)
    return alphas.get(next((k for k in keys if re.match(rf".*\.{k}$", path)), path), 16)


def by_0_14(path: str, ranks: Mapping[str, int], alphas: Mapping[str, int]) -> int:
    return alphas.get(next((k for k in alphas if re.match(rf".*\.{k}$", path)), path), 16)


def by_0_15(path: str, ranks: Mapping[str, int], alphas: Mapping[str, int]) -> int:
    return alphas.get(next((k for k in alphas if re.match(rf"(.*\.)?({k})$", path)), path), 16)


RULES = {"0.6.2": by_0_6, "0.13.2": by_0_6, "0.14.0": by_0_14, "0.15.2": by_0_15, "0.21.2": by_0_15}


def scaling(ranks: Mapping[str, int], alphas: Mapping[str, int], path: str, **more: Any) -> float:
    config = {"r": 1, "lora_alpha": 16, "rank_pattern": ranks, "alpha_pattern": alphas, **more}
    return LoraConfig.from_peft(config).scaling_of(path, 1)


@pytest.mark.parametrize("version", RULES)
@given(ranks=RANKS, alphas=ALPHAS, path=st.sampled_from(PATHS))
def test_a_release_that_is_named_is_followed(
    version: str, ranks: dict[str, int], alphas: dict[str, int], path: str
) -> None:
    want = RULES[version](path, ranks, alphas)
    assert scaling(ranks, alphas, path, peft_version=version) == want


@pytest.mark.parametrize(
    ("key", "rules"),
    [
        (None, (by_0_6, by_0_14, by_0_15)),
        ("use_dora", (by_0_6, by_0_14, by_0_15)),
        ("exclude_modules", (by_0_14, by_0_15)),
        ("eva_config", (by_0_14, by_0_15)),
        ("lora_bias", (by_0_14, by_0_15)),
        ("corda_config", (by_0_15,)),
        ("target_parameters", (by_0_15,)),
    ],
)
@given(ranks=RANKS, alphas=ALPHAS, path=st.sampled_from(PATHS))
def test_where_nothing_tells_all_that_it_may_be_agree_or_it_is_refused(
    key: str | None, rules: Any, ranks: dict[str, int], alphas: dict[str, int], path: str
) -> None:
    more = {} if key is None else {key: None}
    may_be = {rule(path, ranks, alphas) for rule in rules}
    if len(may_be) == 1:
        assert scaling(ranks, alphas, path, **more) == may_be.pop()
    else:
        with pytest.raises(AdapterUnsupported, match=r"releases of PEFT.*peft_version"):
            scaling(ranks, alphas, path, **more)


def test_the_first_pattern_of_the_rank_took_the_alpha_with_it() -> None:
    ranks, alphas = {"layers.0.self_attn.v_proj": 2}, {"v_proj": 9}
    assert scaling(ranks, alphas, PATHS[1], peft_version="0.12.0") == 16
    assert scaling(ranks, alphas, PATHS[1], peft_version="0.14.0") == 9
    with pytest.raises(AdapterUnsupported, match=r"v_proj: alpha 9\.0 or 16\.0"):
        scaling(ranks, alphas, PATHS[1])
    assert scaling(ranks, alphas, PATHS[3]) == 9  # no pattern of the rank fits it


def test_an_expression_that_no_old_release_took_is_of_a_new_one() -> None:
    assert scaling({}, {"q_proj)|(v_proj": 5}, PATHS[0]) == 5
    assert scaling({}, {r"^model\.layers\.0\..*": 5}, PATHS[0]) == 5


SAVED = Path(__file__).parents[1] / "conformance" / "patterns_before_0.14"
"""As PEFT 0.12.0 saved it, and what its own merge added to each weight."""
BASE = BaseModel.from_config(
    {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 67,
    }
)


def test_an_adapter_of_0_12_is_read_as_0_12_trained_it_once_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(AdapterUnsupported, match=r"layers\.0\.self_attn\.v_proj: alpha 5\.0 or 9"):
        read_checkpoint(SAVED, BASE)
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    config = json.loads((SAVED / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_version": "0.12.0"}))
    checkpoint = read_checkpoint(tmp_path, BASE)
    golden = load_file(SAVED / "golden.safetensors")
    assert set(checkpoint.modules) == set(golden)
    for path, want in golden.items():
        assert (checkpoint.delta(path) - want).abs().max() <= 1e-5 * want.abs().max()
