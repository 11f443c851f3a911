"""Kernels that start before the one ahead has ended read nothing of it too early.

Strangers write x and y: they let the next kernel start at once, and take long. Eight calls share
one scratch. Whatever is read too soon is of the replay before, and differs. Of a module that the
adapters lack, kernels find nothing to do, but those behind them still have to wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = triton.language

from adaptercache.kernels import LoraBatch, LoraStack, add_lora  # noqa: E402

pytestmark = pytest.mark.gpu
CALLS, REPLAYS = 8, 1000


@triton.jit
def slow_copy(source, target, numel, spins, BLOCK: tl.constexpr):
    """Copy, after a while in which the next kernel is already let in."""
    tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    value = tl.load(source + i, mask=i < numel)
    x = value.to(tl.float32)
    for _ in range(spins):
        x = x * 1.0000001 + 1e-9
    # Never true, and the compiler doesn't know.
    value = tl.where(x == 12345.0, x.to(value.dtype), value)
    tl.store(target + i, value, mask=i < numel)


def produce(source: Tensor, target: Tensor, spins: int) -> None:
    block = 1024
    grid = (triton.cdiv(source.numel(), block),)
    slow_copy[grid](source, target, source.numel(), spins, BLOCK=block, launch_pdl=True)


@pytest.mark.parametrize("after_nothing", [False, True], ids=["", "after a module that is lacking"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [64, 600], ids=["few", "many"])
def test_producers_that_let_the_next_kernel_in_early_are_waited_for(
    rows: int, dtype: torch.dtype, after_nothing: bool
) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    assert os.environ.get("TRITON_INTERPRET") != "1"
    torch.manual_seed(0)
    k, n, slots = 1024, 512, 6
    like = {"dtype": dtype, "device": "cuda"}
    stack = LoraStack.from_dense(
        {
            (layer, module): (
                torch.randn(slots, rank, k, **like),
                torch.randn(slots, n, rank, **like),
                [1.0 + slot for slot in range(slots)],
            )
            for layer in range(CALLS)
            for module, rank in (("k_proj", 0), ("o_proj", 16))
        }
    )
    segments = [(row % slots, 1) for row in range(rows - 40)] + [(2, 40)]
    batch = LoraBatch(stack, segments)
    sources = torch.randn(2, CALLS, rows, k, **like)  # replays take turns
    starts = torch.randn(2, CALLS, rows, n, **like)
    source, start = sources[0].clone(), starts[0].clone()
    x, y = torch.empty_like(source), torch.empty_like(start)
    untouched = torch.zeros(rows, n, **like)

    def step(write: Callable[[Tensor, Tensor, int], None]) -> None:
        for call in range(CALLS):
            write(source[call], x[call], 3000)
            write(start[call], y[call], 3000)
            if after_nothing:
                add_lora(untouched, x[call], batch, ["k_proj"], call)
            add_lora(y[call], x[call], batch, ["o_proj"], call)

    wanted = []
    for turn in range(2):
        source.copy_(sources[turn])
        start.copy_(starts[turn])
        step(lambda a, b, _: torch.cuda.synchronize() or b.copy_(a))
        torch.cuda.synchronize()
        wanted.append(y.clone())
    step(produce)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(produce)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(REPLAYS):
        source.copy_(sources[replay % 2])
        start.copy_(starts[replay % 2])
        graph.replay()
        wrong += (y != wanted[replay % 2]).sum()
    assert int(wrong) == 0
    assert not untouched.any()
