"""`restore` while `drop_gpu` was under way found the memory still there, and the cache went on
serving out of what was freed a moment later: zeros, other adapters' weights, leases that hung."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from adaptercache import AdapterCacheError, CacheClosed, Tier
from adaptercache.kernels import add_lora


def test_the_other_one_is_refused_meanwhile(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        tiny.load(cache, "a")
        entered, go = threading.Event(), threading.Event()
        drain = cache._gpu.streams.drain

        def slow_drain() -> None:
            entered.set()
            assert go.wait(10)
            drain()

        monkeypatch.setattr(cache._gpu.streams, "drain", slow_drain)
        thread = threading.Thread(target=cache.drop_gpu)
        thread.start()
        assert entered.wait(10)
        for act in (cache.restore, cache.drop_gpu):
            with pytest.raises(AdapterCacheError, match="under way"):
                act()
        pending = cache.acquire("a")
        go.set()
        thread.join()
        assert not cache._gpu.is_up
        cache.restore()
        with pending as lease, cache.lora_batch([(lease, 1)]):
            pass


def test_a_hook_of_one_may_not_call_the_other(tiny: Any) -> None:
    refused: list[AdapterCacheError] = []

    def restore(tier: Tier, digest: bytes) -> None:
        if tier is Tier.GPU:
            try:
                cache.restore()
            except AdapterCacheError as error:
                refused.append(error)

    with tiny.cache(tiny.source("a", "b"), on_evict=restore) as cache:
        tiny.load(cache, "a", "b")
        cache.drop_gpu()
        assert len(refused) == 2
        cache.restore()
        assert cache.resident(Tier.GPU) == {"a", "b"}
        assert tiny.ends(cache.drop_gpu)


def test_a_cache_closed_during_restore_keeps_no_memory(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny.cache(tiny.source("a"))
    cache.drop_gpu()
    restore = cache._gpu.restore

    def slow_restore() -> None:
        restore()
        cache.close()
        restore()

    monkeypatch.setattr(cache._gpu, "restore", slow_restore)
    with pytest.raises(CacheClosed):
        cache.restore()
    assert not cache._gpu.is_up


def test_threads_that_drop_restore_and_serve(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b", "c")) as cache:
        until = time.monotonic() + 1.5
        wrong: list[BaseException] = []

        def again(act: Any) -> None:
            while time.monotonic() < until:
                try:
                    act()
                except AdapterCacheError:  # in use, or the other one is under way
                    pass
                except BaseException as error:
                    wrong.append(error)
                time.sleep(0.0005)

        def serve() -> None:
            name = random.choice("abc")
            tensors, config = tiny.tensors("abc".index(name))
            of = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
            a, b = (tensors[f"{of}{side}.weight"].double() for side in "AB")
            x = torch.randn(2, 32)
            with cache.acquire(name) as lease, cache.lora_batch([(lease, 2)]) as batch:
                x, y = (each.to(batch.stack.device) for each in (x, torch.zeros(2, 32)))
                add_lora(y, x, batch, ("q_proj",), 0)
            want = x.cpu().double() @ a.t() @ b.t() * (config["lora_alpha"] / config["r"])
            assert torch.allclose(y.cpu().double(), want, rtol=1e-3, atol=1e-4)

        threads = [
            threading.Thread(target=again, args=(act,), daemon=True)
            for act in (cache.drop_gpu, cache.restore, cache.restore, serve)
        ]
        for thread in threads:
            thread.start()
        threads[0].join(20)
        ended = time.monotonic() + 20
        while threads[3].is_alive() and time.monotonic() < ended:
            with suppress(AdapterCacheError):  # it may be asleep, and a lease wait for it
                cache.restore()
            time.sleep(0.01)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
