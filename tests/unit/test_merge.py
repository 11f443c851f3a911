"""Merging: what is refused, what stays as it was, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import Checkpoint, checkpoint_from_tensors
from adaptercache.errors import AdapterInvalid, AdapterUnsupported
from adaptercache.merge import base_of_files, merge

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 10,
}
Q, OUT = (f"model.layers.0.self_attn.{name}" for name in ("q_proj", "o_proj"))
BASE = BaseModel.from_config(CONFIG)


def adapter(*paths: str, base: BaseModel = BASE) -> Checkpoint:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for path in paths:
        outputs, inputs = base.modules[path].shape
        tensors[f"{path}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator)
    return checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 4}, base)


def state_dict(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {
        f"{path}.weight": torch.randn(module.shape, generator=generator).to(dtype)
        for path, module in BASE.modules.items()
    }
    return found | {"model.norm.weight": torch.ones(8, dtype=dtype)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of three files, one tensor of which is of no float, beside an adapter's files."""
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = state_dict() | {"extra.table": torch.arange(5)}
    names = sorted(tensors)
    places = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        mine = {name: tensors[name] for name in names[part::3]}
        save_file(mine, folder / file, metadata={"format": "pt", "part": str(part)})
        places |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.model").write_bytes(b"\0\1")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    return folder


