"""LoRA of experts that the base stacks, under names that only look like theirs: it broke torch,
landed on expert 0, or was added to another one of the same expert."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_files import COLUMN, ROW, Entry, floats, write_adapter

from adaptercache import AdapterInvalid, AdapterUnsupported
from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import read_checkpoint
from adaptercache.checkpoint.fused import Piece, assemble
from adaptercache.checkpoint.weights import LoraWeights


def base_of(*shape: int) -> BaseModel:
    return BaseModel({"m.experts.gate_up_proj": BaseModule("parameter", shape)})


def expert(path: str, a: Entry = ROW, b: Entry = COLUMN) -> dict[str, Entry]:
    return {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}


@pytest.mark.parametrize("shape", [(3, 8, 4), (3, 8, 8)])
def test_a_matrix_without_an_expert_has_no_place(tmp_path: Path, shape: tuple[int, ...]) -> None:
    wide: Entry = ("F32", [1, 8], floats(*range(8)))
    folder = write_adapter(tmp_path, expert("m.experts.gate_proj", a=wide))
    with pytest.raises(AdapterInvalid, match="no tensor of the adapter belongs"):
        read_checkpoint(folder, base_of(*shape))


@pytest.mark.parametrize("number", ["01", "\u0661", "\uff11", "+1", "1_0", ""])
def test_an_expert_has_one_number(tmp_path: Path, number: str) -> None:
    tensors = expert("m.experts.1.gate_proj") | expert(f"m.experts.{number}.gate_proj")
    with pytest.raises(AdapterInvalid, match="no module for a part"):
        read_checkpoint(write_adapter(tmp_path, tensors), base_of(3, 8, 4))


def test_one_place_takes_one_part() -> None:
    from torch import ones

    part = Piece("m.experts.gate_up_proj", LoraWeights(ones(1, 4), ones(4, 1), 1.0, 1), 0, 1)
    with pytest.raises(AdapterInvalid, match="twice"):
        assemble([part, part], base_of(3, 8, 4))


def test_one_expert_of_a_high_rank_does_not_fill_the_memory(tmp_path: Path) -> None:
    rank, hidden = 4096, 64
    a: Entry = ("F16", [rank, hidden], b"\0" * 2 * rank * hidden)
    b: Entry = ("F16", [32, rank], b"\0" * 2 * rank * 32)
    tensors = expert("m.experts.7.gate_proj", a, b)
    folder = write_adapter(tmp_path, tensors, {"r": rank, "lora_alpha": 1})
    with pytest.raises(AdapterUnsupported, match="once joined"):
        read_checkpoint(folder, base_of(4096, 64, hidden))
    assert read_checkpoint(folder, base_of(16, 64, hidden)).max_rank == rank
