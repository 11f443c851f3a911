"""LoRA beside the base product: the shrink, which needs x alone, on a second stream.

Llama-3-8B's groups of modules in decode, as CUDA graphs of about 32 layers, whose weights rotate
beyond the L2. A graph is captured once, from an empty batch, and replayed for every number of
distinct adapters. Each of these is µs a layer:

- base: y = x Wᵀ alone;
- after: then `add_lora`, as the library does;
- beside: the shrink on a second stream, forked before the base product and joined before the
  expand. Neither is launched before the launches ahead of it have ended: those are not all of
  their own stream, so programmatic dependent launch is left out;
- first: the same, on a stream of the highest priority;
- narrow: the same as beside, with no more of the shrink's programs than multiprocessors;
- early (with --early): the base product on the second stream, and the expand behind the shrink
  with programmatic dependent launch: its wait is for both before it reads y or partial sums;
- free: the base product, then the expand alone: what a shrink that took no time would leave. It
  reads an earlier step's sums, so it is only timed.

All but base and free give the same bits as after, before and after the timing, or have no time.
Without a GPU, under TRITON_INTERPRET=1, tiny shapes are run and compared, and nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

import record
from adaptercache.kernels import LoraBatch, LoraStack, rank_class_of
from adaptercache.kernels.binary import INTERPRETED, address
from adaptercache.kernels.launch import _launches, _outputs, _three, add_lora_triton
from adaptercache.kernels.stack import Group
from adaptercache.kernels.tuning import all_singles, rows_alike
from adaptercache.kernels.variants import pair_for
from kernel_cases import SHAPES, Shape
from kernel_world import NAMES

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LIKE: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
GROUPS = ("qkv", "o_proj", "gate_up", "down")
ROTATE_BYTES = 300_000_000  # of the base's weights of all layers
LAYERS = 32  # a graph, about
SAMPLES, SAMPLE_US = 11, 2e3
OTHERS = ("beside", "first", "narrow", "early")  # than the library's
WAYS = ("base", "after", "free", *OTHERS)

Run = Callable[[], None]
Figures = dict[str, Any]


def options() -> argparse.Namespace:
    parser = record.options(__doc__)
    tokens, ranks, adapters = [64, 8, 256], [16, 64], [0, 1, 8, 32, 64]
    if not ON_GPU:
        tokens, ranks, adapters = [4, 18], [16], [0, 2]
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help="in this order")
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help="up to 64")
    parser.add_argument("--adapters", type=int, nargs="+", default=adapters, help="distinct ones")
    parser.add_argument("--early", action="store_true", help="try this way, too")
    return parser.parse_args()


def main() -> None:
    wanted = options()
    if not (ON_GPU or INTERPRETED):
        raise SystemExit("bench_beside needs a CUDA device, or TRITON_INTERPRET=1 to try it out")
    begun = time.perf_counter()
    if ON_GPU:
        print(*compile_all(wanted), sep="\n")
        print(f"compiled: {time.perf_counter() - begun:.0f} s")
    gc.freeze()  # each capture collects
    print(f"{'µs a layer':23}", *(f"{way:>7}" for way in WAYS), "  after less each of the last")
    found, failed = dict[str, Figures](), 0
    for tokens, rank in itertools.product(wanted.tokens, wanted.ranks):
        its: dict[str, Figures] = {}
        for group in GROUPS:
            its.update(measured(group, rank, tokens, wanted))
        failed += sum(not figures or "wrong" in figures for figures in its.values())
        found.update({name: figures for name, figures in its.items() if figures})
        for n in wanted.adapters if ON_GPU else ():
            kind = f"r{rank}/t{tokens}/a{n}"
            parts = [its.get(f"{group}/{kind}", {}) for group in GROUPS]
            if all(parts):
                found[f"all four/{kind}"] = told(f"all four/{kind}", sums_of(parts))
        if ON_GPU and found:  # so far
            path = record.write("beside", found, on_gpu=True)
            print(f"written: {path}, {time.perf_counter() - begun:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"{failed} cases failed, or were wrong in a way: see above")


def measured(
    group: str, rank: int, tokens: int, wanted: argparse.Namespace
) -> Iterator[tuple[str, Figures]]:
    """Of each number of adapters; nothing where it failed, and the others go on."""
    step = None
    for n in [n for n in wanted.adapters if n <= tokens]:
        name = f"{group}/r{rank}/t{tokens}/a{n}"
        try:
            if step is None:
                step = Step(world_of(group, rank, max(wanted.adapters)), tokens, wanted.early)
            yield name, told(name, step.measure(n))
        except Exception as error:
            print(f"{name}: {error!r:.400}", flush=True)
            yield name, {}


def told(name: str, figures: Figures) -> Figures:
    """A line of the table."""
    cells = [f"{figures.get(f'{way}_us', math.nan):7.2f}" for way in WAYS]
    saved = [f"{way} {figures[key]:.2f}" for way in OTHERS if (key := f"{way}_saves_us") in figures]
    if not ON_GPU:
        same = figures.keys() & OTHERS
        cells, saved = [f"{'same' if way in same else '-':>7}" for way in WAYS], []
    print(f"{name:23}", *cells, " ", ", ".join(saved), flush=True)
    return figures


def compared(figures: Figures) -> Figures:
    """With what each way saves of the library's time."""
    saves = {
        f"{way}_saves_us": round(figures["after_us"] - figures[key], 3)
        for way in OTHERS
        if (key := f"{way}_us") in figures
    }
    return {**figures, **saves}


