"""Content that lies on the disk is packed for another layout without its source: of the ranks of a
cut model that share a disk, one reads an adapter from the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterCache, AdapterUnsupported, LoraLayout
from adaptercache.checkpoint import checkpoint_from_tensors
from adaptercache.packing import pack
from adaptercache.testing import FakeSource


def rank_of_two(tiny: Any, rank: int) -> LoraLayout:
    return LoraLayout(tiny.layout.base, max_rank=16, dtype="float32", tp_rank=rank, tp_size=2)


def cache_of(
    layout: LoraLayout, source: FakeSource, disk: Path, disk_bytes: int = 1 << 30
) -> AdapterCache:
    sizes = {"gpu_bytes": 1 << 20, "host_bytes": 1 << 20, "host_block_bytes": 4096}
    return AdapterCache(layout, source, disk_dir=disk, disk_bytes=disk_bytes, device="cpu", **sizes)


def packed_vector(disk: Path, layout: LoraLayout) -> bytes:
    (path,) = disk.glob(f"objects/*/{layout.digest.hex()}.safetensors")
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def test_each_rank_packs_its_part_and_one_of_them_reads_the_source(
    tiny: Any, tmp_path: Path
) -> None:
    source = tiny.source("a")
    checkpoint = checkpoint_from_tensors(*tiny.tensors(0), tiny.layout.base)
    for rank in range(2):
        layout = rank_of_two(tiny, rank)
        with cache_of(layout, source, tmp_path) as cache, cache.acquire("a").result(10) as lease:
            assert lease.digest == checkpoint.digest
        mine = pack(checkpoint, layout)[1]
        assert packed_vector(tmp_path, layout) == mine.numpy().tobytes()
    assert source.calls["read", "a"] == 2  # config and weights, by the first rank
    assert len(list((tmp_path / "objects").iterdir())) == 1
    assert sorted(path.name for path in tmp_path.glob("objects/*/*")) == sorted(
        [
            "adapter_config.json",
            "files.json",  # their checksums
            "adapter_model.safetensors",
            *(f"{rank_of_two(tiny, rank).digest.hex()}.safetensors" for rank in range(2)),
        ]
    )


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "replace"])
def test_files_that_changed_on_the_disk_are_fetched_again(
    tiny: Any, tmp_path: Path, damage: str
) -> None:
    source = tiny.source("a", "b")
    with cache_of(rank_of_two(tiny, 0), source, tmp_path) as cache:
        tiny.load(cache, "a")
        digest = cache.acquire("a").result(10).digest
    (weights,) = tmp_path.glob("objects/*/adapter_model.safetensors")
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[-1] ^= 0x40
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-4])
    elif damage == "remove":
        weights.unlink()
    else:  # sound, but other content
        weights.write_bytes(source._adapters["b"][1]["adapter_model.safetensors"])
    layout = rank_of_two(tiny, 1)
    with cache_of(layout, source, tmp_path) as cache, cache.acquire("a").result(10) as lease:
        assert lease.digest == digest
    assert source.calls["read", "a"] == 4
    checkpoint = checkpoint_from_tensors(*tiny.tensors(0), tiny.layout.base)
    assert packed_vector(tmp_path, layout) == pack(checkpoint, layout)[1].numpy().tobytes()


def test_a_layout_without_a_place_for_it_says_so_without_the_source(
    tiny: Any, tmp_path: Path
) -> None:
    source = tiny.source("a")
    with cache_of(tiny.layout, source, tmp_path) as cache:
        tiny.load(cache, "a")
    narrow = LoraLayout(tiny.layout.base, targets=["o_proj"], dtype="float32")
    refusal = pytest.raises(AdapterUnsupported, match=r"LoRA on .*q_proj")
    with cache_of(narrow, source, tmp_path) as cache, refusal:
        cache.acquire("a").result(10)
    assert source.calls["read", "a"] == 2
    assert not tiny.files(tmp_path / "tmp")


@pytest.mark.timeout(20)
def test_what_is_here_already_takes_no_second_room(tiny: Any, tmp_path: Path) -> None:
    source, layouts = tiny.source("a"), [rank_of_two(tiny, rank) for rank in range(2)]
    sizes = []
    for layout in layouts:
        with cache_of(layout, source, tmp_path / "roomy") as cache:
            tiny.load(cache, "a")
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("roomy/objects/*/*")))
    for layout in layouts:
        with cache_of(layout, source, tmp_path / "tight", disk_bytes=sizes[1]) as cache:
            tiny.load(cache, "a")
    assert source.calls["read", "a"] == 4
