"""Round trips: the real PEFT adapts a tiny model and saves; what we read is what PEFT itself does
with the files, to every weight of the model and to the output of every layer that we serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from safetensors import safe_open

pytest.importorskip("peft", minversion="0.21")  # what it does and saves differs by release
pytest.importorskip("transformers", minversion="5")

import trips
from trip_options import Adapter, adapters

from adaptercache import AdapterCache, LoraLayout
from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import Checkpoint, LoraWeights, read_checkpoint
from adaptercache.errors import AdapterInvalid, AdapterUnsupported
from adaptercache.kernels import add_lora

MOST = settings.default.max_examples
a_few = settings(
    max_examples=6 if MOST <= 100 else MOST,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
each_family = pytest.mark.parametrize("family", trips.FAMILIES)


@contextmanager
def saved(family: str, adapter: Adapter) -> Iterator[Path]:
    """A directory with the adapter in it, as PEFT saves it."""
    with TemporaryDirectory() as name:
        path = Path(name) / "saved"
        try:
            trips.save(
                path,
                family,
                adapter.options,
                dtype=adapter.dtype,
                autocast=adapter.autocast,
                seed=adapter.seed,
            )
        except ValueError:  # nothing to adapt is left, or the same weight in two ways
            reject()
        yield path


@each_family
@a_few
@given(data=st.data())
def test_our_delta_is_what_pefts_merge_adds(family: str, data: st.DataObject) -> None:
    adapter = data.draw(adapters(family))
    with saved(family, adapter) as path:
        base = BaseModel.from_model(trips.base_model(family))
        try:
            added = trips.merged(path, family)
        except trips.NotLoadable:
            with pytest.raises(AdapterInvalid, match="rank"):
                read_checkpoint(path, base)
            return
        checkpoint = read_checkpoint(path, base)
        assert_same_deltas(checkpoint, added)
        assert_all_consumed(checkpoint, path)
        from_config = read_checkpoint(path, BaseModel.from_config(trips.config_of(family)))
        assert from_config.digest == checkpoint.digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_family
def test_a_file_of_each_dtype(family: str, dtype: torch.dtype) -> None:
    options = {"r": 3, "target_modules": "all-linear", "fan_in_fan_out": family == "gpt2"}
    with saved(family, Adapter(options, dtype, autocast=False)) as path:
        checkpoint = read_checkpoint(path, BaseModel.from_model(trips.base_model(family)))
        assert {weights.a.dtype for weights in checkpoint.modules.values()} == {dtype}
        assert {weights.b.dtype for weights in checkpoint.modules.values()} == {dtype}
        assert_same_deltas(checkpoint, trips.merged(path, family))
        assert_all_consumed(checkpoint, path)


@pytest.mark.parametrize("family", trips.MORE_FAMILIES)
def test_every_matrix_of_other_families(family: str) -> None:
    base = BaseModel.from_model(trips.base_model(family))
    parameters = [p for p, m in base.modules.items() if len(m.shape) == 3 and "experts" in p]
    whole: list[dict[str, Any]] = [{"target_modules": "all-linear"}]
    whole += [{"target_modules": [], "target_parameters": parameters}] if parameters else []
    whole += [
        {"target_modules": [], "target_parameters": [name]}
        for name in sorted({path.rpartition(".")[2] for path in parameters})
    ]
    for options in whole:
        with saved(family, Adapter({"r": 3, "lora_alpha": 5.5, **options})) as path:
            checkpoint = read_checkpoint(path, base)
            assert_same_deltas(checkpoint, trips.merged(path, family))
            assert_all_consumed(checkpoint, path)
            from_config = read_checkpoint(path, BaseModel.from_config(trips.config_of(family)))
            assert from_config.digest == checkpoint.digest


def assert_same_deltas(checkpoint: Checkpoint, added: Mapping[str, torch.Tensor]) -> None:
    adapted = {name for name, delta in added.items() if delta.any()}
    assert set(checkpoint.modules) == adapted
    for name in adapted:
        got, want = checkpoint.delta(name), added[name]
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-5 * want.abs().max(), name


def assert_all_consumed(checkpoint: Checkpoint, path: Path) -> None:
    with safe_open(path / "adapter_model.safetensors", "pt") as file:
        in_file = sorted(file.keys())
    skipped = [entry.name for entry in checkpoint.skipped]
    assert sorted([*checkpoint.consumed, *skipped]) == in_file
    assert all(name.endswith(".base_layer.weight") for name in skipped)


@each_family
@a_few
@given(data=st.data())
def test_add_lora_gives_pefts_unmerged_output(family: str, data: st.DataObject) -> None:
    adapter = data.draw(adapters(family))
    layout = LoraLayout.from_config(trips.config_of(family), max_rank=16, dtype="float32")
    with saved(family, adapter) as path, cache_of(layout, path.parent) as cache:
        try:
            linears = trips.forwards(path, family)
        except trips.NotLoadable:
            reject()
        modules = read_checkpoint(path, layout.base).modules
        elsewhere = [
            name
            for name, weights in modules.items()
            if name not in layout.site_of or not isinstance(weights, LoraWeights)
        ]
        lease = cache.acquire("saved")
        if elsewhere:
            with pytest.raises(AdapterUnsupported) as raised:
                lease.result(10)
            assert any(f"LoRA on {name}" in str(raised.value) for name in elsewhere)
            return
        assert {linear.path for linear in linears} == set(modules)
        with lease:
            for linear in linears:
                assert_same_output(cache, lease, linear)


@contextmanager
def cache_of(layout: LoraLayout, directory: Path) -> Iterator[AdapterCache]:
    with AdapterCache(
        layout,
        directory,
        gpu_bytes=1 << 20,
        gpu_slots=2,
        host_bytes=1 << 20,
        host_block_bytes=4096,
        device="cpu",
    ) as cache:
        yield cache


def assert_same_output(cache: AdapterCache, lease: Any, linear: trips.Linear) -> None:
    site = cache.layout.sites[cache.layout.site_of[linear.path]]
    y = linear.base.clone()
    with cache.lora_batch([(lease, len(y))]) as batch:
        add_lora((y,), linear.x, batch, (site.module,), layer=site.layer)
    error = (y - linear.adapted).abs().max()
    assert error <= 1e-5 * linear.adapted.abs().max(), linear.path
    assert (linear.adapted - linear.base).abs().max() > 100 * error, "LoRA did something"
