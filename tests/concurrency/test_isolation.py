"""What goes wrong with one adapter, or in a user's code, harms nobody else."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from adaptercache import (
    AdapterCache,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    LoadFailed,
    LoraLayout,
    Request,
    Tier,
)
from adaptercache.kernels import add_lora
from adaptercache.testing import FakeSource, FaultySource, held_weights, random_adapter
from adaptercache.tiers.remote import CONFIG, WEIGHTS


def serve(tiny: Any, cache: AdapterCache, ids: list[str]) -> tuple[set[str], dict[str, type]]:
    """Admit a request for each; who was admitted, and what the others failed with."""
    waiting = [Request(f"r-{adapter_id}", adapter_id) for adapter_id in ids]
    admitted, failed = set(), {}
    for _ in range(50):
        admission = cache.admit(waiting)
        for request, lease in admission.admitted:
            admitted.add(request.adapter_id)
            lease.release()
        failed.update((request.adapter_id, type(error)) for request, error in admission.failed)
        waiting = admission.deferred
        if not waiting:
            break
        tiny.wait_until(lambda: tiny.idle(cache))
    return admitted, failed


def test_each_failure_is_its_own_requests_alone(tiny: Any) -> None:
    source = tiny.source("good", "fails", "fine")
    source.put_files("broken", {CONFIG: b"{", WEIGHTS: b""})
    wide = LoraLayout.from_config(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
        }
    )
    source.put("other base", *random_adapter(wide.base, rank=4))
    source.put("rank", *tiny.tensors(5, rank=17))
    faulty = FaultySource(source)
    faulty.failing.add("fails")
    with tiny.cache(faulty) as cache:
        ids = ["broken", "good", "unknown", "fails", "other base", "fine", "rank"]
        admitted, failed = serve(tiny, cache, ids)
    assert admitted == {"good", "fine"}
    assert failed == {
        "broken": AdapterInvalid,
        "unknown": AdapterNotFound,
        "fails": LoadFailed,
        "other base": AdapterInvalid,
        "rank": AdapterUnsupported,
    }


def test_an_adapter_in_anothers_place_contributes_its_own_weights_alone(tiny: Any) -> None:
    """One slot: first the largest there is, then fewer modules, layers and ranks."""
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    steps: list[dict[str, Any]] = [
        {"rank": 16, "targets": every},
        {"rank": 8, "targets": every},
        {"rank": 16, "targets": ("q_proj", "v_proj")},
        {"rank": 1, "targets": ("v_proj",), "layers": (1,)},
        {"rank": 16, "targets": every},
        {"rank": 2, "targets": ("down_proj",), "layers": (0,)},
    ]
    with tiny.cache(gpu_slots=1) as cache:
        for seed, options in enumerate(steps):
            tensors, config = tiny.tensors(seed, **options)
            cache.put(f"a{seed}", tensors, config).result(10)
            with cache.acquire(f"a{seed}").result(10) as lease:
                for site in tiny.layout.sites:
                    found = held_weights(cache, lease, site.layer, site.module)
                    a = tensors.get(f"base_model.model.{site.path}.lora_A.weight")
                    assert (found is None) == (a is None)
                    if found is not None and a is not None:
                        assert found[0].equal(a)


@pytest.fixture
def folder(tmp_path: Path, tiny: Any) -> Path:
    """A directory of adapters, one a subfolder of a team."""
    for number, name in enumerate(("a", "team/b")):
        tensors, config = tiny.tensors(number)
        (tmp_path / name).mkdir(parents=True)
        safetensors.torch.save_file(tensors, tmp_path / name / WEIGHTS)
        import json

        (tmp_path / name / CONFIG).write_text(json.dumps(config))
    return tmp_path


def test_adapters_deleted_at_the_source_go_on_serving_from_their_copies(
    tiny: Any, folder: Path
) -> None:
    with tiny.cache(folder) as cache:
        tiny.load(cache, "a", "team/b")
        (folder / "a" / WEIGHTS).unlink()
        (folder / "a" / CONFIG).unlink()
        (folder / "a").rmdir()
        tiny.load(cache, "a")


def test_a_folder_without_weights_is_invalid(tiny: Any, folder: Path) -> None:
    (folder / "a" / WEIGHTS).unlink()
    with tiny.cache(folder) as cache, pytest.raises(AdapterInvalid):
        cache.acquire("a").result(10)


def test_weights_that_cannot_be_opened_fail_the_load(tiny: Any, folder: Path) -> None:
    (folder / "a" / CONFIG).unlink()
    (folder / "a" / CONFIG).symlink_to(folder / "a" / CONFIG)  # a loop
    with tiny.cache(folder) as cache:
        with pytest.raises((LoadFailed, AdapterInvalid)):
            cache.acquire("a").result(10)
        tiny.load(cache, "team/b")


# Hooks and handlers


def test_a_hook_that_raises_is_logged_and_harms_nobody(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("the hook is broken")

    with tiny.cache(tiny.source("a", "b"), gpu_slots=1, on_evict=fail) as cache:
        tiny.load(cache, "a", "b", "a")
    assert any("hook" in record.getMessage() for record in caplog.records)


def test_hooks_may_call_the_cache(tiny: Any) -> None:
    asked: list[Any] = []

    def ask(*args: object) -> None:
        lease = cache.acquire("a")
        asked.append((cache.stats().leases, cache.resident(Tier.GPU), lease.ready))
        cache.prefetch(["b"])
        lease.release()

    cache = tiny.cache(tiny.source("a", "b", "c"), gpu_slots=1, on_evict=ask, on_revision=ask)
    with cache:
        tiny.load(cache, "a", "b", "c")
        assert tiny.wait_until(lambda: bool(asked))


def test_a_handler_of_logging_may_call_the_cache(tiny: Any) -> None:
    class Asks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.getMessage(), cache.stats().leases))

    lines: list[Any] = []
    logger, handler = logging.getLogger("adaptercache"), Asks()
    with tiny.cache(tiny.source("a")) as cache:
        level = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
        try:
            tiny.load(cache, "a")
            with pytest.raises(AdapterNotFound):
                cache.acquire("unknown").result(10)
            tiny.wait_until(lambda: len(lines) >= 4, 2)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    assert len(lines) >= 4


# Floods


FLOOD = 100_000


@pytest.fixture
def flooded(tiny: Any) -> Any:
    source = tiny.source("a", "b")
    with tiny.cache(source) as cache:
        tiny.load(cache, "a", "b")
        yield cache, source


def test_a_flood_of_leases_on_unknown_ids_evicts_nothing(tiny: Any, flooded: Any) -> None:
    cache, _ = flooded
    for number in range(FLOOD // 10):
        cache.acquire(f"unknown-{number}").release()
    tiny.wait_until(lambda: tiny.idle(cache), 30)
    assert cache.resident(Tier.GPU) == {"a", "b"}
    assert cache.resident(Tier.HOST) == {"a", "b"}


def test_a_flood_of_requests_for_unknown_ids_is_all_failed(tiny: Any, flooded: Any) -> None:
    cache, _ = flooded
    failed: Counter[type] = Counter()
    ids = iter(range(FLOOD // 10))
    waiting: list[Request] = []
    while True:
        fresh = [Request(f"r{n}", f"unknown-{n}") for n in islice(ids, 200)]
        if not fresh and not waiting:
            break
        admission = cache.admit(waiting + fresh)
        failed.update(type(error) for _, error in admission.failed)
        waiting = admission.deferred
        tiny.wait_until(lambda: tiny.idle(cache), 30)
    assert failed == {AdapterNotFound: FLOOD // 10}


class Knows(FakeSource):
    """Counts nothing, for that would grow."""

    def _count(self, method: str, adapter_id: str) -> None:
        pass


def test_a_flood_of_unknown_ids_leaves_tables_of_bounded_size(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("adaptercache"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("adaptercache.loads"), "disabled", True)
    with tiny.cache(Knows()) as cache:
        ledger = cache._ledger
        ledger.failures._capacity = 1000

        def flood(name: str) -> int:
            for number in range(5000):
                cache.acquire(f"{name}-{number}").release()
            assert tiny.wait_until(lambda: tiny.idle(cache), 60)
            gc.collect()  # errors and their tracebacks, in circles
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            once = flood("first")
            again = flood("second")
        finally:
            tracemalloc.stop()
        assert again - once < 400_000  # 5000 ids of anything would be more
        assert len(ledger.failures) <= 1000


def test_a_whole_flood_of_unknown_ids_ends(tiny: Any, flooded: Any) -> None:
    cache, _ = flooded
    for number in range(FLOOD):
        cache.acquire(f"unknown-{number}").release()
    assert tiny.wait_until(lambda: tiny.idle(cache), 60)
    assert cache.resident(Tier.GPU) == {"a", "b"}


def test_an_adapter_behind_a_flood_is_served(tiny: Any, flooded: Any) -> None:
    cache, source = flooded
    source.put("wanted", *tiny.tensors(5))
    for number in range(3000):
        cache.acquire(f"unknown-{number}").release()
    cache.acquire("wanted").result(30).release()


def steps_of(act: Any) -> int:
    """How many lines of Python the library runs: a cost that is the same on any machine."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line" and "/adaptercache/" in frame.f_code.co_filename
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return count


