"""A peer's own Triton LoRA kernels on the cases of bench_kernels.py.

Written against the public functions of vLLM 0.33.0 (``vllm.lora.ops.triton_ops``) and SGLang 0.5.23
(``sglang.kernels.ops.lora.dense``: its csgmv backend, the default, and its triton one), with their
default settings. Run so far: their calls and the check, of half precision and small sizes, in
Triton's interpreter. Not run: the packages as installed, the CUDA graphs, and so every time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from importlib import import_module, metadata
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

import record
from kernel_cases import SHAPES, Case
from kernel_world import CHECKED_ROWS, _layers, _times  # the same rotation, the same clock

WRITTEN_AGAINST = {"vllm": "vllm 0.33.0", "sglang": "sglang 0.5.23"}
DEVICE = "cuda"
MAX_BYTES = 40 << 30  # of weights
ERROR = 0.1  # largest, over the term's RMS: peers round more often; a wrong adapter is beyond 1
CHUNK = 16  # rows of a csgmv segment: the server's default

Stacks: TypeAlias = list[Tensor]  # of A, [slots, rank, k], or of B, [slots, n, rank]
Call: TypeAlias = Callable[[Tensor, Tensor, Stacks, Stacks], None]  # one layer: y, x, A, B


class Vllm:
    """A list of stacks, one a module: ``lora_shrink``, which zeroes first, and ``lora_expand``."""

    def __init__(self) -> None:
        ops = self.ops = import_module("vllm.lora.ops.triton_ops")
        self.tables = (ops.utils._LORA_A_PTR_DICT, ops.utils._LORA_B_PTR_DICT)

    def prepare(self, case: Case, slots: int) -> dict[str, Call]:
        """The batch's metadata, made; and what does a layer with it."""
        for table in self.tables:  # they go by address alone, and keep the last case's weights
            table.clear()
        meta = self.ops.LoRAKernelMeta.make(slots, case.tokens, DEVICE)
        meta.prepare_tensors(torch.tensor(_slot_of_rows(case), device=DEVICE))
        args = meta.meta_args(case.tokens, False)  # a grid for all slots: the default

        def triton(y: Tensor, x: Tensor, a: Stacks, b: Stacks) -> None:
            h = torch.empty(len(a), case.tokens, case.max_rank, dtype=torch.float32, device=DEVICE)
            self.ops.lora_shrink(x, a, h, *args, 1.0)
            self.ops.lora_expand(h, b, y, *args, offset_start=0, add_inputs=True)

        return {"triton": triton}

    def pack(self, case: Case, a: Stacks, b: Stacks) -> tuple[Stacks, Stacks]:
        return a, b


