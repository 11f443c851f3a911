"""A source that can't be asked when a run begins: what the disk had last of an id is served, said
in the log, and compared with the source as soon as it answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import AdapterCache, AdapterNotFound, LoadFailed, LoraLayout, Tier
from adaptercache.testing import FakeSource, held_weights


class Store(FakeSource):
    """A source with a name, which may be down."""

    def __init__(self, name: str | None = "store") -> None:
        super().__init__()
        self.name = name
        self.is_down = False

    def revision(self, adapter_id: str) -> str:
        if self.is_down:
            raise OSError("injected: it can't be reached")
        return super().revision(adapter_id)

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        assert not self.is_down
        return super().files(adapter_id, revision)

    def ids(self) -> Iterable[str]:
        return super().ids()


@pytest.fixture
def store(tiny: Any) -> Store:
    store = Store()
    store.put("a", *tiny.tensors(0))
    return store


def ran_before(tiny: Any, source: Any, folder: Path, *ids: str) -> None:
    """An earlier run has left these on the disk."""
    with tiny.cache(source, disk_dir=folder) as cache:
        tiny.load(cache, *(ids or ("a",)))


def serves(cache: AdapterCache, tiny: Any, seed: int, adapter_id: str = "a") -> bool:
    with cache.acquire(adapter_id).result(10) as lease:
        got = held_weights(cache, lease, 0, "q_proj")
        want = tiny.tensors(seed)[0][
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        ]
        return got is not None and torch.equal(got[0], want)


def test_what_the_disk_had_last_is_served_and_said(
    tiny: Any, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran_before(tiny, store, tmp_path)
    store.is_down = True
    with caplog.at_level(logging.WARNING), tiny.cache(store, disk_dir=tmp_path) as cache:
        assert serves(cache, tiny, 0)
        assert serves(cache, tiny, 0)
        loads = cache.stats().loads
        assert loads[Tier.REMOTE, Tier.DISK, "failed"] == 1
    said = [r for r in caplog.records if "had last is served" in r.getMessage()]
    assert [r.adapter_id for r in said] == ["a"]  # type: ignore[attr-defined]
    assert said[0].levelno == logging.WARNING


def test_it_is_compared_with_the_source_as_soon_as_that_answers(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    """Also where nobody has asked for `revision_ttl_s`."""
    ran_before(tiny, store, tmp_path)
    store.is_down, now = True, [0.0]
    with tiny.cache(store, disk_dir=tmp_path, clock=lambda: now[0]) as cache:
        assert serves(cache, tiny, 0)
        store.put("a", *tiny.tensors(1))
        now[0] += 11
        assert serves(cache, tiny, 0), "still down"
        assert tiny.wait_until(lambda: tiny.idle(cache))
        store.is_down = False
        now[0] += 5
        assert serves(cache, tiny, 0), "asked a short while ago"
        now[0] += 11
        cache.acquire("a").result(10).release()
        assert tiny.wait_until(lambda: serves(cache, tiny, 1))
        asked = store.calls["revision", "a"]
        now[0] += 1000
        assert serves(cache, tiny, 1)
        assert tiny.wait_until(lambda: tiny.idle(cache))
        assert store.calls["revision", "a"] == asked, "what is known for sure isn't asked for"


def test_who_asks_for_a_look_is_told_that_there_was_none(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    ran_before(tiny, store, tmp_path)
    store.is_down = True
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        with pytest.raises(LoadFailed, match="had last"):
            cache.refresh("a").result(10)
        assert serves(cache, tiny, 0)


def test_what_the_source_says_is_missing_is_not_served(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    ran_before(tiny, store, tmp_path)
    store.remove("a")
    with tiny.cache(store, disk_dir=tmp_path) as cache, pytest.raises(AdapterNotFound):
        cache.acquire("a").result(10)


def test_what_the_disk_never_had_fails(tiny: Any, store: Store, tmp_path: Path) -> None:
    ran_before(tiny, store, tmp_path)
    store.is_down = True
    with tiny.cache(store, disk_dir=tmp_path) as cache, pytest.raises(LoadFailed):
        cache.acquire("b").result(10)


@pytest.mark.parametrize("name", ["another store", None])
def test_what_another_source_had_under_that_id_is_not_served(
    tiny: Any, store: Store, tmp_path: Path, name: str | None
) -> None:
    ran_before(tiny, store, tmp_path)
    other = Store(name)
    other.is_down = True
    with tiny.cache(other, disk_dir=tmp_path) as cache, pytest.raises(LoadFailed):
        cache.acquire("a").result(10)


def test_what_was_put_in_an_earlier_run_is_not_the_sources(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        cache.put("a", *tiny.tensors(5)).result(10)
        assert serves(cache, tiny, 5)
    store.is_down = True
    with tiny.cache(store, disk_dir=tmp_path) as cache, pytest.raises(LoadFailed):
        cache.acquire("a").result(10)


def fails_while_down(tiny: Any, store: Store, folder: Path) -> None:
    store.is_down = True
    with tiny.cache(store, disk_dir=folder) as cache, pytest.raises(LoadFailed):
        cache.acquire("a").result(10)


def test_what_the_source_has_said_to_be_missing_is_not_served_once_it_is_down(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    ran_before(tiny, store, tmp_path)
    store.remove("a")
    now = [0.0]
    with tiny.cache(store, disk_dir=tmp_path, clock=lambda: now[0]) as cache:
        with pytest.raises(AdapterNotFound):
            cache.acquire("a").result(10)
        store.is_down = True
        now[0] += 100
        with pytest.raises(LoadFailed):
            cache.acquire("a").result(10)
    fails_while_down(tiny, store, tmp_path)  # nor by another process


def test_what_a_refresh_found_missing_is_not_served_by_the_next_run(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
        store.remove("a")
        with pytest.raises(AdapterNotFound):
            cache.refresh("a").result(10)
        assert serves(cache, tiny, 0), "while a tier has it"
    fails_while_down(tiny, store, tmp_path)


def test_that_another_source_misses_an_id_says_nothing_of_this_one(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    ran_before(tiny, store, tmp_path)
    another = Store("another")
    with tiny.cache(another, disk_dir=tmp_path) as cache, pytest.raises(AdapterNotFound):
        cache.acquire("a").result(10)
    store.is_down = True
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        assert serves(cache, tiny, 0)


@pytest.mark.parametrize("name", ["another", None])
def test_that_another_sources_id_is_removed_says_nothing_of_this_one(
    tiny: Any, store: Store, tmp_path: Path, name: str | None
) -> None:
    another = Store(name)
    another.put("a", *tiny.tensors(7))
    ran_before(tiny, another, tmp_path)
    with tiny.cache(another, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
        ran_before(tiny, store, tmp_path)  # another process of the same disk
        cache.remove("a")
        assert tiny.wait_until(lambda: cache._parts.movers.are_idle)
    store.is_down = True
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        assert serves(cache, tiny, 0)


def test_what_was_put_and_removed_leaves_no_note(tiny: Any, store: Store, tmp_path: Path) -> None:
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        cache.put("a", *tiny.tensors(5)).result(10)
        assert serves(cache, tiny, 5)
        cache.remove("a")
        assert tiny.wait_until(lambda: cache._parts.movers.are_idle)
        assert tiny.files(tmp_path / "index") == []


@pytest.mark.parametrize("was_asked_for", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_what_was_removed_does_not_come_back_without_the_source(
    tiny: Any, store: Store, tmp_path: Path, was_asked_for: bool, is_shared: bool
) -> None:
    store.put("b", *tiny.tensors(0 if is_shared else 1))
    ran_before(tiny, store, tmp_path, "a", "b")
    store.is_down = True
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        if was_asked_for:
            tiny.load(cache, "a", "b")
        cache.remove("a")
        with pytest.raises(LoadFailed):
            cache.acquire("a").result(10)
        assert tiny.wait_until(lambda: cache._parts.movers.are_idle)
    fails_while_down(tiny, store, tmp_path)


def test_what_came_again_after_it_was_removed_is_served(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    ran_before(tiny, store, tmp_path)
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        for _ in range(20):
            cache.remove("a")
            assert serves(cache, tiny, 0)
        assert tiny.wait_until(lambda: cache._parts.movers.are_idle)
    store.is_down = True
    with tiny.cache(store, disk_dir=tmp_path) as cache:
        assert serves(cache, tiny, 0)


class Versioned(Store):
    """Its revisions say nothing of the content: another source's may be the same."""

    def revision(self, adapter_id: str) -> str:
        super().revision(adapter_id)
        return "v1"

    def read(self, adapter_id: str, revision: str, *where: Any) -> int:
        return super().read(adapter_id, super().revision(adapter_id), *where)


