"""A peer's own Triton LoRA kernels on the cases of bench_kernels.py.

Written against the public functions of vLLM 0.33.0 (``vllm.lora.ops.triton_ops``) and SGLang 0.5.23
(``sglang.kernels.ops.lora.dense``, of both its backends: csgmv, the default, and triton). Both run
as they come: default tiles, no tuned tables, metadata made beforehand, as many slots as adapters.
The calls and the check were run on a CPU, in Triton's interpreter, at small sizes; the CUDA graph
and the times were not run with either package installed.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Protocol

import torch
from torch import Tensor

import record
from kernel_cases import SHAPES, Case
from kernel_world import CHECKED_ROWS, _layers, _times  # the same rotation, the same clock

WRITTEN_AGAINST = {"vllm": "0.33.0", "sglang": "0.5.23"}
DEVICE = "cuda"
MAX_WEIGHTS = 40 << 30  # bytes
ERROR = 0.1  # largest, over the term's RMS: they round more often; a wrong adapter is beyond 1
CHUNK = 16  # rows of a csgmv segment: the server's default


@dataclass(frozen=True, slots=True)
class Weights:
    """A layer's adapters as the peer stacks them: vLLM a tensor a module, SGLang one for all."""

    a: list[Tensor]  # [slots, rank, k]
    b: list[Tensor]  # [slots, n, rank]


Call = Callable[[Tensor, Tensor, Weights], None]  # y, x: one layer


class Peer(Protocol):
    def prepare(self, case: Case, slots: int) -> dict[str, Call]:
        """Its ways to do a layer, by name, with the batch's metadata made."""

    def weights(self, case: Case, slots: int) -> Weights: ...

    def dense(
        self, weights: Weights, case: Case, slot: int, module: int
    ) -> tuple[Tensor, Tensor]: ...


class Vllm:
    """One pair of launches, and the zeroing in ``lora_shrink``, for all modules of a layer."""

    def __init__(self) -> None:
        ops = import_module("vllm.lora.ops.triton_ops")
        self.meta, self.shrink, self.expand = ops.LoRAKernelMeta, ops.lora_shrink, ops.lora_expand
        utils = import_module("vllm.lora.ops.triton_ops.utils")
        self.tables = (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT)

    def prepare(self, case: Case, slots: int) -> dict[str, Call]:
        for table in self.tables:  # by address alone, never dropped: they would outlive a case
            table.clear()
        meta = self.meta.make(slots, case.tokens, DEVICE)
        meta.prepare_tensors(torch.tensor(_slot_of_rows(case), device=DEVICE))
        args = meta.meta_args(case.tokens, False)  # a grid for every slot: the default

        def call(y: Tensor, x: Tensor, weights: Weights) -> None:
            size = (len(weights.a), case.tokens, case.max_rank)
            h = torch.empty(size, dtype=torch.float32, device=DEVICE)  # a layer's own, as theirs
            self.shrink(x, weights.a, h, *args, 1.0)
            self.expand(h, weights.b, y, *args, offset_start=0, add_inputs=True)

        return {"triton": call}

    def weights(self, case: Case, slots: int) -> Weights:
        shape, rank = SHAPES[case.shape], case.max_rank
        ranks = torch.tensor([case.rank_of(slot) for slot in range(slots)], device=DEVICE)
        own = torch.arange(rank, device=DEVICE) < ranks[:, None]  # the rest of a slot is zero
        a = [_random(slots, rank, shape.k).mul_(own[:, :, None]) for _ in shape.widths]
        return Weights(a, [_random(slots, n, rank).mul_(own[:, None]) for n in shape.widths])

    def dense(self, weights: Weights, case: Case, slot: int, module: int) -> tuple[Tensor, Tensor]:
        return weights.a[module][slot], weights.b[module][slot]


