"""What has no place is not read; what is read is read once, straight to where it stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import A, B, write_adapter
from safetensors.torch import save_file

from adaptercache import AdapterInvalid, AdapterUnsupported, BaseModel, LoadFailed, ReadOptions
from adaptercache.base_model import BaseModule
from adaptercache.checkpoint import read_checkpoint
from adaptercache.checkpoint.safetensors_file import open_safetensors

CONFIG = {"r": 4, "lora_alpha": 8}


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of tensors, one entry a read."""
    found: list[int] = []
    preadv = os.preadv

    def count(handle: int, into: list[Any], offset: int) -> int:
        found.append(preadv(handle, into, offset))
        return found[-1]

    monkeypatch.setattr(os, "preadv", count)
    return found


def peak_bytes() -> int:
    """The largest amount of memory that this process had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def pair(module: str, width: int = 32, rank: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"{module}.lora_A.weight": torch.randn(rank, width),
        f"{module}.lora_B.weight": torch.randn(width, rank),
    }


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    return folder


def base_of(*modules: str) -> BaseModel:
    linear = {name: BaseModule("linear", (32, 32)) for name in modules}
    return BaseModel({**linear, "embed_tokens": BaseModule("embedding", (50_000, 512))})


def test_a_copy_of_the_base_takes_neither_time_nor_memory(
    tmp_path: Path, bytes_read: list[int]
) -> None:
    tensors = pair("layers.0.q_proj")
    copy = torch.ones(50_000, 512)  # 98 MiB
    save(tmp_path, {**tensors, "embed_tokens.base_layer.weight": copy})
    before = forget_peak()
    checkpoint = read_checkpoint(tmp_path, base_of("layers.0.q_proj"))
    assert sum(bytes_read) == sum(tensor.nbytes for tensor in tensors.values())
    assert peak_bytes() - before < copy.nbytes // 4
    assert [entry.name for entry in checkpoint.skipped] == ["embed_tokens.base_layer.weight"]


def test_of_a_multimodal_adapter_the_text_part_alone_is_read(
    tmp_path: Path, bytes_read: list[int]
) -> None:
    text, sight = pair("model.layers.0.q_proj"), pair("model.vision_tower.layers.0.q_proj")
    base, options = base_of("model.layers.0.q_proj"), ReadOptions(text_only=True)
    checkpoint = read_checkpoint(save(tmp_path, {**sight, **text}), base, options=options)
    assert sum(bytes_read) == sum(tensor.nbytes for tensor in text.values())
    want = (
        2.0
        * text["model.layers.0.q_proj.lora_B.weight"]
        @ text["model.layers.0.q_proj.lora_A.weight"]
    )
    assert torch.allclose(checkpoint.delta("model.layers.0.q_proj"), want)
    assert {entry.name for entry in checkpoint.skipped} == set(sight)


@pytest.mark.parametrize(
    "more",
    [
        {"lm_head.weight": torch.ones(4, 4)},
        {"layers.0.q_proj.lora_magnitude_vector": torch.ones(4)},
        {"layers.1.q_proj.lora_A.weight": torch.ones(4, 32)},
    ],
    ids=list,
)
def test_what_its_names_refuse_is_refused_before_anything_is_read(
    tmp_path: Path, bytes_read: list[int], more: dict[str, torch.Tensor]
) -> None:
    save(tmp_path, {**pair("layers.0.q_proj"), **more})
    with pytest.raises((AdapterInvalid, AdapterUnsupported)):
        read_checkpoint(tmp_path, base_of("layers.0.q_proj"))
    assert bytes_read == []


def test_memory_for_one_file_is_taken_once(tmp_path: Path, bytes_read: list[int]) -> None:
    names = [f"layers.{layer}.q_proj" for layer in range(8)]
    wide = {name: BaseModule("linear", (1 << 14, 1 << 14)) for name in names}
    save(tmp_path, {k: v for name in names for k, v in pair(name, 1 << 14, rank=4).items()})
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size > 4 << 20
    before = forget_peak()
    checkpoint = read_checkpoint(tmp_path, BaseModel(wide))
    assert peak_bytes() - before < 1.5 * size + (4 << 20)
    assert sum(bytes_read) == checkpoint.nbytes
    assert len(bytes_read) == 16


def test_a_tensor_is_a_view_of_what_was_read(tmp_path: Path, bytes_read: list[int]) -> None:
    write_adapter(tmp_path)
    with open_safetensors(tmp_path / "adapter_model.safetensors") as stored:
        assert {name: tuple(t.shape) for name, t in stored.outlines.items()} == {
            A: (1, 4),
            B: (4, 1),
        }
        assert all(outline.is_meta for outline in stored.outlines.values())
        assert bytes_read == []
        first = stored.read(A)
        assert stored.read(A) is first
        assert bytes_read == [16]
    assert first.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("sound", [True, False])
def test_a_file_that_is_written_to_meanwhile_is_a_failed_load_whatever_is_in_it(
    tmp_path: Path, sound: bool
) -> None:
    file = write_adapter(tmp_path) / "adapter_model.safetensors"

    def read() -> None:
        with open_safetensors(file):
            file.write_bytes(b"something else")
            if not sound:
                raise AdapterInvalid("it looks broken")

    with pytest.raises(LoadFailed, match="changed while it was read") as raised:
        read()
    assert isinstance(raised.value.__cause__, AdapterInvalid) is not sound


def test_a_file_that_is_cut_before_a_tensor_is_read_is_a_failed_load(tmp_path: Path) -> None:
    file = write_adapter(tmp_path) / "adapter_model.safetensors"

    def read() -> None:
        with open_safetensors(file) as stored:
            os.truncate(file, 150)
            stored.read_all()

    with pytest.raises(LoadFailed, match="changed while it was read"):
        read()