def test_another_sources_content_is_not_taken_for_that_of_the_same_revision(
    tiny: Any, tmp_path: Path
) -> None:
    one, two = Versioned("one"), Versioned("two")
    one.put("a", *tiny.tensors(0))
    two.put("a", *tiny.tensors(1))
    ran_before(tiny, one, tmp_path)
    with tiny.cache(two, disk_dir=tmp_path) as cache:
        assert serves(cache, tiny, 1)


def test_for_another_layout_it_is_packed_from_the_files_on_the_disk(
    tiny: Any, store: Store, tmp_path: Path
) -> None:
    ran_before(tiny, store, tmp_path)
    store.is_down = True
    layout = LoraLayout(tiny.layout.base, max_rank=16, dtype="bfloat16")
    options = {"gpu_bytes": 1 << 20, "host_bytes": 1 << 20, "host_block_bytes": 4096}
    with (
        AdapterCache(layout, store, disk_dir=tmp_path, device="cpu", **options) as cache,
        cache.acquire("a").result(10) as lease,
    ):
        assert held_weights(cache, lease, 0, "q_proj") is not None


def test_sources_of_ours_have_names(tmp_path: Path) -> None:
    from adaptercache.s3 import S3Options, S3Source
    from adaptercache.tiers.remote import DirectorySource

    (tmp_path / "x").mkdir()
    names = [
        DirectorySource(tmp_path).name,
        DirectorySource(tmp_path / "x").name,
        S3Source("s3://b/p").name,
        S3Source("s3://b/q").name,
        S3Source("s3://b/p", S3Options(endpoint_url="http://127.0.0.1:1")).name,
    ]
    assert len(set(names)) == len(names)
    assert DirectorySource(tmp_path / "x" / "..").name == names[0]
    assert S3Source("s3://b/p/").name == names[2]