class Sglang:
    """Both backends; slices are stacked, those of A by the adapter's own rank."""

    def __init__(self) -> None:
        # Its own cache of compiled kernels leaves the rank out of the key: wrong for two ranks.
        os.environ["SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE"] = "0"
        self.batch_info = import_module("sglang.srt.lora.utils").LoRABatchInfo
        self.ops: dict[str, Callable[..., Tensor]] = {}
        for module, name in (
            ("chunked_sgmv_shrink", "chunked_sgmv_lora_shrink_forward"),
            ("chunked_sgmv_expand", "chunked_sgmv_lora_expand_forward"),
            ("sgemm_lora_a", "sgemm_lora_a_fwd"),
            ("sgemm_lora_b", "sgemm_lora_b_fwd"),
            ("qkv_lora_b", "qkv_lora_b_fwd"),
            ("gate_up_lora_b", "gate_up_lora_b_fwd"),
        ):
            self.ops[module] = getattr(import_module(f"sglang.kernels.ops.lora.dense.{module}"), name)

    def prepare(self, case: Case, slots: int) -> dict[str, Call]:
        widths, ops = SHAPES[case.shape].widths, self.ops
        offsets_cpu = torch.tensor([0, *itertools.accumulate(widths)], dtype=torch.int32)
        offsets = offsets_cpu.to(DEVICE)
        rows = _slot_of_rows(case)
        counts = [(slot, rows.count(slot)) for slot in sorted(set(rows))]
        chunks = [(s, min(CHUNK, n - i)) for s, n in counts for i in range(0, n, CHUNK)]
        chunked = self._info(case, slots, chunks, CHUNK, in_order=False)
        if case.phase == "decode":  # a segment a slot, the empty ones too
            every = [(slot, rows.count(slot)) for slot in range(slots)]
            grouped = self._info(case, slots, every, case.tokens, in_order=False)
        else:
            runs = case.segments()
            grouped = self._info(case, slots, runs, max(n for _, n in runs), in_order=True)

        def csgmv(y: Tensor, x: Tensor, weights: Weights) -> None:
            h = ops["chunked_sgmv_shrink"](x, weights.a[0], chunked, len(widths))
            b, widest = weights.b[0], max(widths)
            ops["chunked_sgmv_expand"](h, b, chunked, offsets, widest, y, offsets_cpu)

        def triton(y: Tensor, x: Tensor, weights: Weights) -> None:
            h = ops["sgemm_lora_a"](x, weights.a[0], grouped, stack_num=len(widths))
            if len(widths) == 3:
                ops["qkv_lora_b"](h, weights.b[0], grouped, offsets, max(widths), y)
            elif len(widths) == 2:
                ops["gate_up_lora_b"](h, weights.b[0], grouped, widths[0], y)
            else:
                ops["sgemm_lora_b"](h, weights.b[0], grouped, y)

        return {"csgmv": csgmv, "triton": triton}

    def _info(
        self, case: Case, slots: int, parts: list[tuple[int, int]], longest: int, *, in_order: bool
    ) -> Any:
        """``LoRABatchInfo`` of ``parts``, ``(slot, tokens)`` of rows in order or sorted by slot."""

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        rows = _slot_of_rows(case)
        order = sorted(range(len(rows)), key=rows.__getitem__)
        return self.batch_info(
            use_cuda_graph=False,  # a grid of these segments, not of the largest batch's
            bs=len(parts),
            num_segments=len(parts),
            seg_indptr=ints([0, *itertools.accumulate(n for _, n in parts)]),
            weight_indices=ints([slot for slot, _ in parts]),
            lora_ranks=ints([case.rank_of(slot) for slot in range(slots)]),
            scalings=torch.ones(slots, device=DEVICE),
            max_len=longest,
            seg_lens=ints([n for _, n in parts]),
            permutation=None if in_order else ints(order),
        )

    def weights(self, case: Case, slots: int) -> Weights:
        shape, rank = SHAPES[case.shape], case.max_rank
        a = _random(slots, len(shape.widths) * rank, shape.k)
        return Weights([a], [_random(slots, sum(shape.widths), rank)])

    def dense(self, weights: Weights, case: Case, slot: int, module: int) -> tuple[Tensor, Tensor]:
        rank, widths = case.rank_of(slot), SHAPES[case.shape].widths
        first = sum(widths[:module])
        a = weights.a[0][slot, module * rank : (module + 1) * rank]
        return a, weights.b[0][slot, first : first + widths[module], :rank]


