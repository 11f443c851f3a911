"""Files made to break a reader: each is refused with our own error, before it costs anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import ReadOptions, read_checkpoint
from adaptercache.errors import AdapterCacheError, AdapterInvalid, AdapterUnsupported, LoadFailed

BASE = BaseModel({"q_proj": BaseModule("linear", (4, 4))})
A, B = "q_proj.lora_A.weight", "q_proj.lora_B.weight"
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    A: {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]},
    B: {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]},
}
DATA = torch.arange(8.0).numpy().tobytes()
CONFIG = b'{"r": 1, "lora_alpha": 1}'


def adapter(
    folder: Path, header: object = HEADER, data: bytes = DATA, config: bytes = CONFIG
) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    weights = len(text).to_bytes(8, "little") + text + data
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_bytes(config)
    return folder


def changed(name: str, **fields: object) -> dict[str, Any]:
    return {**HEADER, name: {**HEADER[name], **fields}}


def test_the_plain_file_loads(tmp_path: Path) -> None:
    delta = read_checkpoint(adapter(tmp_path), BASE).delta("q_proj")
    assert torch.equal(delta, torch.outer(torch.arange(4.0, 8.0), torch.arange(4.0)))


def test_a_tensor_at_an_odd_byte_loads(tmp_path: Path) -> None:
    padding = {"q_proj.base_layer.weight": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    moved = {
        A: {**HEADER[A], "data_offsets": [1, 17]},
        B: {**HEADER[B], "data_offsets": [17, 33]},
    }
    with pytest.raises(AdapterInvalid, match="copy"):  # read, and then refused for its shape
        read_checkpoint(adapter(tmp_path, {**padding, **moved}, b"\0" + DATA), BASE)


@pytest.mark.parametrize(
    "header",
    [
        changed(A, data_offsets=[0, 32]),
        changed(A, data_offsets=[16, 0]),
        changed(A, data_offsets=[-16, 0]),
        changed(A, data_offsets=[0, 1 << 62]),
        changed(A, data_offsets=[0.0, 16.0]),
        changed(A, data_offsets=[0]),
        changed(A, data_offsets=None),
        changed(B, data_offsets=[0, 16]),
        changed(B, data_offsets=[20, 36]),
        changed(A, shape=[1 << 40, 1 << 40]),
        changed(A, shape=[-1, -4]),
        changed(A, shape=[True, 4]),
        changed(A, shape=[1] * 99 + [4]),
        changed(A, shape="14"),
        changed(A, dtype="F31"),
        changed(A, dtype="F64"),
        changed(A, dtype=["F32"]),
        {**HEADER, A: []},
        {A: HEADER[A]},
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        json.dumps(HEADER).encode().replace(B.encode(), A.encode()),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.safetensors"):
        read_checkpoint(adapter(tmp_path, header), BASE)


@pytest.mark.parametrize(
    ("data", "what"),
    [(DATA[:-1], "is truncated"), (DATA + b"\0", "has bytes to spare"), (b"", "is truncated")],
)
def test_missing_and_surplus_data_are_refused(tmp_path: Path, data: bytes, what: str) -> None:
    with pytest.raises(AdapterInvalid, match=what):
        read_checkpoint(adapter(tmp_path, data=data), BASE)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\0" * 8, b"<?xml", b"PK\3\4"])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (adapter(tmp_path) / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterInvalid, match="safetensors"):
        read_checkpoint(tmp_path, BASE)


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[]",
        b"null",
        b"\xef\xbb\xbf" + CONFIG,
        CONFIG[:-1],
        b'{"r": 1, "lora_alpha": NaN}',
        b'{"r": 1, "lora_alpha": Infinity}',
        b'{"r": 1, "lora_alpha": 1e999}',
        b'{"r": 1, "lora_alpha": 1, "lora_alpha": 2}',
        b'{"r": ' + b"9" * 10_000 + b', "lora_alpha": 1}',
        b'{"r": 1, "lora_alpha": 1, "x": ' + b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_broken_config_is_refused(tmp_path: Path, config: bytes) -> None:
    with pytest.raises(AdapterInvalid):
        read_checkpoint(adapter(tmp_path, config=config), BASE)


def test_a_config_without_end_is_not_read(tmp_path: Path) -> None:
    with (adapter(tmp_path) / "adapter_config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(AdapterInvalid, match="too large"):
        read_checkpoint(tmp_path, BASE)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid, match="nowhere"):
        read_checkpoint(tmp_path / "nowhere", BASE)


def test_a_file_that_the_system_cannot_read_is_a_failed_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    adapter(tmp_path)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(LoadFailed, match="Permission denied"):
        read_checkpoint(tmp_path, BASE)


@pytest.mark.parametrize(
    ("name", "word"),
    [("adapters.safetensors", "MLX-LM"), ("pytorch_lora_weights.safetensors", "diffusers")],
)
def test_another_tools_files_are_recognised(tmp_path: Path, name: str, word: str) -> None:
    (adapter(tmp_path) / "adapter_model.safetensors").rename(tmp_path / name)
    with pytest.raises(AdapterUnsupported, match=word):
        read_checkpoint(tmp_path, BASE)


def test_added_tokens_are_refused(tmp_path: Path) -> None:
    (adapter(tmp_path) / "new_embeddings.safetensors").touch()
    with pytest.raises(AdapterUnsupported, match="added tokens"):
        read_checkpoint(tmp_path, BASE)


# Pickles.

ALLOW = ReadOptions(allow_pickle=True)


def pickled(folder: Path, content: object) -> Path:
    (adapter(folder) / "adapter_model.safetensors").unlink()
    torch.save(content, folder / "adapter_model.bin")
    return folder


def test_a_pickle_is_read_only_when_allowed(tmp_path: Path) -> None:
    pickled(tmp_path, {A: torch.ones(1, 4), B: torch.ones(4, 1)})
    with pytest.raises(AdapterUnsupported, match="allow_pickle"):
        read_checkpoint(tmp_path, BASE)
    assert torch.equal(
        read_checkpoint(tmp_path, BASE, options=ALLOW).delta("q_proj"), torch.ones(4, 4)
    )


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("content", [[], {A: 1}, {1: torch.ones(1)}, {A: Bomb()}, Bomb()])
def test_a_pickle_never_runs_and_holds_tensors_or_is_refused(
    tmp_path: Path, content: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterInvalid, match="pickle"):
        read_checkpoint(pickled(tmp_path, content), BASE, options=ALLOW)
    assert not Path("exploded").exists()


def test_a_broken_pickle_is_refused(tmp_path: Path) -> None:
    (pickled(tmp_path, {}) / "adapter_model.bin").write_bytes(b"\x80\x04garbage")
    with pytest.raises(AdapterInvalid, match="pickle"):
        read_checkpoint(tmp_path, BASE, options=ALLOW)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(1 << 30, 4),  # a few bytes that pose as 16 GiB
        torch.ones(4, 4).to_sparse(),
        torch.ones(4, 4, device="meta"),
    ],
    ids=["expanded", "sparse", "meta"],
)
def test_a_pickled_tensor_without_its_own_elements_is_refused(
    tmp_path: Path, tensor: torch.Tensor
) -> None:
    content = {A: tensor, B: torch.ones(4, 1)}
    with pytest.raises(AdapterInvalid, match=r"dense tensors|larger than its file"):
        read_checkpoint(pickled(tmp_path, content), BASE, options=ALLOW)


# Whatever is changed, only our errors come out.


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@given(data=st.data())
def test_damage_raises_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = adapter(tmp_path_factory.mktemp("adapter"))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(AdapterCacheError):
        read_checkpoint(folder, BASE).delta("q_proj")
