"""Requests that are admitted while their adapter is still being copied to the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adaptercache import AdapterCache, AdapterCacheError, Lease, LoadFailed, Request, Tier
from adaptercache.kernels import add_lora
from adaptercache.testing import check_consistent, held_weights
from adaptercache.tiers.gpu import GpuTier
from adaptercache.tiers.host import HostTier


class Gate:
    """Movers stand before they copy to the GPU until told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, write = Gate(), GpuTier.write

    def stand_then_write(*args: Any) -> None:
        gate.reached.set()
        gate.go_on.wait(20)
        write(*args)

    monkeypatch.setattr(GpuTier, "write", stand_then_write)
    yield gate
    gate.go_on.set()


@pytest.fixture
def cache(tiny: Any, gate: Gate) -> Iterator[AdapterCache]:
    """With "a" and "b" in CPU memory; nothing is copied to the GPU by a mover."""
    with tiny.cache(tiny.source("a", "b", "c")) as cache:
        in_host(tiny, cache, "a", "b")
        yield cache
        gate.go_on.set()


def in_host(tiny: Any, cache: AdapterCache, *adapter_ids: str) -> None:
    cache.prefetch(adapter_ids, to=Tier.HOST)
    assert tiny.wait_until(lambda: set(adapter_ids) <= cache.resident(Tier.HOST))


def asks(adapter_id: str, **options: Any) -> Request:
    return Request(f"r-{adapter_id}", adapter_id, pipelined=True, **options)


def admitted(cache: AdapterCache, *requests: Request, **options: Any) -> list[Lease]:
    admission = cache.admit(requests, **options)
    return [lease for _, lease in admission.admitted]


def term(tiny: Any, seed: int, x: torch.Tensor, path: str) -> torch.Tensor:
    """What the adapter of that seed adds, in float64."""
    tensors, config = tiny.tensors(seed)
    a = tensors[f"base_model.model.{path}.lora_A.weight"].double()
    b = tensors[f"base_model.model.{path}.lora_B.weight"].double()
    return x.cpu().double() @ a.T @ b.T * (config["lora_alpha"] / config["r"])


def test_it_is_admitted_at_once_and_its_step_brings_what_no_mover_has(
    tiny: Any, cache: AdapterCache
) -> None:
    (lease,) = admitted(cache, asks("a"))
    assert lease.ready
    assert cache.resident(Tier.GPU) == set()
    device = cache._gpu.device
    with cache.lora_batch([(lease, 3)], pad_to=4) as lora:
        for layer in range(2):
            x = torch.randn(4, 32, device=device)
            y = torch.zeros(4, 32, device=device)
            add_lora(y, x, lora, ("q_proj",), layer)
            want = term(tiny, 0, x, f"model.layers.{layer}.self_attn.q_proj")
            torch.testing.assert_close(y[:3].cpu().double(), want[:3], rtol=1e-4, atol=1e-4)
            assert not y[3:].any()
    lease.release()


def test_without_asking_for_it_nobody_is_admitted_early(cache: AdapterCache) -> None:
    admission = cache.admit([Request("r", "a"), asks("a")])
    assert [request.pipelined for request, _ in admission.admitted] == [True]
    assert admission.reasons == {"r": "loading"}
    for _, lease in admission.admitted:
        lease.release()


def test_what_is_being_copied_for_another_is_waited_for_likewise(
    tiny: Any, cache: AdapterCache, gate: Gate
) -> None:
    pending = cache.acquire("a")
    assert gate.reached.wait(10)
    (lease,) = admitted(cache, asks("a"))
    assert not pending.ready
    with cache.lora_batch([(lease, 1)]) as lora:
        lora.wait(1)
    gate.go_on.set()
    with pending.result(10):
        assert pending.slot == lease.slot
        assert held_weights(cache, lease, 0, "q_proj") is not None
    lease.release()


def test_order_of_arrival_is_kept(cache: AdapterCache) -> None:
    requests = [asks("a"), Request("base"), asks("b")]
    admission = cache.admit(requests)
    assert [request for request, _ in admission.admitted] == requests
    for _, lease in admission.admitted:
        lease.release()


