from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import (
    Checkpoint,
    ReadOptions,
    checkpoint_from_tensors,
    read_checkpoint,
)
from adaptercache.errors import AdapterCacheError, AdapterInvalid, AdapterUnsupported

Tensors = dict[str, torch.Tensor]

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
BASE = BaseModel(
    {
        "model.embed_tokens": BaseModule("embedding", (9, 8)),
        Q: BaseModule("linear", (8, 8)),
        V: BaseModule("linear", (4, 8)),
        "lm_head": BaseModule("linear", (9, 8)),
    }
)
CONFIG = {"r": 2, "lora_alpha": 4}
PREFIX = "base_model.model."


def lora(*paths: str, rank: int = 2, seed: int = 0) -> Tensors:
    """A and B for modules of BASE, by their bare names."""
    draw = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for path in paths or (Q, V):
        outputs, inputs = BASE.modules[path].shape
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw)
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw)
    return tensors


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): tensor for name, tensor in tensors.items()}


def read(
    tensors: Tensors, base: BaseModel = BASE, options: ReadOptions | None = None, **config: Any
) -> Checkpoint:
    return checkpoint_from_tensors(
        tensors, {**CONFIG, **config}, base, options=options or ReadOptions()
    )


# Names.


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: PREFIX + name,
        lambda name: PREFIX * 3 + name,
        lambda name: f"module.{PREFIX}{name}",
        lambda name: f"{PREFIX}module.{name}",
        lambda name: f"{PREFIX}_orig_mod.{name}",
        lambda name: "_fsdp_wrapped_module." + name.replace(".0.", ".0._fsdp_wrapped_module."),
        lambda name: name.replace(".0.", ".0._checkpoint_wrapped_module."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("model.layers", "layers"),
        lambda name: PREFIX + name.replace("model.layers", "language_model.model.layers"),
        lambda name: PREFIX + name.replace("model.layers", "model.language_model.layers"),
        lambda name: name.replace("_proj.", "_proj.linear."),
    ],
)
def test_wrappers_prefixes_and_the_order_of_names_change_nothing(
    rename: Callable[[str], str],
) -> None:
    plain = read(lora())
    backwards = dict(reversed(renamed(lora(), rename).items()))
    again = read(backwards)
    assert list(again.modules) == list(plain.modules) == [Q, V]
    assert again.digest == plain.digest
    assert torch.equal(again.delta(Q), plain.delta(Q))


def test_an_adapter_of_another_model_names_three_of_its_keys_and_three_modules() -> None:
    other = renamed(lora(), lambda name: name.replace("self_attn", "attention"))
    with pytest.raises(AdapterInvalid) as raised:
        read(other)
    assert all(name in str(raised.value) for name in list(other)[:3])
    assert all(path in str(raised.value) for path in list(BASE.modules)[:3])


def test_an_ambiguous_base_needs_full_paths() -> None:
    twice = BaseModel({**BASE.modules, f"language_model.{Q}": BASE.modules[Q]})
    assert list(read(lora(Q), twice).modules) == [Q]
    with pytest.raises(AdapterInvalid, match="could be several"):
        read(renamed(lora(Q), lambda name: name.removeprefix("model.")), twice)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (f"{Q}.lora_magnitude_vector", "DoRA"),
        (f"{Q}.lora_B.bias", "lora_bias"),
        (f"{Q}.bias", "trained base tensor"),
        (f"{Q}.base_layer.bias", "trained base tensor"),
        (f"{Q}.lora_a", "MLX-LM"),
        (f"{Q}.lora_down.weight", "kohya"),
        (f"{Q}.alpha", "unknown meaning"),
        (f"{Q}.lora_A.sql.weight", "another adapter name"),
        ("rope_freqs", "unknown meaning"),
    ],
)
def test_a_tensor_that_is_not_lora_is_refused_by_name(name: str, word: str) -> None:
    with pytest.raises(AdapterUnsupported, match=word) as raised:
        read({**lora(), name: torch.ones(2, 2)})
    assert name in raised.value.where


def test_a_copy_of_the_base_is_skipped_and_a_resized_one_is_not() -> None:
    copy = f"{PREFIX}lm_head.base_layer.weight"
    checkpoint = read({**lora(), copy: torch.ones(9, 8)})
    assert [entry.name for entry in checkpoint.skipped] == [copy]
    assert checkpoint.digest == read(lora()).digest
    with pytest.raises(AdapterInvalid, match="resized"):
        read({**lora(), copy: torch.ones(11, 8)})


# A multimodal adapter on the text model.


def test_text_only_takes_the_language_part_and_lists_the_rest() -> None:
    vision = renamed(lora(Q), lambda name: f"model.vision_tower.encoder.{name}")
    with pytest.raises(AdapterInvalid, match="text_only"):
        read({**lora(), **vision})
    checkpoint = read({**lora(), **vision}, options=ReadOptions(text_only=True))
    assert checkpoint.digest == read(lora()).digest
    assert [entry.name for entry in checkpoint.skipped] == list(vision)


def test_text_only_still_refuses_a_layer_that_the_base_lacks() -> None:
    deeper = renamed(lora(Q), lambda name: name.replace("layers.0", "layers.7"))
    with pytest.raises(AdapterInvalid, match=r"layers\.7"):
        read({**lora(), **deeper}, options=ReadOptions(text_only=True))


def test_text_only_of_nothing_but_vision_is_an_error() -> None:
    vision = renamed(lora(Q), lambda name: f"vision_tower.encoder.{name}")
    with pytest.raises(AdapterInvalid, match="no tensor of the adapter"):
        read(vision, options=ReadOptions(text_only=True))


