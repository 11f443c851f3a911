"""Experts, and projections that adapter and base keep apart or fused: the same ΔW either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import (
    Checkpoint,
    ExpertWeights,
    ReadOptions,
    checkpoint_from_tensors,
)
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

Tensors = dict[str, torch.Tensor]

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
APART = BaseModel(
    {
        f"{ATTENTION}.q_proj": BaseModule("linear", (8, 8)),
        f"{ATTENTION}.k_proj": BaseModule("linear", (4, 8)),
        f"{ATTENTION}.v_proj": BaseModule("linear", (4, 8)),
        f"{ATTENTION}.o_proj": BaseModule("linear", (8, 8)),
        f"{MLP}.gate_proj": BaseModule("linear", (6, 8)),
        f"{MLP}.up_proj": BaseModule("linear", (6, 8)),
    }
)
FUSED = BaseModel(
    {
        f"{ATTENTION}.qkv_proj": BaseModule("linear", (16, 8)),
        f"{ATTENTION}.o_proj": BaseModule("linear", (8, 8)),
        f"{MLP}.gate_up_proj": BaseModule("linear", (12, 8)),
    }
)
E, HIDDEN, INNER = 3, 8, 5
STACKED = BaseModel(
    {
        f"{MLP}.experts.down_proj": BaseModule("parameter", (E, HIDDEN, INNER)),
        f"{MLP}.experts.gate_up_proj": BaseModule("parameter", (E, 2 * INNER, HIDDEN)),
    }
)
ONE_BY_ONE = BaseModel(
    {
        f"{MLP}.experts.{expert}.{leaf}": BaseModule("linear", shape)
        for expert in range(E)
        for leaf, shape in {
            "gate_proj": (INNER, HIDDEN),
            "up_proj": (INNER, HIDDEN),
            "down_proj": (HIDDEN, INNER),
        }.items()
    }
)


def lora(base: BaseModel, *paths: str, rank: int = 2) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for path in paths or base.modules:
        outputs, inputs = base.modules[path].shape
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw)
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw)
    return tensors


def stacked_lora(rank: int = 2) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    width = E * rank
    return {
        f"{MLP}.experts.base_layer.lora_A.weight": torch.randn(width, HIDDEN, generator=draw),
        f"{MLP}.experts.base_layer.lora_B.weight": torch.randn(2 * INNER, width, generator=draw),
        f"{MLP}.experts.lora_A.weight": torch.randn(width, INNER, generator=draw),
        f"{MLP}.experts.lora_B.weight": torch.randn(HIDDEN, width, generator=draw),
    }


def read(
    tensors: Tensors, base: BaseModel, options: ReadOptions | None = None, **config: Any
) -> Checkpoint:
    plain = {"r": 2, "lora_alpha": 3, "peft_version": "0.20.0", **config}
    return checkpoint_from_tensors(tensors, plain, base, options=options or ReadOptions())


def deltas(checkpoint: Checkpoint, *paths: str) -> torch.Tensor:
    """The ΔW of several modules, one below the other; zero for those without LoRA."""
    return torch.cat(
        [
            checkpoint.delta(path)
            if path in checkpoint.modules
            else torch.zeros(checkpoint.base.modules[path].shape)
            for path in paths
        ]
    )


def test_a_fused_adapter_on_a_base_that_is_apart() -> None:
    apart, fused = read(lora(FUSED), APART), read(lora(FUSED), FUSED)
    assert set(apart.modules) == set(APART.modules)
    assert all(weights.rank == 2 for weights in apart.modules.values())
    qkv = deltas(apart, *(f"{ATTENTION}.{name}_proj" for name in "qkv"))
    assert torch.allclose(qkv, fused.delta(f"{ATTENTION}.qkv_proj"))
    gate_up = deltas(apart, f"{MLP}.gate_proj", f"{MLP}.up_proj")
    assert torch.allclose(gate_up, fused.delta(f"{MLP}.gate_up_proj"))


@pytest.mark.parametrize("missing", ["", "k_proj", "q_proj"])
def test_an_adapter_that_is_apart_on_a_fused_base(missing: str) -> None:
    paths = [path for path in APART.modules if not (missing and path.endswith(missing))]
    apart, fused = read(lora(APART, *paths), APART), read(lora(APART, *paths), FUSED)
    qkv = deltas(apart, *(f"{ATTENTION}.{name}_proj" for name in "qkv"))
    assert torch.allclose(fused.delta(f"{ATTENTION}.qkv_proj"), qkv)
    assert fused.modules[f"{ATTENTION}.qkv_proj"].rank == (4 if missing else 6)
    backwards = read(dict(reversed(lora(APART, *paths).items())), FUSED)
    assert backwards.digest == fused.digest


def test_parts_with_different_scalings_are_refused() -> None:
    with pytest.raises(AdapterUnsupported, match="scalings"):
        read(lora(APART), FUSED, alpha_pattern={"k_proj": 7})


def test_a_module_both_fused_and_apart_is_refused() -> None:
    both = {**lora(FUSED), **lora(APART, f"{ATTENTION}.k_proj")}
    for base in (APART, FUSED):
        with pytest.raises(AdapterInvalid, match="twice"):
            read(both, base)


def test_lora_of_an_embedding_is_never_taken_for_a_projection() -> None:
    odd = {
        f"{ATTENTION}.qkv_proj.lora_embedding_A": torch.ones(2, 8),
        f"{ATTENTION}.qkv_proj.lora_embedding_B": torch.ones(16, 2),
    }
    with pytest.raises(AdapterInvalid, match="no tensor of the adapter"):
        read(odd, APART)


def test_a_fused_adapter_of_other_sizes_is_refused() -> None:
    wide = lora(FUSED, f"{ATTENTION}.qkv_proj")
    wide[f"{ATTENTION}.qkv_proj.lora_B.weight"] = torch.ones(24, 2)
    with pytest.raises(AdapterInvalid, match=r"expected: A \[rank, 8\], B \[16, rank\]"):
        read(wide, APART)


def test_stacked_experts_are_taken_apart_as_peft_does() -> None:
    checkpoint = read(stacked_lora(), STACKED)
    down = checkpoint.modules[f"{MLP}.experts.down_proj"]
    assert isinstance(down, ExpertWeights)
    assert (down.a.shape, down.b.shape) == ((E, 2, INNER), (E, HIDDEN, 2))
    a, b = (stacked_lora()[f"{MLP}.experts.lora_{side}.weight"] for side in "AB")
    for expert in range(E):
        want = sum(torch.outer(b[:, k * E + expert], a[expert * 2 + k]) for k in range(2))
        assert torch.allclose(checkpoint.delta(f"{MLP}.experts.down_proj")[expert], 1.5 * want)


def test_the_slow_expert_order_of_other_writers_is_a_setting() -> None:
    tensors = stacked_lora()
    slow = {
        name: tensor.reshape(-1, 2, E).transpose(1, 2).reshape(tensor.shape)
        if "lora_B" in name
        else tensor
        for name, tensor in tensors.items()
    }
    options = ReadOptions(expert_columns="expert_slowest")
    assert read(slow, STACKED, options).digest == read(tensors, STACKED).digest
    assert read(slow, STACKED).digest != read(tensors, STACKED).digest


def test_stacked_experts_on_a_base_with_one_by_one() -> None:
    stacked, single = read(stacked_lora(), STACKED), read(stacked_lora(), ONE_BY_ONE)
    assert set(single.modules) == set(ONE_BY_ONE.modules)
    for expert in range(E):
        path = f"{MLP}.experts.{expert}"
        gate_up = deltas(single, f"{path}.gate_proj", f"{path}.up_proj")
        assert torch.allclose(gate_up, stacked.delta(f"{MLP}.experts.gate_up_proj")[expert])
        down = single.delta(f"{path}.down_proj")
        assert torch.allclose(down, stacked.delta(f"{MLP}.experts.down_proj")[expert])


@pytest.mark.parametrize("layout", ["qwen", "mixtral"])
def test_experts_one_by_one_on_a_stacked_base(layout: str) -> None:
    paths = [path for path in ONE_BY_ONE.modules if ".1." not in path]  # an expert may be missing
    tensors = lora(ONE_BY_ONE, *paths)
    single = read(tensors, ONE_BY_ONE)
    if layout == "mixtral":
        for new, old in (
            ("mlp.", "block_sparse_moe."),
            ("gate_proj", "w1"),
            ("down_proj", "w2"),
            ("up_proj", "w3"),
        ):
            tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    stacked = read(tensors, STACKED)
    assert stacked.modules[f"{MLP}.experts.gate_up_proj"].rank == 4
    for expert in range(E):
        path = f"{MLP}.experts.{expert}"
        gate_up = deltas(single, f"{path}.gate_proj", f"{path}.up_proj")
        assert torch.allclose(stacked.delta(f"{MLP}.experts.gate_up_proj")[expert], gate_up)
        down = deltas(single, f"{path}.down_proj")
        assert torch.allclose(stacked.delta(f"{MLP}.experts.down_proj")[expert], down)


def test_an_expert_that_the_base_lacks_is_refused() -> None:
    path = f"{MLP}.experts.0.down_proj"
    tensors = {
        name.replace(".0.down", ".9.down"): tensor
        for name, tensor in lora(ONE_BY_ONE, path).items()
    }
    with pytest.raises(AdapterInvalid, match=r"experts\.9"):
        read(tensors, STACKED)


def test_a_stack_that_fits_no_parameter_or_the_wrong_rank_is_refused() -> None:
    with pytest.raises(AdapterInvalid, match="shape"):
        read({**stacked_lora(), f"{MLP}.experts.lora_A.weight": torch.ones(6, 7)}, STACKED)
    with pytest.raises(AdapterInvalid, match="3 experts of rank 3: 9"):
        read(stacked_lora(), STACKED, r=3)


def test_a_lone_stack_that_fits_two_parameters_needs_the_configs_word() -> None:
    square = BaseModel(
        {
            f"{MLP}.experts.up_proj": BaseModule("parameter", (E, HIDDEN, INNER)),
            f"{MLP}.experts.down_proj": BaseModule("parameter", (E, HIDDEN, INNER)),
        }
    )
    lone = {name: tensor for name, tensor in stacked_lora().items() if "base_layer" not in name}
    with pytest.raises(AdapterInvalid, match="several parameters"):
        read(lone, square)
    named = read(lone, square, target_parameters=["experts.up_proj"])
    assert list(named.modules) == [f"{MLP}.experts.up_proj"]


@pytest.mark.parametrize("targets", [["gate_up_proj_bias"], ["gate_up_proj", "gate_up_proj_bias"]])
def test_lora_of_the_experts_biases_is_refused_by_name(targets: list[str]) -> None:
    biased = BaseModel(
        {
            **STACKED.modules,
            f"{MLP}.experts.gate_up_proj_bias": BaseModule("parameter", (E, 2 * INNER)),
        }
    )
    with pytest.raises(AdapterUnsupported, match="gate_up_proj_bias"):
        read(stacked_lora(), biased, target_parameters=[f"experts.{name}" for name in targets])