def test_the_cap_on_adapters_counts_it(cache: AdapterCache) -> None:
    admission = cache.admit([asks("a"), asks("b")], max_adapters=1)
    assert [request.adapter_id for request, _ in admission.admitted] == ["a"]
    assert admission.reasons == {"r-b": "max_adapters"}
    admission.admitted[0][1].release()


def test_its_kv_pages_are_promised_beside_its_own(tiny: Any, gate: Gate) -> None:
    with tiny.cache(tiny.source("a"), pages=21) as cache:  # 17 of them are the adapters' floor
        in_host(tiny, cache, "a")
        admission = cache.admit([asks("a", kv_pages=4)])
        assert len(admission.admitted) == 1
        assert cache.pages.allocate(4) is not None
        admission.admitted[0][1].release()
        gate.go_on.set()


def test_it_waits_for_a_step_that_may_still_use_its_pages(
    tiny: Any, cache: AdapterCache, gate: Gate
) -> None:
    pages = cache.pages.allocate(15)  # all but the floor: "a" gets some of them
    assert pages is not None
    with cache.lora_batch([]):
        cache.pages.free(pages)
        admission = cache.admit([asks("a")])
        assert admission.reasons == {"r-a": "loading"}
    (lease,) = admitted(cache, asks("a"))
    lease.release()


def test_a_step_that_never_waits_is_told_so(cache: AdapterCache) -> None:
    (lease,) = admitted(cache, asks("a"))
    with pytest.raises(RuntimeError, match="never waited"), cache.lora_batch([(lease, 1)]):
        pass
    lease.release()


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reading CPU memory fails as often as this says."""
    left, views = [0], HostTier.views

    def fail_or_view(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError("injected")
        return views(*args)

    monkeypatch.setattr(HostTier, "views", fail_or_view)
    return left


def test_a_copy_that_fails_fails_the_step_and_leaks_nothing(
    tiny: Any, cache: AdapterCache, gate: Gate, breaks: list[int]
) -> None:
    breaks[0] = 1
    (lease,) = admitted(cache, asks("a"))
    with pytest.raises(LoadFailed), cache.lora_batch([(lease, 1)]) as lora:
        lora.wait(0)
    gate.go_on.set()
    assert tiny.wait_until(lambda: tiny.idle(cache))
    check_consistent(cache)
    with pytest.raises(AdapterCacheError), cache.lora_batch([(lease, 1)]):
        pass
    assert cache.admit([asks("a")]).reasons == {"r-a": "loading"}  # its pages are held still
    lease.release()
    check_consistent(cache)
    assert cache.stats().pages["adapter"] == 0
    cache.refresh("a").result(10)  # forgets the failure
    (lease,) = admitted(cache, asks("a"))
    with cache.lora_batch([(lease, 1)]) as lora:
        lora.wait(1)
    assert held_weights(cache, lease, 1, "q_proj") is not None
    lease.release()


def test_an_interrupt_while_a_step_queues_a_copy_is_the_steps_own(
    tiny: Any, cache: AdapterCache, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(HostTier, "views", interrupt)
        pending = cache.acquire("a")  # nothing is queued when a request joins it
        assert gate.reached.wait(10)
        (lease,) = admitted(cache, asks("a"))
        with pytest.raises(KeyboardInterrupt), cache.lora_batch([(lease, 1)]) as lora:
            lora.wait(0)
    gate.go_on.set()
    lease.release()
    with pytest.raises(AdapterCacheError):
        pending.result(10)
    assert cache.stats().pages["adapter"] == 0


def test_a_lease_released_before_its_copy_is_there_leaks_nothing(
    tiny: Any, cache: AdapterCache, gate: Gate
) -> None:
    (lease,) = admitted(cache, asks("a"))
    lease.release()
    gate.go_on.set()
    assert tiny.wait_until(lambda: cache.resident(Tier.GPU) == {"a"})
    assert cache.stats().leases == 0


def test_a_cache_may_be_closed_while_a_step_waits_for_a_copy(tiny: Any, gate: Gate) -> None:
    cache = tiny.cache(tiny.source("a"))
    in_host(tiny, cache, "a")
    (lease,) = admitted(cache, asks("a"))
    with cache.lora_batch([(lease, 1)]) as lora:
        lora.wait(0)
        gate.go_on.set()
        assert tiny.ends(cache.close)
