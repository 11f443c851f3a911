"""A CUDA graph, captured once from an empty batch, over a cache that loads and evicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tiny

pytest.importorskip("triton")

from adaptercache import Request, Tier
from adaptercache.kernels import LoraBatch, add_lora
from adaptercache.tiers import ways
from adaptercache.tiers.streams import Lane

pytestmark = pytest.mark.gpu
ROWS, RANK_TO = 8, 16
MODULES = ("q_proj", "k_proj", "v_proj")
BATCHES = [
    ["a", "b", "a", None],
    ["c", "c", "c", "c", "c", "c", "c", "c"],
    [],
    ["d", "a", None, "e"],
    [None, None],
    ["f", "b", "e", "b", "b"],
    ["a"],
]


def reference(batch: LoraBatch, x: torch.Tensor, layer: int) -> torch.Tensor:
    """The term in float64, out of what the slots hold now."""
    outputs = []
    slots = batch.token_slots.tolist()
    for module in MODULES:
        site = batch.stack.layout.sites[batch.stack.site(layer, module)]
        out = torch.zeros(len(x), site.out_features, dtype=torch.float64, device=x.device)
        for row, slot in enumerate(slots):
            found = batch.stack.dense(slot, layer, module) if slot >= 0 else None
            if found is not None:
                a, b, scaling = found
                out[row] = (x[row].double() @ a.double().t()) @ b.double().t() * scaling
        outputs.append(out)
    return torch.cat(outputs, dim=1)


def test_a_graph_is_right_after_adapters_were_evicted_and_loaded() -> None:
    ids = ("a", "b", "c", "d", "e", "f")
    with Tiny.cache(Tiny.source(*ids), pages=24, gpu_slots=3) as cache:
        cache.warmup(num_rows=ROWS)
        x = torch.randn(ROWS, 32, device="cuda")
        y = torch.zeros(2, ROWS, 32 + 16 + 16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with cache.lora_batch([], pad_to=ROWS, rank_to=RANK_TO) as batch:
            for layer in range(2):
                add_lora(y[layer], x, batch, MODULES, layer)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                y.zero_()
                for layer in range(2):
                    add_lora(y[layer], x, batch, MODULES, layer)
        for adapters in BATCHES * 3:
            x.normal_()
            leases = {each: cache.acquire(each) for each in dict.fromkeys(adapters)}
            pairs = [(leases[each].result(20), 1) for each in adapters]
            with cache.lora_batch(pairs, pad_to=ROWS, rank_to=RANK_TO) as batch:
                graph.replay()
                wants = [reference(batch, x, layer) for layer in range(2)]
            for layer, want in enumerate(wants):
                assert (y[layer].double() - want).abs().max() <= 1e-4 * want.abs().max().clamp(
                    min=1
                )
                assert not y[layer, len(adapters) :].any()
            for lease in leases.values():
                lease.release()
        assert cache.stats().evictions[Tier.GPU, "room"] > len(BATCHES)  # some adapters came back


@pytest.mark.parametrize("fixed", [None, ("q_proj", "v_proj")])
def test_a_graph_has_all_modules_but_where_they_are_fixed(fixed: tuple[str, ...] | None) -> None:
    """Captured from a batch whose adapter has q alone."""
    source = Tiny.source()
    source.put("all", *Tiny.tensors(8, targets=MODULES))
    for adapter_id in ("q", "v"):
        source.put(adapter_id, *Tiny.tensors(7, targets=(f"{adapter_id}_proj",)))
    groups = [("q_proj",), ("k_proj",), ("v_proj",)]
    with Tiny.cache(source, pages=24, gpu_slots=3) as cache:
        cache.warmup(groups, num_rows=ROWS)
        x = torch.randn(ROWS, 32, device="cuda")
        y = torch.zeros(ROWS, 32 + 16 + 16, device="cuda")
        leases = {adapter_id: cache.acquire(adapter_id).result(10) for adapter_id in "qv"}
        leases["all"] = cache.acquire("all").result(10)
        graph = torch.cuda.CUDAGraph()
        padded = {"pad_to": ROWS, "rank_to": RANK_TO}

        def run(batch: LoraBatch) -> None:
            y.zero_()
            for names, part in zip(groups, y.split((32, 16, 16), dim=1), strict=True):
                add_lora(part, x, batch, names, 0)

        with cache.lora_batch([(leases["q"], 2)], **padded, modules_to=fixed) as batch:
            run(batch)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run(batch)
        for adapter_id in ("q", "v") if fixed else ("q", "v", "all"):
            with cache.lora_batch([(leases[adapter_id], 5)], **padded) as batch:
                graph.replay()
                want = reference(batch, x, 0)
            assert (y.double() - want).abs().max() <= 1e-4 * want.abs().max()
            assert want.any()


@pytest.mark.parametrize("way", ["staged", "strided"])
def test_pieces_that_were_captured_wait_for_their_layer(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A pipelined request's first step: every layer is a graph of its own, and the adapter comes
    in chunks of a page behind long kernels."""
    for name in ("STAGED_BYTES", "STRIDED_BYTES"):
        monkeypatch.setattr(ways, name, 4096)
    if way == "strided":

        def only_strided(streams: Any, stack: Any) -> ways.Ways:
            strided = ways.Strided(streams, stack)
            return ways.Ways(strided, strided, strided)

        monkeypatch.setattr(ways.Ways, "of", only_strided)
    wait = Lane.wait

    def wait_after_a_sleep(lane: Lane, event: torch.cuda.Event | None) -> None:
        with lane.use():
            torch.cuda._sleep(300_000)
        wait(lane, event)

    monkeypatch.setattr(Lane, "wait", wait_after_a_sleep)
    ids = ("a", "b", "c", "d", "e", "f")
    with Tiny.cache(Tiny.source(*ids), pages=24, gpu_slots=3) as cache:
        cache.warmup(num_rows=ROWS)
        Tiny.load(cache, *ids)
        x = torch.randn(ROWS, 32, device="cuda")
        y = torch.zeros(2, ROWS, 32 + 16 + 16, device="cuda")
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        with cache.lora_batch([], pad_to=ROWS, rank_to=RANK_TO) as batch:
            for layer in range(2):
                add_lora(y[layer], x, batch, MODULES, layer)
            torch.cuda.synchronize()
            for layer, graph in enumerate(graphs):
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    y[layer].zero_()
                    add_lora(y[layer], x, batch, MODULES, layer)
        early = 0
        for turn in range(24):
            x.normal_()
            request = Request("r", ids[turn % 6], pipelined=True)
            admission = cache.admit([request])
            while not admission.admitted:
                admission = cache.admit(admission.deferred)
            ((_, lease),) = admission.admitted
            early += ids[turn % 6] not in cache.resident(Tier.GPU)
            with cache.lora_batch([(lease, 5)], pad_to=ROWS, rank_to=RANK_TO) as batch:
                for layer, graph in enumerate(graphs):
                    batch.wait(layer)
                    graph.replay()
                wants = [reference(batch, x, layer) for layer in range(2)]
            for layer, want in enumerate(wants):
                assert (y[layer].double() - want).abs().max() <= 1e-4 * want.abs().max().clamp(
                    min=1
                )
                assert y[layer, :5].any()
                assert not y[layer, 5:].any()
            lease.release()
        assert early > 6
