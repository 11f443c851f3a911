"""A checkpoint as a flat vector, by DESIGN's words and by nothing of the package's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import AdapterInvalid, AdapterUnsupported, LoraLayout
from adaptercache.checkpoint import read_checkpoint
from adaptercache.packing import pack, spec_of
from adaptercache.testing import random_adapter

CONFIG = {
    "model_type": "llama",
    "hidden_size": 33,
    "intermediate_size": 17,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 11,
    "vocab_size": 64,
}
LAYOUT = LoraLayout.from_config(CONFIG, max_rank=64, dtype="float32")


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    import json

    from safetensors.torch import save_file

    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return read_checkpoint(folder, LAYOUT.base)


@pytest.mark.parametrize("rank", [1, 5, 16, 64])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("down_proj", "k_proj")])
def test_every_matrix_lies_where_it_should_and_all_else_is_zero(
    tmp_path: Path, rank: int, targets: tuple[str, ...]
) -> None:
    tensors, config = random_adapter(
        LAYOUT.base, rank=rank, targets=targets, seed=rank, dtype=torch.float32
    )
    spec, vector = pack(saved(tmp_path, tensors, config), LAYOUT)
    rest, at = vector.clone(), 0
    for index, site in enumerate(LAYOUT.sites):
        if site.module not in targets:
            assert (spec.ranks[index], spec.starts[index]) == (0, -1)
            continue
        assert (spec.ranks[index], spec.starts[index]) == (rank, at)
        name = f"base_model.model.{site.path}.lora"
        for matrix in (tensors[f"{name}_A.weight"], tensors[f"{name}_B.weight"].t()):
            assert vector[at : at + matrix.numel()].equal(matrix.reshape(-1))
            rest[at : at + matrix.numel()] = 0
            at += -(-matrix.numel() // 512) * 512
    assert len(vector) == spec.elements == at
    assert not rest.any()


def test_scaling_is_kept_apart_from_the_weights(tmp_path: Path) -> None:
    tensors, config = random_adapter(LAYOUT.base, rank=4, alpha=6, dtype=torch.float32)
    spec, _ = pack(saved(tmp_path, tensors, config), LAYOUT)
    assert set(spec.scalings) == {0.0, 1.5}


def test_weights_are_cast_once_to_the_nearest(tmp_path: Path) -> None:
    layout = LoraLayout.from_config(CONFIG, max_rank=64, dtype="bfloat16")
    tensors, config = random_adapter(LAYOUT.base, rank=4, dtype=torch.float32)
    spec, vector = pack(saved(tmp_path, tensors, config), layout)
    start = spec.starts[0]
    want = tensors[f"base_model.model.{LAYOUT.sites[0].path}.lora_A.weight"]
    assert vector[start : start + want.numel()].equal(want.reshape(-1).to(torch.bfloat16))


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    layout = LoraLayout.from_config(CONFIG, max_rank=64, dtype="float16")
    tensors, config = random_adapter(LAYOUT.base, rank=4, dtype=torch.float32)
    next(iter(tensors.values()))[0, 0] = 1e6
    with pytest.raises(AdapterInvalid, match="float16"):
        pack(saved(tmp_path, tensors, config), layout)


@pytest.mark.parametrize(
    ("dtype", "file_dtype", "value"),
    [
        ("float16", torch.bfloat16, 1e6),
        ("bfloat16", torch.float32, 3.4e38),  # rounds up to infinity
        ("bfloat16", torch.float64, -1e300),
        ("float32", torch.float64, 1e39),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_no_weight_becomes_infinite(
    dtype: str, file_dtype: torch.dtype, value: float, side: int, tmp_path: Path
) -> None:
    layout = LoraLayout.from_config(CONFIG, max_rank=64, dtype=dtype)
    tensors, config = random_adapter(LAYOUT.base, rank=4, dtype=file_dtype)
    for tensor in tensors.values():  # ΔW is none: only the dtype can't hold it
        tensor.zero_()
    list(tensors.values())[side][0, 0] = value
    with pytest.raises(AdapterInvalid, match=f"too large for {dtype}|beyond float32"):
        pack(saved(tmp_path, tensors, config), layout)


def test_a_rank_over_the_maximum_is_refused_by_name(tmp_path: Path) -> None:
    layout = LoraLayout.from_config(CONFIG, max_rank=3, dtype="float32")
    tensors, config = random_adapter(LAYOUT.base, rank=4)
    with pytest.raises(AdapterUnsupported, match="rank 4"):
        spec_of(saved(tmp_path, tensors, config), layout)


def test_a_module_that_the_layout_does_not_serve_is_refused_by_name(tmp_path: Path) -> None:
    layout = LoraLayout.from_config(CONFIG, targets=("q_proj",), dtype="float32")
    tensors, config = random_adapter(LAYOUT.base, rank=4, targets=("q_proj", "v_proj"))
    with pytest.raises(AdapterUnsupported, match="v_proj"):
        spec_of(saved(tmp_path, tensors, config), layout)
