"""``adaptercache convert``: the command; what it converts is tested where that is written."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(
    find_spec("adaptercache.convert") is None, reason="adaptercache.convert is not here"
)


def mlx_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """An adapter as MLX-LM saves it, and ΔW by module."""
    generator = torch.Generator().manual_seed(0)
    tensors, deltas = {}, {}
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn.q_proj"
        a = torch.randn(32, 4, generator=generator)
        b = torch.randn(4, 32, generator=generator)
        tensors |= {f"{module}.lora_a": a, f"{module}.lora_b": b}
        deltas[module] = 20.0 * (a @ b).T
    folder.mkdir()
    save_file(tensors, folder / "adapters.safetensors")
    config = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


@pytest.mark.parametrize("name", [None, "acme/base"])
def test_what_is_written_loads_and_is_the_same(
    name: str | None, run: Any, table: Any, tmp_path: Path
) -> None:
    deltas = mlx_adapter(tmp_path / "mlx")
    named = () if name is None else ("--base-model", name)
    done = run("convert", tmp_path / "mlx", tmp_path / "peft", *named, "--json")
    assert done.code == 0
    assert done.json == {
        "status": "written",
        "source": str(tmp_path / "mlx"),
        "target": str(tmp_path / "peft"),
        "format": "mlx-lm",
    }
    read = run("inspect", tmp_path / "peft", "--base", table("plain_p0.20.0"), "--json").json
    assert read["status"] == "loads"
    assert read["config"].get("base_model_name_or_path") == name
    norms = {module["path"]: module["norm"] for module in read["modules"]}
    assert norms == pytest.approx({path: delta.norm().item() for path, delta in deltas.items()})


def test_says_in_words_what_it_wrote(run: Any, tmp_path: Path) -> None:
    mlx_adapter(tmp_path / "mlx")
    done = run("convert", tmp_path / "mlx", tmp_path / "peft")
    assert done.code == 0
    assert "mlx-lm" in done.out
    assert str(tmp_path / "peft") in done.out


def test_the_base_is_handed_on(run: Any, table: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "torchtune", tmp_path / "peft"
    source.mkdir()
    tensors = {
        "layers.0.attn.q_proj.lora_a.weight": torch.ones(4, 32),
        "layers.0.attn.q_proj.lora_b.weight": torch.ones(32, 4),
    }
    torch.save(tensors, source / "adapter_model.pt")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (source / "adapter_config.json").write_text(json.dumps(config))
    assert run("convert", source, target).code == 1
    base = str(table("plain_p0.20.0")).replace(".modules.json", ".json")
    assert run("convert", source, target, "--base", base).code == 0
    assert run("inspect", target, "--base", base).code == 0


def test_what_it_does_not_know_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run("convert", tmp_path / "empty", tmp_path / "peft", "--json")
    assert (done.code, done.json["refusal"]["by"]) == (1, "converter")
    assert not (tmp_path / "peft").exists()
    assert run("convert", tmp_path / "empty", tmp_path / "peft").err.startswith("refused by the ")


def test_a_module_called_as_a_wrapper_is_refused_by_name(run: Any, tmp_path: Path) -> None:
    source = tmp_path / "mlx"
    mlx_adapter(source)
    tensors = {"module.x.lora_a": torch.randn(16, 4), "module.x.lora_b": torch.randn(4, 16)}
    save_file(tensors, source / "adapters.safetensors")
    done = run("convert", source, tmp_path / "peft", "--json")
    assert done.code == 1
    assert "module.x" in done.json["refusal"]["where"]
    assert not (tmp_path / "peft").exists()
