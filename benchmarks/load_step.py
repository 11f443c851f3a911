"""Steps beside loads: a decode-shaped loop of Llama-3-8B, and the first step of an adapter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from adaptercache import AdapterCache, Lease, LoraLayout, Request, Tier
from adaptercache.kernels import LoraBatch, LoraStack, add_lora
from adaptercache.testing import random_adapter
from adaptercache.tiers import ways
from load_world import CONFIG, DEVICE, KV, ON_GPU, LoadWorld, Mark, Resting, quartiles, wait_for_gpu

TOKENS = 64
STEPS = 60 if ON_GPU else 3
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


class DecodeModel:
    """The matrix products of a decode step, with LoRA beside each; attention is left out."""

    def __init__(self, layout: LoraLayout) -> None:
        self.num_layers = layout.num_layers
        sizes = {(site.layer, site.module): site for site in layout.sites}
        self._layers = []
        for layer in range(self.num_layers):
            group_weights = []
            for group in GROUPS:
                sites = [sizes[layer, module] for module in group]
                shape = (sum(site.out_features for site in sites), sites[0].in_features)
                weight = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02)
                group_weights.append(weight)
            self._layers.append(group_weights)
        self._x = [torch.randn(TOKENS, w.shape[1], device=DEVICE).bfloat16() for w in group_weights]
        self._y = [
            torch.empty(TOKENS, w.shape[0], dtype=torch.bfloat16, device=DEVICE)
            for w in group_weights
        ]

    def layer(self, layer: int, batch: LoraBatch) -> None:
        for group, weight, x, y in zip(GROUPS, self._layers[layer], self._x, self._y, strict=True):
            torch.mm(x, weight.t(), out=y)
            add_lora(y, x, batch, group, layer)

    def whole(self, batch: LoraBatch) -> None:
        for layer in range(self.num_layers):
            self.layer(layer, batch)


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """A replay of what ``run`` launches; on the CPU, ``run``."""
    if not ON_GPU:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may page-lock, load
        run()
    replay: Callable[[], None] = graph.replay
    return replay


# -- decode beside loads


def decode_beside_loads(world: LoadWorld) -> Iterator[tuple[str, dict[str, object]]]:
    """Steps of 64 tokens over 16 adapters, alone and beside loads at full rate."""
    free = list(range(world.tier.shape.num_pages))
    adapters = [world.rest(16) for _ in range(6)]
    for slot in range(16):
        _load(world, slot, adapters[slot % 6], free)
    model = DecodeModel(world.layout)
    segments = [(slot, TOKENS // 16) for slot in range(16)]
    batch = LoraBatch(world.tier.stack, segments, pad_to=TOKENS, rank_class=16)
    model.whole(batch)
    replay = capture(lambda: model.whole(batch))
    steps(world, replay, 5)
    mine = [[free.pop() for _ in range(_pages(world, adapters[0]))] for _ in range(2)]

    streams, stack = world.tier.streams, world.tier.stack
    way: dict[str, ways.Way] = {
        "strided": ways.Strided(streams, stack),
        "staged": ways.Staged(streams, stack),
    }

    def bring(thread: int) -> int:
        adapter = adapters[thread]
        transfer = world.tier.expect(
            20 + thread, mine[thread], adapter.spec, lambda: world.views(adapter)
        )
        world.tier.write(20 + thread, transfer)
        return adapter.nbytes

    targets = [torch.empty(adapters[0].nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]

    def plain(thread: int) -> int:
        world.time_plain([adapters[thread]], targets[thread])
        return adapters[thread].nbytes

    loads: dict[str, Callable[[int], int]] = {
        "strided": bring,
        "staged": bring,
        "plain copies": plain,
    }
    if ON_GPU:
        loads["a kernel reads pinned memory"] = _kernel_reader(world, adapters[0], mine)
    for name, load in loads.items():
        if name in way:
            world.take(way[name])
        load(0)  # compiled
        alone = steps(world, replay, STEPS)
        with_loads, rate = _beside(world, replay, load)
        alone += steps(world, replay, STEPS)
        before, _, _ = quartiles(alone)
        during, low, high = quartiles(with_loads)
        figures: dict[str, object] = {
            "alone_us": round(before, 1),
            "us": round(during, 1),
            "p25": round(low, 1),
            "p75": round(high, 1),
            "slower": round(during / before - 1, 4),
            "load_GBps": round(rate, 2),
        }
        if name == "strided":  # how hints are loaded
            figures["most_slower"] = 0.05
        yield f"decode step beside loads: {name}", figures
    for thread in range(2):
        bring(thread)
        world.check(20 + thread, adapters[thread])
    for slot in range(16):
        world.check(slot, adapters[slot % 6])


def _pages(world: LoadWorld, adapter: Resting) -> int:
    return world.tier.shape.pages_for(adapter.spec.elements)


def _load(world: LoadWorld, slot: int, adapter: Resting, free: list[int]) -> None:
    pages = [free.pop() for _ in range(_pages(world, adapter))]
    transfer = world.tier.expect(slot, pages, adapter.spec, lambda: world.views(adapter))
    world.tier.write(slot, transfer)


def steps(world: LoadWorld, replay: Callable[[], None], count: int) -> list[float]:
    """µs of each; the host is at most one step ahead, as an engine is."""
    marks: list[tuple[Mark, Mark]] = []
    for _ in range(count):
        with world.tier.streams.step():
            start = Mark()
            replay()
            end = Mark()
        if marks:
            marks[-1][1].wait()
        marks.append((start, end))
    marks[-1][1].wait()
    return [start.us_to(end) for start, end in marks]


def _beside(
    world: LoadWorld, replay: Callable[[], None], load: Callable[[int], int]
) -> tuple[list[float], float]:
    """The steps' µs, and the GB/s that two threads load meanwhile."""
    stop = threading.Event()
    loaded = [0, 0]

    def keep_loading(thread: int) -> None:
        while not stop.is_set():
            loaded[thread] += load(thread)

    threads = [threading.Thread(target=keep_loading, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    begun, start = sum(loaded), time.perf_counter()
    try:
        found = steps(world, replay, STEPS)
        seconds, moved = time.perf_counter() - start, sum(loaded) - begun
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return found, moved / seconds / 1e9


def _kernel_reader(
    world: LoadWorld, adapter: Resting, pages: Sequence[Sequence[int]]
) -> Callable[[int], int]:
    from load_kernel import read_into_cells  # triton: only where it is used

    views = world.views(adapter)
    streams = [torch.cuda.Stream() for _ in range(2)]
    tables = [torch.tensor(its, dtype=torch.int32, device=DEVICE) for its in pages]
    arena = world.tier.stack.arena.view(torch.int64)

    def load(thread: int) -> int:
        with torch.cuda.stream(streams[thread]):
            first = 0
            for view in views:
                count = len(view) // (arena.shape[0] * arena.shape[2] * 8)
                read_into_cells(arena, view.view(torch.int64), tables[thread][first:], count)
                first += count
            end = torch.cuda.Event(blocking=True)
            end.record()
        end.synchronize()
        return adapter.nbytes

    return load


# -- the first step

TURNS = 22 if ON_GPU else 5  # the first two of them warm up


def first_step() -> Iterator[tuple[str, dict[str, object]]]:
    """From `admit` to the end of the first step of an adapter that is in CPU memory."""
    layout = LoraLayout.from_config(CONFIG, max_rank=16)
    gpu_bytes, host_bytes = (2 << 30, 1 << 30) if ON_GPU else (32 << 20, 32 << 20)
    with AdapterCache(
        layout, gpu_bytes=gpu_bytes, host_bytes=host_bytes, gpu_slots=16, kv=KV, device=DEVICE
    ) as cache:
        trial = FirstStep(cache, layout)
        streams, stack = cache._gpu.streams, cache._gpu.stack
        of_name = {
            "strided": ways.Strided(streams, stack),  # as it is
            "staged": ways.Staged(streams, stack),
        }
        for name, way in of_name.items():
            cache._gpu._memory = stack, ways.Ways(way, way, way)
            wait_for_gpu()
            found: dict[str, list[list[float]]] = {"hit": [], "pipelined": [], "plain wait": []}
            for turn in range(TURNS):
                for how, durations in found.items():
                    times = trial.run(how)
                    if turn >= 2:
                        durations.append(times)
            trial.check()
            behind = {how: [trial.run_behind(how) for _ in range(TURNS)][2:] for how in found}
            trial.check()
            hit_behind = quartiles(behind["hit"])[0]
            hit = quartiles([times[-1] for times in found["hit"]])[0]
            for how, durations in found.items():
                median, low, high = quartiles([times[-1] for times in durations])
                figures: dict[str, object] = {
                    "us": round(median, 1),
                    "p25": round(low, 1),
                    "p75": round(high, 1),
                    "over_a_hit_us": round(median - hit, 1),
                }
                for place, what in enumerate(("admitted", "opened", "first_wait", "launched")):
                    figures[f"{what}_us"] = round(quartiles([t[place] for t in durations])[0], 1)
                median_behind = quartiles(behind[how])[0]
                figures["behind_a_step_us"] = round(median_behind, 1)
                figures["over_a_hit_behind_a_step_us"] = round(median_behind - hit_behind, 1)
                if how == "pipelined" and name == "strided":
                    figures["most_over_a_hit_us"] = 300
                yield f"first step, {name}, {how}", figures
        trial.end()


class FirstStep:
    """Piecewise graphs over a cache; four adapters run, and a fifth comes."""

    def __init__(self, cache: AdapterCache, layout: LoraLayout) -> None:
        self.cache = cache
        tensors, config = random_adapter(layout.base, rank=16, targets=layout.modules)
        self._tensors = tensors
        ids = ["a0", "a1", "a2", "a3", "cold"]
        futures = [
            cache.put(adapter_id, tensors, config | {"lora_alpha": 16 + i})  # all differ
            for i, adapter_id in enumerate(ids)
        ]
        for future in futures:
            future.result(120)
        self._running = [(Request(f"r-{i}", i), cache.acquire(i).result(60)) for i in ids[:4]]
        cache.acquire("cold").result(60).release()
        self._model = model = DecodeModel(layout)
        self._pieces = []
        with cache.lora_batch([], pad_to=TOKENS, rank_to=16) as batch:
            model.whole(batch)
            wait_for_gpu()
            for layer in range(model.num_layers):
                self._pieces.append(capture(lambda n=layer: model.layer(n, batch)))  # type: ignore[misc]
            if not ON_GPU:
                self._pieces = []

    def run(self, how: str) -> list[float]:
        """µs on the clock, from `admit` to: its answer, the batch is open, its first layer may be
        launched, all is launched, the step's end on the GPU."""
        self._rest(how)
        moments = [time.perf_counter()]
        admitted = self._admit(how)
        moments.append(time.perf_counter())
        end = self._step(admitted, moments)
        end.wait()
        moments.append(time.perf_counter())
        for _, lease in admitted:
            lease.release()
        return [(moment - moments[0]) * 1e6 for moment in moments[1:]]

    def run_behind(self, how: str) -> float:
        """µs on the GPU, from the end of the step before, which runs while this one is admitted and
        launched, to its own."""
        self._rest(how)
        before = self._step([], [])
        admitted = self._admit(how)
        end = self._step(admitted, [])
        end.wait()
        for _, lease in admitted:
            lease.release()
        return before.us_to(end)

    def _rest(self, how: str) -> None:
        if how != "hit":
            self._forget()
        wait_for_gpu()
        time.sleep(0.003)

    def _admit(self, how: str) -> list[tuple[Request, Lease]]:
        waiting = [Request("new", "cold", num_tokens=TOKENS // 2, pipelined=how == "pipelined")]
        while True:
            admission = self.cache.admit(waiting, running=self._running)
            assert not admission.failed, admission.failed
            if admission.admitted:
                return admission.admitted
            waiting = admission.deferred
            time.sleep(2e-5)

    def _step(self, admitted: Sequence[tuple[Request, Lease]], moments: list[float]) -> Mark:
        """Launches it. Adds when its batch was open, its first layer might be launched, all was."""
        pairs = [(lease, TOKENS // 8) for _, lease in self._running]
        pairs += [(lease, r.num_tokens) for r, lease in admitted]
        with self.cache.lora_batch(pairs, pad_to=TOKENS, rank_to=16) as lora:
            moments.append(time.perf_counter())
            lora.wait(0)
            moments.append(time.perf_counter())
            if self._pieces:
                for layer, replay in enumerate(self._pieces):
                    lora.wait(layer)
                    replay()
            else:
                self._model.whole(lora)
            moments.append(time.perf_counter())
            return Mark()

    def _forget(self) -> None:
        """Evict the adapter from the GPU, as room for another would."""
        deadline = time.monotonic() + 10
        while "cold" not in self.cache.resident(Tier.GPU) and time.monotonic() < deadline:
            time.sleep(0.001)
        ledger = self.cache._ledger
        known = ledger.catalog.get("cold")
        assert known is not None
        with self.cache._deciding.lock:
            ledger.evict(Tier.GPU, known.digest, "room")

    def check(self) -> None:
        """What came last is the adapter's own."""
        stack: LoraStack = self.cache._gpu.stack
        with self.cache.acquire("cold") as lease:
            for layer in (0, self._model.num_layers - 1):
                found = stack.dense(lease.slot, layer, "down_proj")
                assert found is not None
                path = f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_A.weight"
                want: Tensor = self._tensors[path]
                assert torch.equal(found[0].cpu(), want), "the slot holds other bytes"

    def end(self) -> None:
        for _, lease in self._running:
            lease.release()
