"""What a newcomer got wrong, and was told too little about."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adaptercache import (
    AdapterNotFound,
    AdapterUnsupported,
    CacheClosed,
    CapacityError,
    KVLayout,
    LoadFailed,
    LoraLayout,
    Request,
    Tier,
)
from adaptercache.kernels import add_lora
from adaptercache.testing import random_adapter


def save(tiny: Any, folder: Path) -> Path:
    tensors, config = random_adapter(tiny.layout.base, rank=4, seed=1, dtype=torch.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_batch_is_of_no_use_after_its_block(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        lease = cache.acquire("a").result(10)
        with cache.lora_batch([(lease, 2)]) as lora:
            x = torch.randn(2, 32, device=lora.stack.device)
            y = torch.zeros(2, 32, device=lora.stack.device)
            add_lora(y, x, lora, ("q_proj",), 0)
        lease.release()
        with pytest.raises(RuntimeError, match="has ended"):
            add_lora(y, x, lora, ("q_proj",), 0)


def test_a_source_that_is_not_there_is_refused(tiny: Any, tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", Path(__file__)):
        with pytest.raises(NotADirectoryError):
            tiny.cache(source)
    with pytest.raises(TypeError, match="source 5"):
        tiny.cache(5)


def test_a_source_that_went_away_is_no_missing_adapter(tiny: Any, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    save(tiny, root / "a")
    with tiny.cache(root) as cache:
        with pytest.raises(AdapterNotFound):
            cache.acquire("b").result(10)
        shutil.rmtree(root)
        with pytest.raises(LoadFailed):
            cache.acquire("a").result(10)


def test_a_failed_lease_was_not_dropped(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), tiny.cache(tiny.source("a")) as cache:
        for _ in range(3):
            with pytest.raises(AdapterNotFound):
                cache.acquire("ghost").result(10)
        cache.acquire("a").result(10)  # dropped
        assert tiny.wait_until(lambda: cache.stats().leases == 0)
    dropped = [line for line in caplog.messages if "dropped unreleased" in line]
    assert dropped == ["a lease on 'a' was dropped unreleased"]
    about_ghost = [record for record in caplog.records if "ghost" in record.getMessage()]
    assert {record.levelname for record in about_ghost} == {"INFO"}


@pytest.mark.parametrize("device", ["cuda:99", "mps", "meta"])
def test_a_device_that_is_not_there_is_named(tiny: Any, device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}'"):
        tiny.cache(device=device)


@pytest.mark.parametrize("name", ["host_bytes", "disk_bytes", "gpu_slots", "host_block_bytes"])
@pytest.mark.parametrize("value", [2e6, "8GB"])
def test_a_budget_that_is_no_int_is_named(tiny: Any, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        tiny.cache(**{name: value})


def test_an_arena_that_the_machine_does_not_have(tiny: Any) -> None:
    with pytest.raises(CapacityError, match="gpu_bytes"):
        tiny.cache(pages=1 << 36)


def test_an_arena_that_leaves_kv_nothing(tiny: Any) -> None:
    with pytest.raises(CapacityError, match="max_rank 16"):
        tiny.cache(pages=17)
    with tiny.cache(pages=18) as cache:
        assert cache.pages.allocate(1)


def test_pages_of_a_closed_cache(tiny: Any) -> None:
    cache = tiny.cache()
    cache.close()
    with pytest.raises(CacheClosed):
        cache.pages.allocate(1)


@pytest.mark.parametrize("adapter_id", [7, b"a", ("a",)])
def test_an_id_is_a_string(tiny: Any, adapter_id: Any) -> None:
    with pytest.raises(TypeError, match="adapter id"):
        Request("r", adapter_id)
    with tiny.cache(tiny.source("a")) as cache:
        with pytest.raises(TypeError, match="adapter id"):
            cache.acquire(adapter_id)
        with pytest.raises(TypeError, match="adapter id"):
            cache.prefetch(["a", adapter_id])


def test_other_arguments(tiny: Any) -> None:
    with pytest.raises(ValueError, match="not negative"):
        Request("r", None, num_tokens=-1)
    with pytest.raises(ValueError, match="bf16"):
        KVLayout(block_size=16, kv_heads=1, head_dim=16, dtype="bf16")
    with pytest.raises(TypeError, match="all-linear"):
        LoraLayout(tiny.layout.base, targets="q_proj")
    assert LoraLayout(tiny.layout.base, dtype=torch.float16).dtype == "float16"  # type: ignore[arg-type]
    with tiny.cache(tiny.source("a")) as cache:
        with pytest.raises(ValueError, match="to="):
            cache.prefetch(["a"], to=Tier.REMOTE)
        with pytest.raises(TypeError, match="ndarray"):
            cache.put("a", {"w": torch.zeros(1).numpy()}, {})


def test_an_error_names_no_folder_of_ours(tiny: Any, tmp_path: Path) -> None:
    folder = save(tiny, tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refusal = pytest.raises(AdapterUnsupported, match=r"where: adapter_model\.bin")
    with tiny.cache(tmp_path, disk_dir=tmp_path / "disk") as cache, refusal:
        cache.acquire("a").result(10)


def test_a_hint_that_failed_is_not_tried_again(tiny: Any) -> None:
    source = tiny.source("a")
    with tiny.cache(source) as cache:
        cache.prefetch(["ghost"])
        assert tiny.wait_until(lambda: cache.stats().errors.get("AdapterNotFound") == 1)
        time.sleep(1.3)  # over its first back-off
        tiny.load(cache, "a")
        assert tiny.wait_until(lambda: tiny.idle(cache))
        assert cache.stats().errors == {"AdapterNotFound": 1}


def test_what_is_no_request_and_no_lease_is_named(tiny: Any) -> None:
    request = Request("r", "a")
    with tiny.cache(tiny.source("a")) as cache, cache.acquire("a").result(10) as lease:
        for waiting in (["a"], [("r", "a")], [None], [lease]):
            with pytest.raises(TypeError, match="give a Request"):
                cache.admit(waiting)
        for running in (
            [lease],
            [request],
            [(lease, request)],
            [(request, None)],
            [(request,)],
            ["ab"],
        ):
            with pytest.raises(TypeError, match=r"give \(Request, Lease\)"):
                cache.admit([], running=running)
        for pairs in ([lease], [(lease,)], [("a", 1)], [(None, 1)], [(request, 1)], [(1, lease)]):
            with pytest.raises(TypeError, match=r"give \(Lease, number of tokens\)"):
                cache.lora_batch(pairs).__enter__()
        for tokens in (1.0, "1", None):
            with pytest.raises(TypeError, match=r"give \(Lease, number of tokens\)"):
                cache.lora_batch([(lease, tokens)]).__enter__()
        for wrong in (5, None, request):
            with pytest.raises(TypeError, match="waiting"):
                cache.admit(wrong)
            with pytest.raises(TypeError, match="running"):
                cache.admit([], running=wrong)
            with pytest.raises(TypeError, match="pairs"):
                cache.lora_batch(wrong).__enter__()
        for most in (1.5, "2"):
            with pytest.raises(TypeError, match="max_adapters"):
                cache.admit([], max_adapters=most)
        assert cache.admit([request]).admitted  # nothing of that did any harm


@pytest.mark.parametrize("value", [1.5, "1", None])
def test_what_is_no_number_of_a_request_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="num_tokens"):
        Request("r", None, num_tokens=value)
    with pytest.raises(TypeError, match="kv_pages"):
        Request("r", None, kv_pages=value)
