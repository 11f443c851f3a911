"""A bucket as a cache's source: the whole way from the store to the GPU's tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from s3_proxy import Fault, Proxy
from s3_server import BUCKET

from adaptercache import AdapterInvalid, AdapterNotFound, LoadFailed, Tier
from adaptercache.testing import held_weights

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def upload(tiny: Any, publish: Any) -> Callable[[str, int], dict[str, Any]]:
    """Publish the adapter of that number under an id; returns its tensors."""

    def upload(adapter_id: str, number: int, **more: Any) -> dict[str, Any]:
        tensors, config = tiny.tensors(number)
        publish(adapter_id, safetensors.torch.save(tensors), config, **more)
        return tensors

    return upload


def serves(cache: Any, adapter_id: str, tensors: dict[str, Any]) -> bool:
    with cache.acquire(adapter_id).result(20) as lease:
        found = held_weights(cache, lease, 0, "q_proj")
        return found is not None and found[0].equal(tensors[NAME])


def test_an_adapter_is_served_by_its_url(
    tiny: Any, upload: Any, prefix: str, tmp_path: Path
) -> None:
    """Row 212: a root and ids with odd characters, joined."""
    ids = ["team/sql v3", "plus+plus", "per%cent"]
    wanted = {adapter_id: upload(adapter_id, n) for n, adapter_id in enumerate(ids)}
    with tiny.cache(f"s3://{BUCKET}/{prefix}", disk_dir=tmp_path, device="cpu") as cache:
        for adapter_id, tensors in wanted.items():
            assert serves(cache, adapter_id, tensors)
    # Row 220: no name of an adapter is a name on the disk.
    assert not [path for path in tmp_path.rglob("*") if "sql" in path.name or "plus" in path.name]


def test_the_next_run_reads_nothing_but_the_revision(
    tiny: Any, upload: Any, source: Any, proxy: Proxy, tmp_path: Path
) -> None:
    tensors = upload("a", 1)
    for _ in range(2):
        with tiny.cache(source(), disk_dir=tmp_path, device="cpu") as cache:
            assert serves(cache, "a", tensors)
    assert proxy.count("GET", "adapter_model") == 1
    assert proxy.count("GET", "list-type") == 2


def test_an_adapter_replaced_while_it_is_downloaded_comes_whole(
    tiny: Any, upload: Any, source: Any, proxy: Proxy
) -> None:
    upload("a", 1)
    later: dict[str, Any] = {}
    proxy.inject(Fault("call", act=lambda: later.update(upload("a", 2))))
    with tiny.cache(source(), device="cpu") as cache:
        assert serves(cache, "a", later)


def test_a_bit_that_flips_on_the_way_costs_another_download(
    tiny: Any, upload: Any, source: Any, proxy: Proxy
) -> None:
    tensors = upload("a", 1)
    proxy.inject(Fault("flip", after=5000))
    with tiny.cache(source(), device="cpu") as cache:
        assert serves(cache, "a", tensors)
    assert proxy.count("GET", "adapter_model") == 2


def test_a_bit_that_always_flips_is_never_served(
    tiny: Any, upload: Any, source: Any, proxy: Proxy
) -> None:
    upload("a", 1)
    proxy.inject(Fault("flip", after=5000, times=99))
    with (
        tiny.cache(source(), device="cpu") as cache,
        pytest.raises(LoadFailed, match="checksum"),
    ):
        cache.acquire("a").result(20)


PUBLISHED_WRONG = {
    "html": b"<html><body>404</body></html>" * 10,
    "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "empty": b"",
    "cut": None,
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("what", PUBLISHED_WRONG)
def test_what_was_published_wrong_is_refused_by_name_and_not_tried_again(
    tiny: Any, publish: Any, source: Any, proxy: Proxy, tmp_path: Path, what: str
) -> None:
    tensors, config = tiny.tensors(1)
    body = PUBLISHED_WRONG[what]
    publish("a", safetensors.torch.save(tensors)[:-100] if body is None else body, config)
    with tiny.cache(source(), disk_dir=tmp_path, device="cpu") as cache:
        for _ in range(3):
            with pytest.raises(AdapterInvalid):
                cache.acquire("a").result(20)
        assert cache.stats().resident_adapters[Tier.DISK] == 0
    assert proxy.count("GET", "adapter_model") <= 1
    assert list((tmp_path / "objects").iterdir()) == []


def test_deleted_while_it_is_cached_it_goes_on_serving_until_it_is_evicted(
    tiny: Any, upload: Any, source: Any, client: Any, prefix: str
) -> None:
    tensors = upload("a", 1)
    with tiny.cache(source(), device="cpu") as cache:
        assert serves(cache, "a", tensors)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            client.delete_object(Bucket=BUCKET, Key=f"{prefix}/a/{name}")
        assert serves(cache, "a", tensors)
        cache.remove("a")
        with pytest.raises(AdapterNotFound):
            cache.acquire("a").result(20)


def test_a_missing_adapter_is_asked_for_once(tiny: Any, source: Any, proxy: Proxy) -> None:
    now = [0.0]
    with tiny.cache(source(), device="cpu", clock=lambda: now[0]) as cache:
        for _ in range(1000):
            now[0] += 0.009
            with pytest.raises(AdapterNotFound):
                cache.acquire("nobody").result(20)
    assert len(proxy.requests) == 1


def test_republished_in_the_store_it_comes_by_its_ttl(tiny: Any, upload: Any, source: Any) -> None:
    now = [0.0]
    old = upload("a", 1)
    with tiny.cache(source(), device="cpu", clock=lambda: now[0], revision_ttl_s=60) as cache:
        assert serves(cache, "a", old)
        new = upload("a", 2)
        assert serves(cache, "a", old)
        now[0] += 61
        cache.acquire("a").release()
        assert tiny.wait_until(lambda: serves(cache, "a", new))


def test_version_after_version_in_the_store(
    tiny: Any, upload: Any, source: Any, tmp_path: Path
) -> None:
    with tiny.cache(source(), disk_dir=tmp_path, device="cpu") as cache:
        for number in range(12):
            tensors = upload("a", number)
            cache.refresh("a").result(20)
            assert serves(cache, "a", tensors), number
        assert tiny.wait_until(lambda: len(list((tmp_path / "objects").iterdir())) == 1)
        assert cache.stats().resident_adapters == {Tier.GPU: 1, Tier.HOST: 1, Tier.DISK: 1}


def test_closing_does_not_wait_for_a_store_that_is_down(
    tiny: Any, upload: Any, source: Any, proxy: Proxy
) -> None:
    upload("a", 1)
    proxy.inject(Fault("stall", times=99))
    cache = tiny.cache(source(stall_timeout_s=1.0, tries=50), device="cpu")
    lease = cache.acquire("a")
    assert tiny.wait_until(lambda: proxy.count("GET", "adapter_model") >= 1)
    began = time.monotonic()
    cache.close()
    assert time.monotonic() - began < 6
    with pytest.raises(Exception, match="closed"):
        lease.result(1)