class Sglang:
    """One stack for all modules: the slices of A follow each other by the adapter's own rank."""

    def __init__(self) -> None:
        # Its own cache of compiled kernels leaves the rank out of the key: one rank a process.
        os.environ["SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE"] = "0"
        self.info = import_module("sglang.srt.lora.utils").LoRABatchInfo
        base = "sglang.kernels.ops.lora.dense."
        self.shrink = import_module(base + "chunked_sgmv_shrink").chunked_sgmv_lora_shrink_forward
        self.expand = import_module(base + "chunked_sgmv_expand").chunked_sgmv_lora_expand_forward
        self.a = import_module(base + "sgemm_lora_a").sgemm_lora_a_fwd
        names = ("sgemm_lora_b", "gate_up_lora_b", "qkv_lora_b")  # of 1, 2, and 3 modules
        self.b = [getattr(import_module(base + name), f"{name}_fwd") for name in names]

    def prepare(self, case: Case, slots: int) -> dict[str, Call]:
        """The batch's metadata, made; and what does a layer with it, in each backend."""
        widths, rows = SHAPES[case.shape].widths, _slot_of_rows(case)
        offsets = _ints([0, *accumulate(widths)])
        modules, widest, on_cpu = len(widths), max(widths), offsets.cpu()

        def info(parts: list[tuple[int, int]], most: int, order: Tensor | None) -> Any:
            return self.info(
                use_cuda_graph=False,  # the grid is of these segments, not of the largest batch's
                bs=len(parts),
                num_segments=len(parts),
                seg_indptr=_ints([0, *accumulate(n for _, n in parts)]),
                weight_indices=_ints([slot for slot, _ in parts]),
                lora_ranks=_ints([case.rank_of(slot) for slot in range(slots)]),
                scalings=torch.ones(slots, device=DEVICE),
                max_len=most,
                seg_lens=_ints([n for _, n in parts]),
                permutation=order,
            )

        order = _ints(sorted(range(len(rows)), key=rows.__getitem__))
        counts = [(slot, rows.count(slot)) for slot in range(slots)]
        chunks = [(slot, min(CHUNK, n - i)) for slot, n in counts for i in range(0, n, CHUNK)]
        chunked = info(chunks, CHUNK, order)
        grouped = info(counts, case.tokens, order)  # a segment a slot, the empty ones too
        if case.phase == "prefill":  # one a run, as they come
            grouped = info(case.segments(), case.tokens // case.num_adapters, None)
        expand, geometry = self.b[modules - 1], [(), (widest,), (offsets, widest)][modules - 1]

        def csgmv(y: Tensor, x: Tensor, a: Stacks, b: Stacks) -> None:
            h = self.shrink(x, a[0], chunked, modules)
            self.expand(h, b[0], chunked, offsets, widest, y, on_cpu)

        def triton(y: Tensor, x: Tensor, a: Stacks, b: Stacks) -> None:
            h = self.a(x, a[0], grouped, modules)
            expand(h, b[0], grouped, *geometry, y)

        return {"csgmv": csgmv, "triton": triton}

    def pack(self, case: Case, a: Stacks, b: Stacks) -> tuple[Stacks, Stacks]:
        stacked = torch.cat(a, 1)
        for slot, rank in enumerate(case.rank_of(slot) for slot in range(len(stacked))):
            stacked[slot, : len(a) * rank] = torch.cat([one[slot, :rank] for one in a])
        return [stacked], [torch.cat(b, 1)]


def measure_peer(peer: str, cases: list[Case], bench: str) -> None:
    """A line a case, and ``<bench>_<peer>.json`` unless ``bench`` is "": the faster backend's."""
    try:
        kernels, version = Vllm() if peer == "vllm" else Sglang(), metadata.version(peer)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{peer}'s kernels need {WRITTEN_AGAINST[peer]}: {error}") from error
    print(f"# {peer} {version}; written against {WRITTEN_AGAINST[peer]}")
    found = {}
    for case in cases:
        each = _measure(kernels, case)
        figures = {"us": min(each.values()), "floor_us": round(case.floor_us, 3), **each}
        print(f"{case.name:46} {figures['us']:8.2f} us  floor {case.floor_us:7.2f}", flush=True)
        found[case.name] = {**figures, "version": version}
    if bench:
        print("written:", record.write(f"{bench}_{peer}", found, on_gpu=True))


def _measure(peer: Vllm | Sglang, case: Case) -> dict[str, float]:
    """µs a layer, medians, by backend: its graph's result is checked, then its time taken."""
    shape = SHAPES[case.shape]
    slots = case.num_adapters if case.slots == 128 else case.slots  # 128: where no case asks
    calls = peer.prepare(case, slots)
    size = 2 * slots * case.max_rank * (len(shape.widths) * shape.k + sum(shape.widths))
    layers = max(2, min(_layers(case), MAX_BYTES // size))
    ends = {i: _adapters(case, slots) for i in (0, layers - 1)}  # those that are checked
    weights = [peer.pack(case, *(ends.get(i) or _adapters(case, slots))) for i in range(layers)]
    x = _random(layers, case.tokens, shape.k)
    y = torch.zeros(layers, case.tokens, sum(shape.widths), dtype=torch.bfloat16, device=DEVICE)
    medians = {}
    for name, call in calls.items():

        def step(call: Call = call) -> None:
            for layer, (a, b) in enumerate(weights):
                call(y[layer], x[layer], a, b)

        step()  # compiles; and vLLM copies its tables of addresses, which a capture cannot
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        y.zero_()
        graph.replay()
        error = max(_error(case, x[i], y[i], a, b) for i, (a, b) in ends.items())
        if not error <= ERROR:
            raise AssertionError(f"{case.name}: {name}'s error {error}")
        times = _times(graph.replay, layers, 12, is_graph=True)
        medians[f"{name}_us"] = round(statistics.median(times), 3)
    return medians


def _adapters(case: Case, slots: int) -> tuple[Stacks, Stacks]:
    """A and B of each module, zero beyond an adapter's own rank."""
    shape, rank = SHAPES[case.shape], case.max_rank
    ranks = torch.tensor([case.rank_of(slot) for slot in range(slots)], device=DEVICE)
    own = torch.arange(rank, device=DEVICE) < ranks[:, None]
    a = [_random(slots, rank, shape.k).mul_(own[:, :, None]) for _ in shape.widths]
    return a, [_random(slots, width, rank).mul_(own[:, None]) for width in shape.widths]


def _error(case: Case, x: Tensor, y: Tensor, a: Stacks, b: Stacks) -> float:
    """Of some rows, against float64: the largest, over the term's RMS."""
    slots, worst = _slot_of_rows(case), 0.0
    rows = sorted({i * (case.tokens - 1) // (CHECKED_ROWS - 1) for i in range(CHECKED_ROWS)})
    got_of = y[rows].double().split(SHAPES[case.shape].widths, 1)
    for got, a_of, b_of in zip(got_of, a, b, strict=True):
        h = [a_of[slots[row]].double() @ x[row].double() for row in rows]
        want = torch.stack([b_of[slots[row]].double() @ h[i] for i, row in enumerate(rows)])
        worst = max(worst, float((got - want).abs().max() / want.square().mean().sqrt()))
    return worst


def _slot_of_rows(case: Case) -> list[int]:
    return [slot for slot, tokens in case.segments() for _ in range(tokens)]


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _random(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE).mul_(0.05)
