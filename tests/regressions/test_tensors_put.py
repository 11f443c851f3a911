"""Tensors from memory: those that share their memory failed with safetensors' own error, a negated
view was taken for what it negates (and had its digest), and PEFT's own config was no JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import BASE, A, B, write_adapter

from adaptercache import AdapterInvalid, ReadOptions
from adaptercache.checkpoint import checkpoint_from_tensors, read_checkpoint

ROW, COLUMN = torch.arange(1.0, 5).view(1, 4), torch.arange(1.0, 5).view(4, 1)
CONFIG = {"r": 1, "lora_alpha": 1}


def served(tiny: Any, tensors: dict[str, torch.Tensor], config: Any) -> bytes:
    with tiny.cache() as cache:
        cache.put("a", tensors, config).result(10)
        with cache.acquire("a").result(10) as lease:
            assert isinstance(lease.digest, bytes)
            return lease.digest


def test_views_of_one_buffer_and_tied_tensors_are_put(tiny: Any) -> None:
    tensors, config = tiny.tensors(0)
    name = next(name for name in tensors if "layers.1" in name and tensors[name].shape[0] == 4)
    other = name.replace("layers.1", "layers.0")
    tied = {**tensors, name: tensors[other]}
    apart = {**tensors, name: tensors[other].clone()}
    assert served(tiny, tied, config) == served(tiny, apart, config)
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    views = {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }
    assert served(tiny, views, config) == served(tiny, tensors, config)


def test_a_negated_view_is_what_it_negates_with_a_minus(tiny: Any, tmp_path: Path) -> None:
    tensors, config = tiny.tensors(0)
    name = next(iter(tensors))
    negated = {**tensors, name: torch._neg_view(tensors[name])}
    want = served(tiny, {**tensors, name: -tensors[name]}, config)
    assert served(tiny, negated, config) == want != served(tiny, tensors, config)

    minus = checkpoint_from_tensors({A: -ROW, B: COLUMN}, CONFIG, BASE)
    view = {A: torch._neg_view(ROW), B: COLUMN}
    assert checkpoint_from_tensors(view, CONFIG, BASE).digest == minus.digest
    (write_adapter(tmp_path) / "adapter_model.safetensors").unlink()
    torch.save(view, tmp_path / "adapter_model.bin")
    pickled = read_checkpoint(tmp_path, BASE, options=ReadOptions(allow_pickle=True))
    assert pickled.digest == minus.digest
    assert torch.equal(pickled.delta("q_proj"), minus.delta("q_proj"))


@pytest.mark.parametrize(
    "tensor", [torch.ones(1, 4, device="meta"), torch.ones(1, 4).to_sparse()], ids=str
)
def test_a_tensor_without_dense_values_is_named(tiny: Any, tensor: torch.Tensor) -> None:
    with tiny.cache() as cache, pytest.raises(TypeError, match=f"{A} has no dense values"):
        cache.put("a", {A: tensor}, CONFIG)
    with pytest.raises(AdapterInvalid, match=f"without dense values.*{A}"):
        checkpoint_from_tensors({A: tensor, B: COLUMN}, CONFIG, BASE)


def test_pefts_own_config_is_taken(tiny: Any) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    tensors, config = tiny.tensors(0)
    own = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]).to_dict()
    assert isinstance(own["target_modules"], set)
    assert config["lora_alpha"] == 8
    assert served(tiny, tensors, own) == served(tiny, tensors, config)
    with tiny.cache() as cache, pytest.raises(TypeError, match="what JSON can say"):
        cache.put("a", tensors, {**config, "more": object()})
