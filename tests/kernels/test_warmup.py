"""After warmup, nothing is compiled: not in a step, and not by a second process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from adaptercache.kernels import LoraStack, variants, warmup
from adaptercache.testing import any_device


def stack(slots: int = 2, rank: int = 8) -> LoraStack:
    widths = {"q_proj": (256, 256), "k_proj": (256, 128), "o_proj": (256, 256)}
    dtype = torch.bfloat16
    return LoraStack.from_dense(
        {
            (0, module): (
                torch.randn(slots, rank, k, dtype=dtype, device=any_device()),
                torch.randn(slots, n, rank, dtype=dtype, device=any_device()),
                [1.0] * slots,
            )
            for module, (k, n) in widths.items()
        }
    )


@pytest.mark.parametrize("groups", [[("nothing",)], [("q_proj", "nothing")]], ids=str)
def test_a_module_that_there_is_not_is_refused(groups: list[tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="no module 'nothing'"):
        warmup(stack(), groups)


def test_modules_of_different_inputs_are_no_group() -> None:
    a, b = torch.randn(1, 4, 32), torch.randn(1, 16, 4)
    other = LoraStack.from_dense(
        {(0, "q_proj"): (a, b, [1.0]), (0, "down_proj"): (a[:, :, :16], b, [1.0])}
    )
    with pytest.raises(ValueError, match="differ in width"):
        warmup(other, [("q_proj", "down_proj")])


def test_layers_may_lack_modules() -> None:
    a, b = torch.randn(1, 4, 32), torch.randn(1, 16, 4)
    warmup(LoraStack.from_dense({(0, "q_proj"): (a, b, [1.0]), (1, "o_proj"): (a, b, [1.0])}))


@pytest.mark.parametrize(
    ("max_rank", "few", "many"),
    [(16, {16}, {16}), (17, {16, 64}, {16, 32, 64}), (65, {16, 64, 128}, {16, 32, 64, 128})],
)
def test_prefill_has_kernels_for_rank_32_too(
    max_rank: int, few: set[int], many: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    its = stack(rank=max_rank)
    compiled, reserved = [], []

    def compile_group(of: LoraStack, k: int, widths: Any, rank: int, rows: int) -> None:
        compiled.append((rank, rows))
        needed.append([rows * each for each in variants.scratch_of(of, k, widths, rank, rows)])

    needed: list[list[int]] = []
    monkeypatch.setattr(variants, "compile_group", compile_group)
    monkeypatch.setattr(its, "scratch", lambda *numels: reserved.append(numels))
    monkeypatch.setattr(its, "device", torch.device("cuda"))
    warmup(its, [("q_proj", "k_proj")], num_rows=5000)
    assert {rank for rank, rows in compiled if rows <= 512} == few
    for rows in (2048, 5000):
        assert {rank for rank, each in compiled if each == rows} == many
    assert reserved == [tuple(max(column) for column in zip(*needed, strict=True))]


PROGRAM = """
import sys
import torch
import triton
from adaptercache.kernels import LoraBatch, add_lora, warmup
from test_warmup import stack

compiled = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: cache_hit or compiled.append(1)
stack = stack(rank=int(sys.argv[1]))
warmup(stack, num_rows=1024)
print(len(compiled), "compiled by warmup")
compiled.clear()
for rows in (1, 7, 64, 512, 513, 1024):
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros(rows, 384, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    batch = LoraBatch(stack, [(0, rows // 2), (1, rows - rows // 2)])
    for _ in range(2):
        add_lora(y, x, batch, ["q_proj", "k_proj"], 0)
        add_lora(y[:, :256], x, batch, ["o_proj"], 0)
    batch = LoraBatch(stack, [], pad_to=rows)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        add_lora(y, x, batch, ["q_proj", "k_proj"], 0)
print(len(compiled), "compiled by steps")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 24])
def test_steps_and_a_second_process_compile_nothing(tmp_path: Path, rank: int) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(Path(__file__).parent)])

    def lines() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(rank)],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, steps = lines()
    assert int(first.split()[0]) > 0
    assert steps == "0 compiled by steps"
    assert lines() == ["0 compiled by warmup", "0 compiled by steps"]
