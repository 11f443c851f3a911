"""The disk's budget: what a download sets aside, and what is recorded of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny

from adaptercache import AdapterCache, CapacityError, LoraLayout, Tier
from adaptercache.testing import any_device


def bytes_in(folder: Path) -> int:
    total = 0
    for file in Tiny.files(folder):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            total += file.stat().st_size
    return total


@pytest.fixture
def size(tiny: Any, tmp_path: Path) -> int:
    """Bytes of one adapter on disk: its files and its packed file."""
    with tiny.cache(tiny.source("a"), disk_dir=tmp_path / "probe") as cache:
        tiny.load(cache, "a")
    return bytes_in(tmp_path / "probe" / "objects")


@pytest.mark.timeout(20)
def test_an_adapter_whose_files_fit_but_not_with_the_packed_file_can_never_fit(
    tiny: Any, size: int
) -> None:
    with (
        tiny.cache(tiny.source("a"), disk_bytes=size * 3 // 4) as cache,
        pytest.raises(CapacityError),
    ):
        cache.acquire("a").result(10)


@pytest.mark.timeout(60)
def test_downloads_that_fit_one_at_a_time_do_not_wait_for_each_other(tiny: Any, size: int) -> None:
    ids = [f"a{n}" for n in range(4)]
    with tiny.cache(tiny.source(*ids), disk_bytes=size * 5 // 4, gpu_slots=4) as cache:
        leases = [cache.acquire(adapter_id) for adapter_id in ids]
        for lease in leases:
            lease.result(10).release()


@pytest.mark.parametrize("spare", [0, 1, 2000, 5000])
def test_what_is_on_disk_never_exceeds_the_budget(
    tiny: Any, tmp_path: Path, size: int, spare: int
) -> None:
    ids = [f"a{n}" for n in range(4)]
    root = tmp_path / "disk"
    budget = 2 * size + spare
    with tiny.cache(tiny.source(*ids), disk_dir=root, disk_bytes=budget) as cache:
        for adapter_id in ids:
            tiny.load(cache, adapter_id)
            assert cache.stats().resident_bytes[Tier.DISK] <= budget
            assert bytes_in(root / "objects") <= budget


@pytest.mark.parametrize("short", [1, 1000, 4000])
def test_a_budget_a_little_too_small_is_refused_or_kept(
    tiny: Any, tmp_path: Path, size: int, short: int
) -> None:
    """(The packed file's header was not counted.)"""
    with tiny.cache(tiny.source("a"), disk_dir=tmp_path / "disk", disk_bytes=size - short) as cache:
        with contextlib.suppress(CapacityError):
            cache.acquire("a").result(5).release()
        assert bytes_in(tmp_path / "disk" / "objects") <= size - short


def test_the_packed_file_of_a_second_layout_is_counted(tiny: Any, tmp_path: Path) -> None:
    source = tiny.source("a")
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    other = LoraLayout(tiny.layout.base, targets=("q_proj", "v_proj"), dtype="float32", max_rank=8)
    with AdapterCache(
        other,
        source,
        gpu_bytes=1 << 20,
        host_bytes=1 << 20,
        host_block_bytes=4096,
        disk_dir=tmp_path,
        device=any_device(),
    ) as cache:
        tiny.load(cache, "a")
        assert cache.stats().resident_bytes[Tier.DISK] == bytes_in(tmp_path / "objects")