def test_a_hit_costs_the_same_however_many_ids_are_known(tiny: Any, flooded: Any) -> None:
    from adaptercache.catalog import Known

    cache, _ = flooded

    def hit() -> None:
        cache.acquire("a").release()

    def step() -> None:
        for _, lease in cache.admit([Request("r1", "a"), Request("r2", "b")]).admitted:
            lease.release()

    before = steps_of(hit), steps_of(step)
    with cache._deciding.lock:
        for number in range(100_000):
            known = Known("1", number.to_bytes(32, "big"), 4096)
            cache._ledger.catalog.learn(f"known-{number}", known)
    assert (steps_of(hit), steps_of(step)) == before


# Without a GPU, and without triton

PROGRAM = """
import sys
sys.modules["triton"] = None
import tiny, torch
from adaptercache.kernels import add_lora
tiny = tiny.Tiny
with tiny.cache(tiny.source("a")) as cache, cache.acquire("a") as lease:
    with cache.lora_batch([(lease, 2)]) as batch:
        y = torch.zeros(2, 32)
        add_lora(y, torch.ones(2, 32), batch, ("q_proj",), 0)
    assert y.abs().sum() > 0
"""


def test_the_cpu_device_works_where_triton_cannot_be_imported() -> None:
    here = Path(__file__).parent
    path = f"{here.parent}:{here.parents[1]}"
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        env={"PYTHONPATH": os.pathsep.join([path, *sys.path]), "CUDA_VISIBLE_DEVICES": ""},
        timeout=60,
    )


