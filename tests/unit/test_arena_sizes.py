"""How large the arena is made, and of which models it can be shared with KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import BASE_CONFIG, Tiny

from adaptercache import (
    AdapterCache,
    AdapterUnsupported,
    BaseModel,
    CapacityError,
    LoraLayout,
    Tier,
    assembly,
)
from adaptercache.layout import ArenaShape


def test_a_share_is_one_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "free_bytes", lambda device: 1 << 24)
    with AdapterCache(Tiny.layout, gpu_bytes=0.5, host_bytes=4 << 20, device="cpu") as cache:
        assert cache.stats().capacity_bytes[Tier.GPU] == 1 << 23
        pages = cache.stats().pages
        assert sum(pages.values()) == (1 << 23) // (64 << 10)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -0.5, "8GB", None], ids=str)
def test_what_is_neither_bytes_nor_a_share_is_named(share: Any) -> None:
    with pytest.raises(TypeError, match="gpu_bytes"):
        AdapterCache(Tiny.layout, gpu_bytes=share, host_bytes=4 << 20, device="cpu")


def test_memory_that_there_is_not_is_told_with_what_was_asked_what_is_free_and_what_to_do() -> None:
    with pytest.raises(CapacityError, match=r"GiB for the arena.*GiB are free.*gpu_bytes") as told:
        AdapterCache(Tiny.layout, gpu_bytes=1 << 50, host_bytes=4 << 20, device="cpu")
    assert told.value.needed == 1 << 50
    assert 0 < told.value.limit < 1 << 50


def table(widths_of_k: list[int]) -> LoraLayout:
    """A base whose layers have keys of these widths; 0: no attention."""
    modules: dict[str, dict[str, object]] = {}
    for layer, width in enumerate(widths_of_k):
        modules[f"model.layers.{layer}.mlp.up_proj"] = {"kind": "linear", "out_in": [64, 32]}
        for name in ("k_proj", "v_proj") if width else ():
            path = f"model.layers.{layer}.self_attn.{name}"
            modules[path] = {"kind": "linear", "out_in": [width, 32]}
    return LoraLayout(BaseModel.from_table(modules), max_rank=8, dtype="float32")


@pytest.mark.parametrize("widths", [[16, 32], [16, 0, 16], [16, 16, 8]], ids=str)
def test_kv_of_different_sizes_shares_no_arena_and_adapters_have_one_alone(
    widths: list[int],
) -> None:
    layout = table(widths)
    with pytest.raises(AdapterUnsupported, match="different sizes") as told:
        ArenaShape.fit(layout, Tiny.kv, 1 << 24)
    assert "KVLayout" in told.value.remedy
    assert ArenaShape.fit(layout, None, 1 << 24).num_pages == 256


def test_kv_of_one_size_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ArenaShape.fit(table([16, 16]), Tiny.kv, 1 << 24).rows == 2
    vision = {"model.vision.layers.0.self_attn.k_proj": {"kind": "linear", "out_in": [5, 5]}}
    for config in (BASE_CONFIG,):
        layout = LoraLayout.from_config(config, max_rank=8)
        modules = {
            path: {"kind": module.kind, "out_in": list(module.shape)}
            for path, module in layout.base.modules.items()
            if module.kind == "linear"
        }
        mixed = LoraLayout(BaseModel.from_table(modules | vision), max_rank=8, dtype="float32")
        assert ArenaShape.fit(mixed, Tiny.kv, 1 << 24).rows == 2


def test_sleeping_and_waking_brings_back_the_same_bytes() -> None:
    ids = ("a", "b", "c")
    with Tiny.cache(Tiny.source(*ids)) as cache:
        Tiny.load(cache, *ids)
        before = {key: whole(cache, key) for key in ids}
        cache.drop_gpu()
        cache.restore()
        assert cache.resident(Tier.GPU) == set(ids)
        for key in ids:
            assert all(map(torch.equal, whole(cache, key), before[key]))


def whole(cache: AdapterCache, adapter_id: str) -> list[torch.Tensor]:
    """All that the adapter's slot names: start, rank and scaling tables, and the vector."""
    stack = cache._gpu.stack
    with cache.acquire(adapter_id) as lease:
        slot = lease.slot
        assert lease.digest is not None
        pages = cache._ledger.gpu[lease.digest].place.pages
        assert stack.pages[slot, : len(pages)].tolist() == list(pages)
        elements = cache._ledger.catalog.get(adapter_id)
        assert elements is not None
        rows = [stack.start[slot], stack.rank[slot], stack.scaling[slot]]
        rows.append(stack.elements(slot, 0, elements.elements))
        return [row.cpu().clone() for row in rows]
