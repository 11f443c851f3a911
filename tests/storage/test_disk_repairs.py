"""What is broken, stale or gone on the disk: made anew from the nearest thing that is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterCache, AdapterNotFound, LoraLayout, Tier
from adaptercache.packing import read_packed_header
from adaptercache.testing import FakeSource, held_weights

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def source(tiny: Any) -> FakeSource:
    return tiny.source("a")


def serves(cache: AdapterCache, tensors: dict[str, Any], adapter_id: str = "a") -> bool:
    with cache.acquire(adapter_id).result(10) as lease:
        found = held_weights(cache, lease, 0, "q_proj")
        return found is not None and found[0].equal(tensors[NAME])


def left_on_disk(tiny: Any, source: FakeSource, root: Path) -> tuple[Path, Path]:
    """Weights and packed file that a run leaves."""
    with tiny.cache(source, disk_dir=root, device="cpu") as cache:
        tiny.load(cache, "a")
    (folder,) = (root / "objects").iterdir()
    return folder / "adapter_model.safetensors", folder / f"{tiny.layout.digest.hex()}.safetensors"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)


Break = Callable[[Path], object]
BREAKS: dict[str, Break] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "header": lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]),
    "html": lambda path: path.write_bytes(b"<html>sign in</html>" * 500),
    "lfs": lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
    "flip": flip,
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_packed_file_is_packed_anew_without_a_download(
    tiny: Any, source: FakeSource, tmp_path: Path, how: str
) -> None:
    _, packed = left_on_disk(tiny, source, tmp_path)
    whole = packed.read_bytes()
    BREAKS[how](packed)
    reads = source.calls["read", "a"]
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        assert serves(cache, tiny.tensors(0)[0])
    assert source.calls["read", "a"] == reads
    assert packed.read_bytes() == whole


@pytest.mark.parametrize("how", BREAKS)
def test_where_the_original_is_broken_too_it_is_downloaded_again(
    tiny: Any, source: FakeSource, tmp_path: Path, how: str
) -> None:
    weights, packed = left_on_disk(tiny, source, tmp_path)
    whole = weights.read_bytes()
    BREAKS[how](weights)
    packed.unlink()
    reads = source.calls["read", "a"]
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        assert serves(cache, tiny.tensors(0)[0])
    assert source.calls["read", "a"] > reads
    assert weights.read_bytes() == whole


def test_a_packed_file_that_breaks_while_the_cache_runs_is_found_out(
    tiny: Any, source: FakeSource, tmp_path: Path
) -> None:
    _, packed = left_on_disk(tiny, source, tmp_path)
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        cache.prefetch(["a"], to=Tier.DISK)
        assert tiny.wait_until(lambda: bool(cache.resident(Tier.DISK)))
        flip(packed)
        assert serves(cache, tiny.tensors(0)[0])
        assert cache.stats().evictions[Tier.DISK, "broken"] == 1


def test_a_packed_file_of_other_content_in_its_place_is_never_served(
    tiny: Any, tmp_path: Path
) -> None:
    source = tiny.source("a", "b")
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        tiny.load(cache, "a", "b")
    one, other = (tmp_path / "objects").iterdir()
    name = f"{tiny.layout.digest.hex()}.safetensors"
    shutil.copy(one / name, other / name)
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        assert serves(cache, tiny.tensors(0)[0], "a")
        assert serves(cache, tiny.tensors(1)[0], "b")


def test_layouts_lie_side_by_side_after_one_download(
    tiny: Any, source: FakeSource, tmp_path: Path
) -> None:
    """Ranks of a cut model, and a cache of fewer targets: each has its packed file."""
    base = tiny.layout.base
    layouts = [
        tiny.layout,
        *(LoraLayout(base, max_rank=16, dtype="float32", tp_rank=r, tp_size=2) for r in range(2)),
        LoraLayout(base, max_rank=16, dtype="bfloat16"),
    ]
    for layout in layouts:
        with AdapterCache(
            layout,
            source,
            gpu_bytes=1 << 20,
            host_bytes=1 << 20,
            host_block_bytes=4096,
            disk_dir=tmp_path,
            device="cpu",
        ) as cache:
            tiny.load(cache, "a")
    assert source.calls["files", "a"] == 1
    (folder,) = (tmp_path / "objects").iterdir()
    for layout in layouts:
        packed = read_packed_header(folder / f"{layout.digest.hex()}.safetensors", layout)
        assert packed.content.hex() == folder.name


def test_a_source_that_is_gone_serves_what_is_cached_and_then_nothing(
    tiny: Any, source: FakeSource, tmp_path: Path
) -> None:
    """Row 169, of storage: deleted at the source while it is cached."""
    tensors = tiny.tensors(0)[0]
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        tiny.load(cache, "a")
        source.remove("a")
        assert serves(cache, tensors)
        with pytest.raises(AdapterNotFound):
            cache.refresh("a").result(10)
        assert serves(cache, tensors)
        cache.remove("a")
        with pytest.raises(AdapterNotFound):
            cache.acquire("a").result(10)


def test_a_folder_of_adapters_removed_under_the_cache(tiny: Any, tmp_path: Path) -> None:
    from storage_crowd import Library

    Library.make(tmp_path, 1)
    with tiny.cache(Library(tmp_path), disk_dir=tmp_path / "disk", device="cpu") as cache:
        tiny.load(cache, "a0")
        shutil.rmtree(tmp_path / "adapters" / "a0")
        assert serves(cache, tiny.tensors(0)[0], "a0")
        cache.remove("a0")
        with pytest.raises(AdapterNotFound):
            cache.acquire("a0").result(10)


# Republished under one id


def republish(tiny: Any, root: Path, times: int, through: str) -> None:
    """Each lease gets the bytes of its own revision; memory and disk stay as they are."""
    source = tiny.source()
    held = []
    with tiny.cache(source, disk_dir=root, device="cpu", pages=64, gpu_slots=8) as cache:
        for number in range(times):
            tensors, config = tiny.tensors(number)
            if through == "put":
                cache.put("a", tensors, config).result(10)
            else:
                source.put("a", tensors, config)
                cache.refresh("a").result(10)
            held.append((cache.acquire("a").result(10), tensors[NAME]))
            for lease, wanted in held:
                found = held_weights(cache, lease, 0, "q_proj")
                assert found is not None
                assert found[0].equal(wanted)
            if len(held) == 3:
                held.pop(0)[0].release()
        for lease, _ in held:
            lease.release()
        assert tiny.wait_until(
            lambda: tiny.idle(cache) and len(list((root / "objects").iterdir())) == 1
        )
        stats = cache.stats()
        assert stats.resident_adapters == {Tier.GPU: 1, Tier.HOST: 1, Tier.DISK: 1}
        assert len(list((root / "index").iterdir())) == 1
        assert list((root / "flights").iterdir()) == []
        # Deleting is no load, so it may still be under way.
        assert tiny.wait_until(lambda: not tiny.files(root / "tmp"))


@pytest.mark.parametrize("through", ["put", "store"])
def test_fifty_versions_under_one_id(tiny: Any, tmp_path: Path, through: str) -> None:
    """Rows 124, 127, 135, 139 and 140."""
    republish(tiny, tmp_path, 50, through)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["put", "store"])
def test_a_thousand_versions_under_one_id(tiny: Any, tmp_path: Path, through: str) -> None:
    republish(tiny, tmp_path, 1000, through)