def sums_of(parts: list[Figures]) -> Figures:
    """Of a layer's four groups, the medians."""
    keys = [key for way in WAYS if all((key := f"{way}_us") in part for part in parts)]
    return compared({key: round(sum(part[key] for part in parts), 3) for key in keys})


class World:
    """Adapters of one rank and the base's weights, for one group of modules, over all layers."""

    def __init__(self, group: str, rank: int, slots: int, layers: int) -> None:
        self.shape, self.rank, self.layers = shape_of(group), rank, layers
        self.modules = NAMES[len(self.shape.widths)]
        k, widths = self.shape.k, self.shape.widths
        scalings = [0.5 + slot % 3 for slot in range(slots)]
        self.stack = LoraStack.from_dense(
            {
                (layer, module): (
                    torch.empty(slots, rank, k, **LIKE).normal_(0, 0.05),
                    torch.empty(slots, width, rank, **LIKE).normal_(0, 0.05),
                    scalings,
                )
                for layer in range(layers)
                for module, width in zip(self.modules, widths, strict=True)
            }
        )
        self.weights: list[torch.Tensor] = []

    def with_base(self) -> World:
        shape = (sum(self.shape.widths), self.shape.k)
        self.weights = [torch.empty(shape, **LIKE).normal_(0, 0.02) for _ in range(self.layers)]
        return self

    def batch(self, tokens: int, adapters: int) -> LoraBatch:
        """Of so many tokens, an adapter after the other; of the base alone where there are none."""
        segments = [(token % adapters, 1) for token in range(tokens)] if adapters else []
        rank_class = rank_class_of(self.rank)
        return LoraBatch(self.stack, segments, pad_to=tokens, rank_class=rank_class)


