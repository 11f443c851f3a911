"""A stack of random adapters on the GPU, add_lora's oracle over it, and how its time is taken."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptercache.base_model import BaseModel
from adaptercache.kernels import LoraBatch, LoraStack, add_lora, rank_class_of
from adaptercache.layout import ArenaShape, LoraLayout
from adaptercache.packing import VectorSpec
from kernel_cases import SHAPES, Case

ROTATE_BYTES = 150_000_000  # weights, inputs and outputs of all layers: beyond the L2
MAX_LAYERS = 600
ERROR = 0.02  # largest, over the RMS of the term, beyond the one rounding of y to bfloat16
CHECKED_ROWS = 12
NAMES = {1: ("o_proj",), 2: ("gate_proj", "up_proj"), 3: ("q_proj", "k_proj", "v_proj")}


@dataclass(frozen=True, slots=True)
class Figure:
    """``us``: the median of one layer's call; ``error``: the largest, over the term's RMS;
    ``rms_ratio``: RMS error over that of rounding the exact term once."""

    us: float
    p25: float
    p75: float
    error: float
    rms_ratio: float
    layers: int


class World:
    """All that the cases of one shape and rank need: adapters in pages in no order."""

    def __init__(self, cases: list[Case]) -> None:
        shape, first = SHAPES[cases[0].shape], cases[0]
        self.shape = shape
        self.modules = NAMES[len(shape.widths)]
        self.layers = max(_layers(case) for case in cases)
        self.num_slots = max(first.slots, *(case.num_adapters for case in cases))
        adapters = max(case.num_adapters for case in cases)
        table = {
            f"model.layers.{layer}.{name}": {"kind": "linear", "out_in": [width, shape.k]}
            for layer in range(self.layers)
            for name, width in zip(self.modules, shape.widths, strict=True)
        }
        layout = LoraLayout(BaseModel.from_table(table), max_rank=first.max_rank)
        sites = len(layout.sites)
        specs = {
            rank: VectorSpec.of(layout, [rank] * sites, [0.5 + i % 3 for i in range(sites)])
            for rank in {first.rank_of(slot) for slot in range(adapters)}
        }
        ranks = [first.rank_of(slot) for slot in range(adapters)]
        self.ranks = dict(enumerate(ranks))
        arena = ArenaShape(shape.rows, 1, shape.page_bytes, 2)
        pages_of = [arena.pages_for(specs[rank].elements) for rank in ranks]
        arena = ArenaShape(shape.rows, sum(pages_of), shape.page_bytes, 2)
        self.stack = LoraStack(layout, arena, self.num_slots, "cuda")
        self.stack.arena.normal_(0, 0.05)
        pages = torch.randperm(sum(pages_of), generator=torch.Generator().manual_seed(1)).tolist()
        for slot, rank in enumerate(ranks):
            mine, pages = pages[: pages_of[slot]], pages[pages_of[slot] :]
            self.stack.table[slot].copy_(self.stack.row(specs[rank], mine))

    def measure(self, case: Case, *, milliseconds: float = 12) -> Figure:
        """Check, then time."""
        layers = _layers(case)
        k, width = self.shape.k, sum(self.shape.widths)
        x = torch.randn(layers, case.tokens, k, device="cuda").bfloat16()
        y = torch.empty(layers, case.tokens, width, dtype=torch.bfloat16, device="cuda")
        rank_class = rank_class_of(case.max_rank)

        def batch_of(segments: list[tuple[int, int]]) -> LoraBatch:
            return LoraBatch(
                self.stack, segments, pad_to=case.tokens, rank_class=rank_class, ranks=self.ranks
            )

        def step(batch: LoraBatch) -> None:
            for layer in range(layers):
                add_lora(y[layer], x[layer], batch, self.modules, layer)

        if case.phase == "decode":
            empty = batch_of([])
            step(empty)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(empty)
            batch_of(case.segments())
            run: Callable[[], None] = graph.replay
        else:
            batch = batch_of(case.segments())
            run = lambda: step(batch)  # noqa: E731
        y.fill_(math.nan)
        y.zero_()
        run()
        error, beyond, rms_ratio = self._errors(case, x, y, {0, layers - 1})
        if not beyond <= ERROR:
            raise AssertionError(f"{case.name}: error {error}, {beyond} beyond y's rounding")
        times = _times(run, layers, milliseconds, is_graph=case.phase == "decode")
        low, median, high = statistics.quantiles(times, n=4)
        return Figure(median, low, high, error, rms_ratio, layers)

    def _errors(
        self, case: Case, x: Tensor, y: Tensor, layers: set[int]
    ) -> tuple[float, float, float]:
        """Against float64, of some rows: the largest over the RMS; that beyond y's rounding; and
        the RMS of errors over that of rounding once."""
        slots = [slot for slot, tokens in case.segments() for _ in range(tokens)]
        rows = sorted({round(i * (case.tokens - 1) / CHECKED_ROWS) for i in range(CHECKED_ROWS)})
        worst, beyond, squares, once = 0.0, 0.0, 0.0, 0.0
        for layer in layers:
            first = 0
            for module, width in zip(self.modules, self.shape.widths, strict=True):
                got = y[layer, rows, first : first + width].double()
                want = torch.zeros_like(got)
                for i, row in enumerate(rows):
                    found = self.stack.dense(slots[row], layer, module)
                    assert found is not None
                    a, b, scaling = found
                    want[i] = (x[layer, row].double() @ a.double().t()) @ b.double().t() * scaling
                errors, rms = (got - want).abs(), want.square().mean().sqrt()
                worst = max(worst, float(errors.max() / rms))
                beyond = max(beyond, float((errors - want.abs() / 256).max() / rms))
                squares += float((got - want).square().sum())
                once += float((want.bfloat16().double() - want).square().sum())
                first += width
        return worst, beyond, math.sqrt(squares / once)


def _layers(case: Case) -> int:
    return max(2, min(MAX_LAYERS, math.ceil(ROTATE_BYTES / case.bytes())))


def _times(
    run: Callable[[], None], layers: int, milliseconds: float, *, is_graph: bool
) -> list[float]:
    """µs a layer, several times. Launches are queued up while the GPU sleeps, so that the host's
    own time does not count."""
    estimate = _time(run, 1)
    runs = max(1, math.ceil(2e3 / estimate)) if is_graph else max(1, 120 // layers)
    samples = max(7, min(40, math.ceil(milliseconds * 1e3 / (estimate * runs))))
    return [_time(run, runs, sleep=not is_graph) / (runs * layers) for _ in range(samples)]


def _time(run: Callable[[], None], runs: int, *, sleep: bool = False) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if sleep:
        torch.cuda._sleep(30_000_000)  # cycles: some 16 ms
    start.record()
    for _ in range(runs):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
