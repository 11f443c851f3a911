"""The same id with new content: who gets which, and what becomes of the old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import AdapterKey, AdapterNotFound, Tier
from adaptercache.testing import held_weights


def first_a(cache: Any, lease: Any) -> torch.Tensor:
    return held_weights(cache, lease, 0, "q_proj")[0].clone()


def put_a(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]


@pytest.fixture
def changed(tiny: Any) -> Any:
    """An adapter that is leased, and whose source has changed since."""
    source = tiny.source()
    old, new = tiny.tensors(1), tiny.tensors(2)
    source.put("a", *old)
    with tiny.cache(source) as cache:
        lease = cache.acquire("a").result(10)
        source.put("a", *new)
        yield cache, lease, old[0], new[0]
        lease.release()


def test_new_leases_get_the_new_content_after_a_refresh(changed: Any) -> None:
    cache, _, _, new = changed
    cache.refresh("a").result(10)
    with cache.acquire("a").result(10) as lease:
        assert torch.equal(first_a(cache, lease), put_a(new))


def test_leases_from_before_keep_the_old_bytes(changed: Any) -> None:
    cache, lease, old, _ = changed
    cache.refresh("a").result(10)
    cache.acquire("a").result(10).release()
    assert torch.equal(first_a(cache, lease), put_a(old))


def test_nothing_changes_without_a_refresh(changed: Any) -> None:
    cache, held, _, _ = changed
    with cache.acquire("a").result(10) as lease:
        assert lease.digest == held.digest


def test_the_old_content_goes_once_it_is_released(tiny: Any, changed: Any) -> None:
    cache, lease, _, _ = changed
    cache.refresh("a").result(10)
    assert cache.stats().slots["used"] == 1
    lease.release()
    assert cache.stats().slots["used"] == 0


def test_a_refresh_tells_the_key_that_the_id_stands_for(changed: Any) -> None:
    cache, held, _, _ = changed
    key = cache.refresh("a").result(10)
    assert isinstance(key, AdapterKey)
    assert key.adapter_id == "a"
    assert key != held.key


def test_a_change_of_alpha_alone_is_another_digest(tiny: Any) -> None:
    source = tiny.source()
    tensors, config = tiny.tensors(1)
    source.put("a", tensors, config)
    with tiny.cache(source) as cache, cache.acquire("a").result(10) as old:
        source.put("a", tensors, config | {"lora_alpha": 1})
        cache.refresh("a").result(10)
        with cache.acquire("a").result(10) as new:
            assert new.digest != old.digest
            assert held_weights(cache, new, 0, "q_proj")[2] == 1 / 4
            assert held_weights(cache, old, 0, "q_proj")[2] == 8 / 4


def test_a_change_of_the_files_that_is_none_of_content_keeps_the_digest(tiny: Any) -> None:
    source = tiny.source()
    tensors, config = tiny.tensors(1)
    source.put("a", tensors, config)
    with tiny.cache(source) as cache, cache.acquire("a").result(10) as old:
        source.put("a", tensors, config | {"lora_dropout": 0.5})
        assert cache.refresh("a").result(10) != old.key
        with cache.acquire("a").result(10) as new:
            assert (new.digest, new.slot) == (old.digest, old.slot)


def test_the_hook_is_told_of_a_revision_once_with_both_digests(tiny: Any) -> None:
    told: list[Any] = []
    source = tiny.source()
    source.put("a", *tiny.tensors(1))
    with tiny.cache(source, on_revision=lambda *args: told.append(args)) as cache:
        old = cache.acquire("a").result(10)
        cache.refresh("a").result(10)
        source.put("a", *tiny.tensors(2))
        cache.refresh("a").result(10)
        with cache.acquire("a").result(10) as new:
            assert tiny.wait_until(lambda: bool(told))
            assert told == [("a", old.digest, new.digest)]
        old.release()


def test_content_that_went_back_is_served_again(tiny: Any) -> None:
    source = tiny.source()
    one, two = tiny.tensors(1), tiny.tensors(2)
    with tiny.cache(source) as cache:
        digests = []
        for version in (one, two, one):
            source.put("a", *version)
            cache.refresh("a").result(10)
            with cache.acquire("a").result(10) as lease:
                digests.append(lease.digest)
                assert torch.equal(first_a(cache, lease), put_a(version[0]))
    assert digests[0] == digests[2] != digests[1]


def test_an_id_that_shares_content_keeps_it_when_the_other_is_removed(tiny: Any) -> None:
    source = tiny.source()
    for adapter_id in ("a", "b"):
        source.put(adapter_id, *tiny.tensors(1))
    with tiny.cache(source) as cache:
        tiny.load(cache, "a", "b")
        cache.remove("a")
        assert cache.resident(Tier.GPU) == {"b"}


def test_removing_a_leased_adapter_leaves_its_bytes_until_it_is_released(changed: Any) -> None:
    cache, lease, old, _ = changed
    cache.remove("a")
    assert torch.equal(first_a(cache, lease), put_a(old))
    lease.release()
    assert cache.stats().slots["used"] == 0


def test_what_was_put_is_gone_when_it_is_removed(tiny: Any) -> None:
    with tiny.cache() as cache:
        cache.put("a", *tiny.tensors(1)).result(10)
        tiny.load(cache, "a")
        cache.remove("a")
        with pytest.raises(AdapterNotFound):
            cache.acquire("a").result(10)


def test_what_was_put_hides_what_the_source_has_until_it_is_removed(tiny: Any) -> None:
    source = tiny.source("a")
    tensors, config = tiny.tensors(77)
    with tiny.cache(source) as cache:
        cache.put("a", tensors, config).result(10)
        with cache.acquire("a").result(10) as lease:
            assert torch.equal(first_a(cache, lease), put_a(tensors))
        cache.remove("a")
        with cache.acquire("a").result(10) as lease:
            assert not torch.equal(first_a(cache, lease), put_a(tensors))


def test_changing_the_tensors_after_put_changes_nothing(tiny: Any) -> None:
    tensors, config = tiny.tensors(1)
    wanted = put_a(tensors).clone()
    with tiny.cache() as cache:
        future = cache.put("a", tensors, config)
        for tensor in tensors.values():
            tensor.zero_()
        future.result(10)
        with cache.acquire("a").result(10) as lease:
            assert torch.equal(first_a(cache, lease), wanted)


def test_two_hundred_versions_of_one_id_leave_one(tiny: Any, tmp_path: Path) -> None:
    tensors, config = tiny.tensors(1)
    with tiny.cache(disk_dir=tmp_path) as cache:
        for version in range(200):
            put_a(tensors).fill_(version)
            cache.put("a", tensors, config).result(10)
            with cache.acquire("a").result(10) as lease:
                assert first_a(cache, lease)[0, 0] == version
        assert tiny.wait_until(
            lambda: tiny.idle(cache) and len(list((tmp_path / "objects").iterdir())) == 1
        )
        stats = cache.stats()
        assert stats.resident_adapters == {Tier.GPU: 1, Tier.HOST: 1, Tier.DISK: 1}
        assert stats.slots["used"] == 1
        assert len(list((tmp_path / "index").iterdir())) == 1
        ledger = cache._ledger
        assert len(ledger.catalog) == 1
        assert not ledger.waiting.grants()


def test_content_on_disk_serves_the_next_run_without_reading_the_source(
    tiny: Any, tmp_path: Path
) -> None:
    source = tiny.source("a")
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    reads = source.calls["read", "a"]
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    assert source.calls["read", "a"] == reads