def shape_of(group: str) -> Shape:
    shape = SHAPES[group]
    return shape if ON_GPU else Shape(shape.k // 64, tuple(n // 64 for n in shape.widths))


@cache
def world_of(group: str, rank: int, slots: int) -> World:
    """The same one for all numbers of tokens."""
    shape = shape_of(group)
    layers = math.ceil(ROTATE_BYTES / (2 * shape.k * sum(shape.widths))) if ON_GPU else 2
    return World(group, rank, max(1, slots), max(2, layers)).with_base()


class Call:
    """The two launches of one call of `add_lora`, each by itself."""

    def __init__(self, y: torch.Tensor, x: torch.Tensor, batch: LoraBatch, group: Group) -> None:
        rows = batch.num_rows
        if not batch.shape.is_small:
            raise ValueError(f"{rows} rows are no decode")
        alone = all_singles(group.elements, batch.rank_class, rows)
        at, apart, aligned = _outputs(y, group)
        self._aligned = aligned = aligned and not (x.stride(0) % 16 or x.data_ptr() % 16)
        its = _launches(batch, group, batch.rank_class, alone, aligned)
        (launch,) = its  # of more, each had scratch of its own
        self.pair = pair = launch.pair
        sums, zeros = batch.stack.scratch(rows * pair.scratch, rows * pair.counters)
        shared = address(batch.work()), address(sums)
        counters = (address(zeros),) if pair.counters else ()
        of_x = (address(x), x.stride(0))
        self._to_shrink = (*of_x, *launch.to_shrink, *shared, *counters, rows)
        self._to_expand = (*_three(at), *_three(apart), *launch.to_expand, *shared, rows)
        self._rows = rows

    def shrink(self, *, most: int | None = None) -> None:
        """Behind all that its stream waits for; at most so many programs, which stride over all."""
        programs = self._rows * self.pair.shrink_programs
        programs = programs if most is None else min(programs, most)
        self.pair.shrink.launch(programs, self._to_shrink, aligned=self._aligned, pdl=False)

    def expand(self, *, pdl: bool = False) -> None:
        programs = self._rows * self.pair.expand_programs
        pdl = pdl and self.pair.pdl
        self.pair.expand.launch(programs, self._to_expand, aligned=self._aligned, pdl=pdl)


class Side:
    """A second stream; without a GPU there is none, and all is done in turn."""

    def __init__(self, priority: int) -> None:
        self._stream = torch.cuda.Stream(priority=priority) if ON_GPU else None

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Launch there, behind all that is on the current stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@cache  # torch hands out a few streams in turn, and one of them is that of captures
def side_of(priority: int) -> Side:
    return Side(priority)


class Step:
    """One group's products of all layers for so many rows, in each way."""

    def __init__(self, world: World, tokens: int, early: bool) -> None:
        self._world, self._tokens, self._early = world, tokens, early
        rows = (world.layers, tokens)
        self._x = torch.randn(*rows, world.shape.k, device=DEVICE).bfloat16()
        self._y = torch.empty(*rows, sum(world.shape.widths), **LIKE)
        self._repeats = max(1, round(LAYERS / world.layers)) if ON_GPU else 1
        self._graphs: dict[str, Run] = {}
        if ON_GPU:
            for name, run in self._ways(world.batch(tokens, 0)).items():
                try:
                    self._graphs[name] = captured(run)
                except Exception as error:  # the other ways are still wanted
                    print(f"{name}, {tokens} tokens, not captured: {error!r:.400}", flush=True)

    def _ways(self, batch: LoraBatch) -> dict[str, Run]:
        world, x, y = self._world, self._x, self._y
        layers = range(world.layers)
        groups = [world.stack.group(i, world.modules) for i in layers]
        calls = [Call(y[i], x[i], batch, groups[i]) for i in layers]
        multiprocessors = 4
        if ON_GPU:
            multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

        def base(i: int) -> None:
            torch.mm(x[i], world.weights[i].t(), out=y[i])

        def after(i: int) -> None:
            base(i)
            add_lora_triton(y[i], x[i], batch, groups[i])

        def beside(i: int, side: Side, most: int | None = None) -> None:
            with side.forked():
                calls[i].shrink(most=most)
            base(i)
            side.join()
            calls[i].expand()

        def early(i: int) -> None:
            with side.forked():
                base(i)
            calls[i].shrink()
            side.join()
            calls[i].expand(pdl=True)

        def free(i: int) -> None:
            base(i)
            calls[i].expand()

        side, urgent = side_of(0), side_of(-100)  # as urgent as there is
        ways: dict[str, Callable[[int], None]] = {
            "base": base,
            "after": after,
            "beside": lambda i: beside(i, side),
            "first": lambda i: beside(i, urgent),
            "narrow": lambda i: beside(i, side, multiprocessors),
            "free": free,
        }
        if self._early or not ON_GPU:
            ways["early"] = early

        def run(act: Callable[[int], None]) -> None:
            for i in itertools.chain.from_iterable(itertools.repeat(layers, self._repeats)):
                act(i)

        return {name: partial(run, act) for name, act in ways.items()}

    def measure(self, adapters: int) -> Figures:
        """µs a layer of each way that gives the same bits; ``wrong``: the others, if any."""
        batch = self._world.batch(self._tokens, adapters)
        ways = self._graphs if ON_GPU else self._ways(batch)
        same = self._same_bits(ways, adapters)
        times = timed({name: ways[name] for name in same}) if ON_GPU else {}
        if ON_GPU:
            same = self._same_bits({name: ways[name] for name in same}, adapters)
        wrong = [name for name in ways if name not in same]
        figures: Figures = {"wrong": wrong} if wrong else {}
        if not ON_GPU:
            return {**figures, **dict.fromkeys(same, True)}
        layers = self._repeats * self._world.layers
        for name in same:
            its = record.spread([us / layers / 1e6 for us in times[name]])
            figures.update({f"{name}_{key}": value for key, value in its.items()})
        return compared(figures)

    def _same_bits(self, ways: Mapping[str, Run], adapters: int) -> list[str]:
        """The ways that may be timed."""
        found = {name: self._bits(run) for name, run in ways.items() if name != "free"}
        base, after = found["base"], found["after"]
        if not bool(after.isfinite().all()):
            raise AssertionError("add_lora left something out, or gave no numbers")
        if torch.equal(base, after) != (adapters == 0):
            raise AssertionError(f"add_lora added {'some' if not adapters else 'no'}thing")
        wrong = [n for n in found if n != "base" and not torch.equal(found[n], after)]
        for name in wrong:
            print(f"WRONG, and so without a time: {name}, {adapters} adapters", flush=True)
        return [name for name in ways if name not in wrong]

    def _bits(self, run: Run) -> torch.Tensor:
        self._y.fill_(math.nan)
        run()
        return self._y.clone()


def captured(run: Run) -> Run:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Run = graph.replay
    return replay


def timed(ways: Mapping[str, Run]) -> dict[str, list[float]]:
    """µs of each way's runs, the ways in turn, so that the clock's changes meet them all."""
    runs = {name: max(1, math.ceil(SAMPLE_US / time_of(run, 3))) for name, run in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(SAMPLES):
        for name, run in ways.items():
            times[name].append(time_of(run, runs[name]))
    return times


def time_of(run: Run, runs: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # the host is ahead from here on
    start.record()
    for _ in range(runs):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / runs


def compile_all(wanted: argparse.Namespace) -> list[str]:
    """Compile all, in processes of their own, into Triton's cache. Returns what went wrong."""
    jobs = set()
    for tokens, rank, group in itertools.product(wanted.tokens, wanted.ranks, GROUPS):
        shape = shape_of(group)
        elements = len(shape.widths) * shape.k + sum(shape.widths)
        jobs.add((group, rank, rows_alike(elements, rank_class_of(rank), tokens)))
    spawn = multiprocessing.get_context("spawn")
    processes = min(len(jobs), max(1, (os.cpu_count() or 2) - 1))
    try:
        with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
            return [error for error in pool.map(_compile, *zip(*jobs, strict=True)) if error]
    except (OSError, BrokenProcessPool) as error:
        return [f"{error!r}: compiled where it is launched"]


def _compile(group: str, rank: int, tokens: int) -> str:
    try:
        world = World(group, rank, slots=1, layers=1)
        modules = world.stack.group(0, world.modules)
        shape = (world.shape.k, world.shape.widths, rank_class_of(rank))
        alone = all_singles(modules.elements, shape[2], tokens)
        pair = pair_for(world.stack, *shape, tokens, all_singles=alone)
        for binary, pdl in itertools.product((pair.shrink, pair.expand), {False, pair.pdl}):
            binary.compile(aligned=True, pdl=pdl)
    except Exception as error:  # it is compiled, or fails, where it is launched
        return f"{group} {rank} {tokens}: {error!r:.400}"
    return ""


if __name__ == "__main__":
    main()