def measure_peer(peer: str, cases: list[Case]) -> None:
    """A line a case, and ``kernels_<peer>.json``; ``us`` is of the faster of its backends."""
    makers: dict[str, Callable[[], Peer]] = {"vllm": Vllm, "sglang": Sglang}
    try:
        kernels, version = makers[peer](), metadata.version(peer)
    except (ImportError, AttributeError) as error:
        wanted = f"{peer}=={WRITTEN_AGAINST[peer]}"
        raise SystemExit(f"--peer {peer} needs {wanted}, as it was written for: {error}") from error
    print(f"# {peer} {version}; written against {WRITTEN_AGAINST[peer]}")
    found = {}
    for case in cases:
        figures = _measure(kernels, case)
        us, floor_us = min(figures.values()), round(case.floor_us, 3)
        each = {f"{name}_us": us for name, us in figures.items()}
        print(f"{case.name:46} {us:8.2f} us  floor {floor_us:7.2f}  {each}", flush=True)
        found[case.name] = {"us": us, "floor_us": floor_us, **each, "version": version}
    print("written:", record.write(f"kernels_{peer}", found, on_gpu=True))


def _measure(peer: Peer, case: Case) -> dict[str, float]:
    """µs a layer, medians: each is checked as its graph runs it, then timed."""
    shape = SHAPES[case.shape]
    slots = case.num_adapters if case.slots == 128 else case.slots  # 128: the case asks for none
    calls = peer.prepare(case, slots)
    torch.cuda.empty_cache()
    weights = [peer.weights(case, slots)]
    size = sum(tensor.nbytes for tensor in (*weights[0].a, *weights[0].b))
    layers = max(2, min(_layers(case), MAX_WEIGHTS // size))
    weights += [peer.weights(case, slots) for _ in range(layers - 1)]
    x = _random(layers, case.tokens, shape.k)
    y = torch.zeros(layers, case.tokens, sum(shape.widths), dtype=torch.bfloat16, device=DEVICE)
    figures = {}
    for name, call in calls.items():

        def step(call: Call = call) -> None:
            for layer in range(layers):
                call(y[layer], x[layer], weights[layer])

        step()  # compiles; and vLLM's tables of pointers go to the GPU, which no graph can do
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        y.zero_()
        graph.replay()
        error = max(_error(peer, case, weights[i], x[i], y[i]) for i in (0, layers - 1))
        if not error <= ERROR:
            raise AssertionError(f"{case.name}: {name}'s error {error}")
        figures[name] = round(statistics.median(_times(graph.replay, layers, 12, is_graph=True)), 3)
    return figures


def _error(peer: Peer, case: Case, weights: Weights, x: Tensor, y: Tensor) -> float:
    """Of some rows, against float64: the largest, over the term's RMS."""
    slots, worst, first = _slot_of_rows(case), 0.0, 0
    rows = sorted({i * (case.tokens - 1) // (CHECKED_ROWS - 1) for i in range(CHECKED_ROWS)})
    for module, width in enumerate(SHAPES[case.shape].widths):
        got = y[rows, first : first + width].double()
        want = torch.zeros_like(got)
        for i, row in enumerate(rows):
            a, b = peer.dense(weights, case, slots[row], module)
            want[i] = b.double() @ (a.double() @ x[row].double())
        worst = max(worst, float((got - want).abs().max() / want.square().mean().sqrt()))
        first += width
    return worst


def _slot_of_rows(case: Case) -> list[int]:
    return [slot for slot, tokens in case.segments() for _ in range(tokens)]


def _random(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE).mul_(0.05)