def test_a_batch_holds_what_it_lists_though_the_leases_are_released(tiny: Any) -> None:
    import torch

    with tiny.cache(tiny.source("a", "b"), gpu_slots=1) as cache:
        lease = cache.acquire("a").result(10)
        with cache.lora_batch([(lease, 1)]) as batch:
            x = torch.ones(1, 32, device=batch.stack.device)
            y, again = torch.zeros_like(x), torch.zeros_like(x)
            add_lora(y, x, batch, ("q_proj",), 0)
            lease.release()
            pending = cache.acquire("b")
            tiny.wait_until(lambda: tiny.idle(cache))
            add_lora(again, x, batch, ("q_proj",), 0)
        assert y.equal(again)
        pending.release()


@pytest.mark.parametrize("state", ["pending", "released", "failed"])
def test_a_batch_refuses_a_lease_that_holds_nothing(tiny: Any, state: str) -> None:
    source = FaultySource(tiny.source("a"))
    with tiny.cache(source) as cache:
        if state == "pending":
            source.gate.clear()
            lease = cache.acquire("a")
        elif state == "released":
            lease = cache.acquire("a").result(10)
            lease.release()
        else:
            lease = cache.acquire("unknown")
            tiny.wait_until(lambda: lease.ready)
        with pytest.raises((RuntimeError, AdapterNotFound)), cache.lora_batch([(lease, 1)]):
            pass
        source.gate.set()
        lease.release()