def everything(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_files_become_what_a_state_dict_becomes(model: Path, tmp_path: Path) -> None:
    checkpoint = adapter(Q, OUT)
    assert merge(checkpoint, model, tmp_path / "merged") == tmp_path / "merged"
    wanted = merge(checkpoint, state_dict())
    got = everything(tmp_path / "merged")
    assert got.pop("extra.table").tolist() == [0, 1, 2, 3, 4]
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    gone = {"adapter_config.json", "pytorch_model.bin"}
    assert names == {file.name for file in model.iterdir()} - gone
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_folders_beside_the_files_come_along_without_weights(model: Path, tmp_path: Path) -> None:
    """Further chat templates are kept in one."""
    for name in ("additional_chat_templates/tools.jinja", "original/consolidated.00.pth", ".git/x"):
        (model / name).parent.mkdir()
        (model / name).write_text(name)
    (model / "original/params.json").write_text("{}")
    merge(adapter(Q), model, tmp_path / "merged")
    found = {
        str(path.relative_to(tmp_path / "merged"))
        for path in (tmp_path / "merged").rglob("*")
        if path.is_file() and path.parent != tmp_path / "merged"
    }
    assert found == {"additional_chat_templates/tools.jinja", "original/params.json"}


def test_the_sum_is_made_in_float32_and_rounded_once() -> None:
    checkpoint, base = adapter(Q), state_dict()
    wanted = (base[f"{Q}.weight"].float() + checkpoint.delta(Q)).to(torch.bfloat16)
    merged = merge(checkpoint, base)
    assert torch.equal(merged[f"{Q}.weight"], wanted)
    assert not torch.equal(base[f"{Q}.weight"], wanted), "the base is as it was"


def test_one_file_without_an_index(tmp_path: Path) -> None:
    save_file(state_dict(), tmp_path / "model.safetensors")
    merge(adapter(Q), tmp_path / "model.safetensors", tmp_path / "merged")
    got = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(got[f"{Q}.weight"], merge(adapter(Q), state_dict())[f"{Q}.weight"])


def test_the_table_of_the_files_is_that_of_the_config(model: Path) -> None:
    assert set(base_of_files(model).modules) == set(BASE.modules)


def test_a_weight_that_the_base_lacks_is_named() -> None:
    base = state_dict()
    del base[f"{OUT}.weight"]
    with pytest.raises(AdapterInvalid, match=OUT):
        merge(adapter(Q, OUT), base)


def test_a_weight_of_another_shape_is_named() -> None:
    with pytest.raises(AdapterInvalid, match=r"found: \(8, 9\); expected: \(8, 8\)"):
        merge(adapter(Q), state_dict() | {f"{Q}.weight": torch.zeros(8, 9)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_weight_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    base = state_dict() | {f"{Q}.weight": torch.zeros(8, 8).to(dtype)}
    with pytest.raises(AdapterUnsupported, match="quantised"):
        merge(adapter(Q), base)
    save_file(base, tmp_path / "model.safetensors")
    with pytest.raises(AdapterUnsupported, match="quantised"):
        merge(adapter(Q), tmp_path / "model.safetensors", tmp_path / "merged")
    merge(adapter(OUT), base)  # what the adapter leaves alone may be anything


def test_what_overflows_is_refused_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    huge = torch.full((8, 8), 6e4)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name == f"{Q}.weight":
                save_file(tensors | {name: huge.half()}, file)
    tensors = {f"{Q}.lora_A.weight": torch.full((2, 8), 50.0)}
    tensors[f"{Q}.lora_B.weight"] = torch.full((8, 2), 50.0)
    checkpoint = checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 4}, BASE)
    with pytest.raises(AdapterInvalid, match="not finite"):
        merge(checkpoint, model, tmp_path / "merged")
    assert [file.name for file in tmp_path.iterdir()] == ["base"]


def test_an_output_that_exists_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    with pytest.raises(FileExistsError):
        merge(adapter(Q), model, tmp_path / "merged")
    with pytest.raises(TypeError, match="output"):
        merge(adapter(Q), model)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x05" + bytes(7) + b'{"a":']
)
def test_broken_files_of_the_base_are_said_to_be_that(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(AdapterInvalid, match="base model's files are broken"):
        merge(adapter(Q), tmp_path, tmp_path / "merged")


def test_an_index_leads_nowhere_else(model: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"x.weight": "../secret.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AdapterInvalid, match="secret"):
        merge(adapter(Q), model, tmp_path / "merged")


def test_a_base_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(AdapterInvalid, match="save the base model as safetensors"):
        merge(adapter(Q), tmp_path, tmp_path / "merged")


def test_weights_that_share_memory_are_refused_unless_they_change_alike() -> None:
    shared = torch.zeros(8, 8)
    other = "model.layers.1.self_attn.q_proj"
    base = state_dict(torch.float32) | {f"{Q}.weight": shared, f"{other}.weight": shared}
    with pytest.raises(AdapterUnsupported, match="shares its weight"):
        merge(adapter(Q), base)
    merged = merge(adapter(Q), base, untie=True)
    assert merged[f"{Q}.weight"].any()
    assert not merged[f"{other}.weight"].any()


def test_a_conv1d_is_stored_transposed() -> None:
    base = BaseModel({"h.0.attn.c_attn": BaseModule("conv1d", (12, 4))})
    checkpoint = adapter("h.0.attn.c_attn", base=base)
    merged = merge(checkpoint, {"h.0.attn.c_attn.weight": torch.zeros(4, 12)})
    assert torch.equal(merged["h.0.attn.c_attn.weight"], checkpoint.delta("h.0.attn.c_attn").T)


MEMORY = """
import resource, sys
from pathlib import Path
import torch
from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import checkpoint_from_tensors
from adaptercache.merge import merge
base = BaseModel({f"l.{n}": BaseModule("linear", (2048, 2048)) for n in range(12)})
tensors = {}
for path in base.modules:
    tensors[f"{path}.lora_A.weight"] = torch.ones(1, 2048)
    tensors[f"{path}.lora_B.weight"] = torch.ones(2048, 1)
checkpoint = checkpoint_from_tensors(tensors, {"r": 1, "lora_alpha": 1}, base)
checkpoint.delta("l.0")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge(checkpoint, Path(sys.argv[1]), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """A shard of 12 tensors of 16 MiB each takes what four of them do: one read, its ΔW, the sum
    in float32, and the result."""
    tensors = {f"l.{n}.weight": torch.zeros(2048, 2048) for n in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    args = [sys.executable, "-c", MEMORY, str(tmp_path / "model.safetensors"), str(tmp_path / "m")]
    done = subprocess.run(args, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5 * 16 << 10
