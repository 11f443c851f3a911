"""What serving stacks got wrong about names, KV and waiting: field cases of sections E and F
(``tests/field_cases.md``), each on a whole cache."""

from __future__ import annotations

import time
from typing import Any

from adaptercache import Request, prefix_keys
from adaptercache.testing import FaultySource

PROMPT = list(range(64))


def keys_of(lease: Any) -> list[bytes]:
    return prefix_keys(PROMPT, block_size=16, adapter=lease.digest)


def test_kv_of_content_that_was_replaced_under_its_name_is_never_hit(tiny: Any) -> None:
    """Row 124."""
    source = tiny.source("a")
    with tiny.cache(source) as cache:
        with cache.acquire("a") as lease:
            old = keys_of(lease)
        source.put("a", *tiny.tensors(7))
        cache.refresh("a").result(10)
        with cache.acquire("a") as lease:
            new = keys_of(lease)
        assert set(old).isdisjoint(new)
        source.put("a", *tiny.tensors(0))  # the bytes of the beginning, published again
        cache.refresh("a").result(10)
        with cache.acquire("a") as lease:
            assert keys_of(lease) == old


def test_another_adapter_under_a_name_that_was_removed_is_that_other(tiny: Any) -> None:
    """Row 127."""
    source = tiny.source("a")
    with tiny.cache(source) as cache:
        with cache.acquire("a") as lease:
            old = lease.digest
        cache.remove("a")
        source.put("a", *tiny.tensors(7))
        with cache.acquire("a") as lease:
            assert lease.digest != old


def test_a_store_of_kv_that_several_instances_share_mixes_no_adapters(tiny: Any) -> None:
    """Row 129: the store knows keys and nothing else."""
    store: dict[bytes, tuple[str | None, int]] = {}
    ids = (None, "a", "b")
    for _ in range(2):  # two instances, each of which numbers its slots as it likes
        with tiny.cache(tiny.source("a", "b")) as cache:
            for adapter_id in ids:
                with cache.acquire(adapter_id) as lease:
                    for block, key in enumerate(keys_of(lease)):
                        assert store.setdefault(key, (adapter_id, block)) == (adapter_id, block)
    assert len(store) == len(ids) * 4


def test_a_request_that_is_put_back_and_resumed_keeps_its_namespace(tiny: Any) -> None:
    """Row 131."""
    with tiny.cache(tiny.source("a", "b"), gpu_slots=1) as cache:
        with cache.acquire("a") as lease:
            before, digest = keys_of(lease), lease.digest
        with cache.acquire("b"):  # it takes the only slot meanwhile
            assert cache.acquire("a").ready is False
        with cache.acquire("a") as lease:
            parent = before[1]
            rest = prefix_keys(PROMPT[32:], block_size=16, adapter=lease.digest, parent=parent)
            assert lease.digest == digest
            assert before[:2] + rest == before


def test_a_refresh_reads_the_source_once(tiny: Any) -> None:
    """Row 136."""
    source = tiny.source("a")
    with tiny.cache(source) as cache:
        tiny.load(cache, "a")
        source.put("a", *tiny.tensors(7))
        cache.refresh("a").result(10)
        reads = source.calls["read", "a"]
        for step in range(20):
            ((_, lease),) = cache.admit([Request(f"r{step}", "a")]).admitted or [(None, None)]
            if lease is None:
                assert tiny.wait_until(lambda: tiny.idle(cache))
            else:
                lease.release()
        assert source.calls["read", "a"] == reads


def test_a_source_that_stands_still_keeps_no_step_waiting(tiny: Any) -> None:
    """Row 152."""
    source = FaultySource(tiny.source("a", "b"))
    with tiny.cache(source) as cache:
        tiny.load(cache, "a")
        source.gate.clear()
        try:
            cold, refreshed = cache.acquire("b"), cache.refresh("a")
            start = time.monotonic()
            for step in range(100):
                waiting = [Request(f"c{step}", "b"), Request(f"h{step}", "a"), Request(f"n{step}")]
                admission = cache.admit(waiting)
                with cache.lora_batch([(lease, 1) for _, lease in admission.admitted]):
                    pass
                for _, lease in admission.admitted:
                    lease.release()
                assert [r.request_id for r, _ in admission.admitted] == [f"h{step}", f"n{step}"]
            assert time.monotonic() - start < 2.0
        finally:
            source.gate.set()
        cold.result(10).release()
        refreshed.result(10)