# The config.


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"r": 2, "lora_alpha": 12.5}, 6.25),
        ({"use_rslora": True, "lora_alpha": 16}, 16 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 64}}, 32.0),
        ({"alpha_pattern": {"self_attn.q_proj": 64, "q_proj": 2}}, 32.0),
        ({"alpha_pattern": {"proj": 64, r"layers\.0": 64, "_proj": 64}}, 2.0),
        ({"alpha_pattern": {r"^model\.layers\.0\..*": 64}}, 32.0),
        ({"r": 9, "rank_pattern": {"(q|v)_proj": 2}}, 2.0),
        ({"rank_pattern": None, "alpha_pattern": None, "target_modules": None}, 2.0),
    ],
)
def test_the_scaling_is_pefts(config: dict[str, Any], scaling: float) -> None:
    assert read(lora(), **config).modules[Q].scaling == scaling


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
@pytest.mark.parametrize("value", [None, 0, -1, True, "8", [8], math.inf, 10**400])
def test_a_rank_or_alpha_that_is_none_is_refused(key: str, value: object) -> None:
    with pytest.raises(AdapterInvalid) as raised:
        read(lora(), **{key: value})
    assert raised.value.where == key


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": [Q, V, "k_proj"], "exclude_modules": ["k_proj"]},
        {"enable_lora": None, "merge_weights": False},
        {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None},
        {"new_option": 3, "new_list": [1], "loftq_config": {}, "use_new": False, "x_config": {}},
        {"init_lora_weights": "gaussian", "corda_config": {"beta": 1}},
    ],
)
def test_what_says_nothing_about_the_maths_is_not_looked_at(config: dict[str, Any]) -> None:
    assert read(lora(), **config).digest == read(lora()).digest


def test_an_unknown_option_is_refused_until_it_is_vouched_for() -> None:
    for key in ("use_new", "new_config"):
        with pytest.raises(AdapterUnsupported, match=key):
            read(lora(), **{key: {"x": 1}})
        vouched = ReadOptions(ignored_config_keys=frozenset({key}))
        assert read(lora(), options=vouched, **{key: {"x": 1}}).digest == read(lora()).digest
    known = ReadOptions(ignored_config_keys=frozenset({"use_dora"}))
    with pytest.raises(AdapterUnsupported, match="DoRA"):
        read(lora(), options=known, use_dora=True)


# Shapes and values.


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{Q}.lora_A.weight", (2, 7)),
        (f"{Q}.lora_B.weight", (9, 2)),
        (f"{Q}.lora_A.weight", (3, 8)),
        (f"{V}.lora_B.weight", (8, 2)),
    ],
)
def test_a_wrong_shape_names_the_module_and_both_shapes(name: str, shape: tuple[int, int]) -> None:
    with pytest.raises(AdapterInvalid) as raised:
        read({**lora(), name: torch.ones(shape)})
    assert raised.value.where in (Q, V)
    assert str(shape) in str(raised.value.found)
    assert raised.value.expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(value: float, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in lora().items()}
    tensors[f"{V}.lora_B.weight"][3, 1] = value
    with pytest.raises(AdapterInvalid, match=r"v_proj\.lora_B"):
        read(tensors)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(AdapterUnsupported, match=str(dtype)):
        read({name: tensor.to(dtype) for name, tensor in lora().items()})


def test_a_convolution_and_lora_of_an_embedding_in_linear_form_are_refused() -> None:
    with pytest.raises(AdapterUnsupported, match="4 dimensions"):
        read({**lora(), f"{Q}.lora_A.weight": torch.ones(2, 8, 1, 1)})
    embedding = {
        "model.embed_tokens.lora_A.weight": torch.ones(2, 9),
        "model.embed_tokens.lora_B.weight": torch.ones(8, 2),
    }
    with pytest.raises(AdapterUnsupported, match="embedding"):
        read({**lora(), **embedding})


# The result.


def test_the_digest_is_of_the_content() -> None:
    digest = read(lora()).digest
    assert len(digest) == 32
    others = [
        read(lora(), lora_alpha=5),
        read(lora(seed=1)),
        read(lora(Q)),
        read({name: tensor.bfloat16() for name, tensor in lora().items()}),
    ]
    assert len({digest, *(other.digest for other in others)}) == 5
    assert read(lora(), lora_dropout=0.5).digest == digest


def test_a_large_adapter_has_the_same_digest_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = read(lora()).digest
    monkeypatch.setattr("adaptercache.checkpoint.weights._WORTH_THREADS", 0)
    assert read(lora()).digest == alone


def test_sizes_and_tensors_are_the_files(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in lora().items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    checkpoint = read_checkpoint(tmp_path, BASE)
    (tmp_path / "adapter_model.safetensors").unlink()  # the mapping holds on to it
    assert checkpoint.max_rank == 2
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert checkpoint.digest == read(tensors).digest
    for path in (Q, V):
        assert torch.equal(checkpoint.modules[path].a, tensors[f"{path}.lora_A.weight"])
        assert torch.equal(checkpoint.modules[path].b, tensors[f"{path}.lora_B.weight"])


def test_every_error_is_ours() -> None:
    with pytest.raises(AdapterCacheError):
        read({})
    with pytest.raises(AdapterInvalid, match="too long"):
        read({"a." * 500 + "lora_A.weight": torch.ones(2, 2)})
