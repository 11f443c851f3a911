"""Adapters as folders: whole, verified, held, within the budget of all processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny

from adaptercache import (
    AdapterFiles,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    CacheClosed,
    CapacityError,
    HeldFolder,
    LoadFailed,
    Tier,
)
from adaptercache.adapter_files import DOWN_TTL_S, REFUSED_TTL_S
from adaptercache.checkpoint import Checkpoint, read_checkpoint
from adaptercache.testing import FakeSource, FaultySource

IDS = [f"acme/v{at}" for at in range(6)]
WEIGHTS = "adapter_model.safetensors"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def source() -> FakeSource:
    return Tiny.source(*IDS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


Opens = Callable[..., AdapterFiles]


@pytest.fixture
def opens(source: FakeSource, tmp_path: Path, clock: Clock) -> Iterator[Opens]:
    """Makes `AdapterFiles` on one directory; each is as one more process."""
    with ExitStack() as closing:

        def opens(source: Any = source, **options: Any) -> AdapterFiles:
            options = {"disk_dir": tmp_path / "disk", "disk_bytes": None, "clock": clock} | options
            files = AdapterFiles(source, Tiny.layout.base, **options)
            closing.callback(files.close)
            return files

        yield opens


@pytest.fixture
def files(opens: Opens) -> AdapterFiles:
    return opens()


@pytest.fixture
def size(opens: Opens, tmp_path: Path) -> int:
    """Bytes of one adapter on the disk."""
    held = opens(disk_dir=tmp_path / "measured").open(IDS[0])
    nbytes = sum(file.stat().st_size for file in held.path.iterdir())
    held.release()
    return nbytes


def is_whole(held: HeldFolder) -> bool:
    return read_checkpoint(held.path, Tiny.layout.base).digest == held.digest


def test_a_folder_has_the_files_as_published(files: AdapterFiles, source: FakeSource) -> None:
    with files.open(IDS[0]) as held:
        published = dict(source.files(IDS[0], held.revision))
        found = {file.name: file.stat().st_size for file in held.path.iterdir()}
        assert published.items() <= found.items()
        assert set(found) == {*published, "files.json"}
        assert held.path.is_absolute()
        assert held.path.name == held.digest.hex()
        assert is_whole(held)


def test_many_who_want_it_bring_it_once(files: AdapterFiles, source: FakeSource) -> None:
    slow = FaultySource(source)
    slow.delay_s = 0.01
    files._source = slow
    with ThreadPoolExecutor(12) as threads:
        opened = list(threads.map(lambda _: files.open(IDS[1]), range(12)))
    assert len({held.path for held in opened}) == 1
    assert source.calls["files", IDS[1]] == 1
    assert files.stats().leases == 12
    for held in opened:
        held.release()
        held.release()
    assert files.stats().leases == 0


PROGRAM = """
import sys
from adaptercache import AdapterFiles, BaseModel, DirectorySource
root, ids = sys.argv[1], sys.argv[2:]

class Logging(DirectorySource):
    def files(self, adapter_id, revision):
        with open(f"{root}/log", "a") as log:
            print(adapter_id, file=log)
        return super().files(adapter_id, revision)

files = AdapterFiles(Logging(f"{root}/source"), BaseModel.from_config(f"{root}/config.json"),
                     disk_dir=f"{root}/shared", disk_bytes=1 << 30)
for adapter_id in ids:
    with files.open(adapter_id) as held:
        assert (held.path / "adapter_model.safetensors").exists()
files.close()
"""


def test_processes_bring_it_once(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from tiny import BASE_CONFIG

    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))
    for seed, adapter_id in enumerate(IDS):
        folder = tmp_path / "source" / adapter_id
        folder.mkdir(parents=True)
        tensors, config = Tiny.tensors(seed)
        save_file(tensors, folder / WEIGHTS)
        (folder / "adapter_config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *IDS]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert sorted((tmp_path / "log").read_text().split()) == IDS


def test_what_is_held_stays_and_the_coldest_of_the_rest_goes(opens: Opens, size: int) -> None:
    files = opens(disk_bytes=3 * size, wait_s=0.1)
    held = files.open(IDS[0])
    paths = []
    for adapter_id in IDS[1:4]:
        with files.open(adapter_id) as other:
            paths.append(other.path)
    assert [path.exists() for path in paths] == [False, True, True]
    assert is_whole(held)
    stats = files.stats()
    assert stats.evictions == {(Tier.DISK, "room"): 1}
    assert stats.resident_adapters == {Tier.DISK: 3}
    assert 0 < stats.resident_bytes[Tier.DISK] <= stats.capacity_bytes[Tier.DISK] == 3 * size
    held.release()


@pytest.mark.parametrize("who", ["one", "other"])
def test_all_held_is_not_now(who: str, opens: Opens, size: int) -> None:
    files = opens(disk_bytes=2 * size, wait_s=0.1)
    holder = files if who == "one" else opens(disk_bytes=2 * size)
    held = [holder.open(adapter_id) for adapter_id in IDS[:2]]
    with pytest.raises(LoadFailed, match="full of adapters"):
        files.open(IDS[2])
    held.pop().release()
    files.open(IDS[2]).release()
    assert is_whole(held[0])
    held[0].release()


def test_room_is_asked_for_before_it_is_waited_for(opens: Opens, size: int) -> None:
    held: list[HeldFolder] = []
    files = opens(disk_bytes=2 * size, make_room=lambda: held.pop(0).release())
    held.extend(map(files.open, IDS))
    assert [one.adapter_id for one in held] == IDS[-2:]
    assert all(map(is_whole, held))
    for one in held:
        one.release()


def test_what_never_fits_says_so(opens: Opens, size: int) -> None:
    with pytest.raises(CapacityError):
        opens(disk_bytes=size - 1).open(IDS[0])


def test_a_smaller_budget_holds_from_the_start(
    opens: Opens, size: int, files: AdapterFiles
) -> None:
    for adapter_id in IDS[:4]:
        files.open(adapter_id).release()
    files.close()
    assert opens(disk_bytes=2 * size).stats().resident_adapters == {Tier.DISK: 2}


def test_what_is_refused_is_nowhere_and_is_not_read_again(
    opens: Opens, source: FakeSource, clock: Clock
) -> None:
    seen: list[Path] = []

    def refuse(checkpoint: Checkpoint, folder: Path) -> None:
        assert (folder / WEIGHTS).exists()
        seen.append(folder)
        raise AdapterUnsupported("what my engine can't do", where=f"{folder}/{WEIGHTS}")

    files = opens(check=refuse)
    for _ in range(3):
        with pytest.raises(AdapterUnsupported, match="my engine") as raised:
            files.open(IDS[0])
        assert raised.value.adapter_id == IDS[0]
        assert raised.value.where == WEIGHTS
    assert len(seen) == source.calls["files", IDS[0]] == 1
    assert files.stats().resident_adapters == {Tier.DISK: 0}
    assert files.stats().errors == {"AdapterUnsupported": 3}
    source.put(IDS[0], *Tiny.tensors(77))
    with pytest.raises(AdapterUnsupported):
        files.open(IDS[0])
    clock.now += REFUSED_TTL_S + 1
    with pytest.raises(AdapterUnsupported):
        files.open(IDS[0])
    assert len(seen) == 3


def test_it_is_refused_too_where_another_has_brought_it(opens: Opens, files: AdapterFiles) -> None:
    files.open(IDS[0]).release()

    def refuse(checkpoint: Checkpoint, folder: Path) -> None:
        raise AdapterUnsupported("what my engine can't do")

    with pytest.raises(AdapterUnsupported):
        opens(check=refuse).open(IDS[0])
    assert files.stats().leases == 0


def test_broken_files_are_refused_by_name(files: AdapterFiles, source: FakeSource) -> None:
    source.put_files("broken", {"adapter_config.json": b"{}", WEIGHTS: b"x"})
    with pytest.raises(AdapterInvalid):
        files.open("broken")
    source.put("broken", *Tiny.tensors(5))
    files.open("broken").release()


@pytest.mark.parametrize("damage", ["flip", "cut", "config", "gone"])
def test_files_that_have_changed_on_the_disk_are_brought_again(
    damage: str, files: AdapterFiles, source: FakeSource
) -> None:
    with files.open(IDS[0]) as held:
        path = held.path
    weights = path / WEIGHTS
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-1] ^= 0x40
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[:-8])
    elif damage == "config":
        (path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 1000}')
    else:
        weights.unlink()
    with files.open(IDS[0]) as held:
        assert held.path == path
        assert is_whole(held)
    assert source.calls["files", IDS[0]] == 2


@pytest.mark.parametrize("adapter_id", ["nobody", "..", "a/../b", "", "x\0", "\ud800", "é" * 5000])
def test_what_is_not_there_is_not_found(
    adapter_id: str, files: AdapterFiles, opens: Opens, tmp_path: Path
) -> None:
    (tmp_path / "root").mkdir()
    for opened in (files, opens(tmp_path / "root")):
        with pytest.raises(AdapterNotFound):
            opened.open(adapter_id)


def test_while_the_source_is_down_the_disk_serves(
    opens: Opens, source: FakeSource, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultySource(source)
    faulty.name = "store"  # what tells it from others, for whoever starts later
    files = opens(faulty)
    files.open(IDS[0]).release()
    faulty.failing.update(IDS)
    again = opens(faulty)  # a process that starts meanwhile
    for opened in (files, again):
        with opened.open(IDS[0]) as held:
            assert is_whole(held)
        with pytest.raises(LoadFailed) as raised:
            opened.open(IDS[1])
        assert "injected" in str(raised.value)
        with pytest.raises(LoadFailed, match="a moment ago"):
            opened.open(IDS[1])
    assert "what is on the disk serves" in caplog.text
    faulty.failing.clear()
    clock.now += DOWN_TTL_S + 0.1
    files.open(IDS[1]).release()


def test_what_the_source_has_said_to_be_missing_is_not_opened_once_it_is_down(
    opens: Opens, source: FakeSource, clock: Clock
) -> None:
    faulty = FaultySource(source)
    faulty.name = "store"
    files = opens(faulty)
    held = files.open(IDS[0])
    source.remove(IDS[0])
    with pytest.raises(AdapterNotFound):
        files.newer(held)
    held.release()
    faulty.failing.update(IDS)
    clock.now += 100
    for opened in (files, opens(faulty)):
        with pytest.raises(LoadFailed):
            opened.open(IDS[0])


def test_newer_content_is_another_folder(files: AdapterFiles, source: FakeSource) -> None:
    held = files.open(IDS[0])
    assert files.newer(held) is None
    source.put(IDS[0], *Tiny.tensors(50))
    fresh = files.newer(held)
    assert fresh is not None
    assert fresh.path != held.path
    assert is_whole(fresh)
    assert is_whole(held)
    assert files.newer(fresh) is None
    fresh.release()
    held.release()


def test_another_revision_of_equal_content_is_nothing_newer(
    files: AdapterFiles, source: FakeSource
) -> None:
    held = files.open(IDS[0])
    before = held.revision
    content = {name: bytes(data) for name, data in source._adapters[IDS[0]][1].items()}
    content["adapter_config.json"] += b"\n"
    source.put_files(IDS[0], content)
    assert files.newer(held) is None
    assert held.revision != before
    assert files.stats().leases == 1
    held.release()


def test_a_newer_one_that_is_broken_raises_and_the_old_one_stays(
    files: AdapterFiles, source: FakeSource
) -> None:
    held = files.open(IDS[0])
    source.put_files(IDS[0], {"adapter_config.json": b"{}", WEIGHTS: b"x"})
    with pytest.raises(AdapterInvalid):
        files.newer(held)
    assert is_whole(held)
    held.release()


def test_a_cache_and_adapter_files_share_what_either_brought(
    opens: Opens, source: FakeSource, tmp_path: Path
) -> None:
    files = opens()
    files.open(IDS[0]).release()
    cache = Tiny.cache(source, disk_dir=tmp_path / "disk")
    Tiny.load(cache, IDS[0], IDS[1])
    with files.open(IDS[1]) as held:
        assert is_whole(held)
    assert source.calls["files", IDS[0]] == source.calls["files", IDS[1]] == 1
    cache.close()


def test_what_it_counts(files: AdapterFiles) -> None:
    files.open(IDS[0]).release()
    files.open(IDS[0]).release()
    with pytest.raises(AdapterNotFound):
        files.open("nobody")
    stats = files.stats()
    assert stats.requests == {("remote", "miss"): 1, ("disk", "hit"): 1, ("none", "failed"): 1}
    assert stats.loads[Tier.REMOTE, Tier.DISK, "ok"] == 1
    assert stats.load_bytes[Tier.REMOTE, Tier.DISK] > 1000
    assert sum(stats.load_seconds[Tier.REMOTE, Tier.DISK].counts) == 1
    assert stats.errors == {"AdapterNotFound": 1}
    assert (stats.leases, stats.in_flight_loads) == (0, 0)


def test_close_ends_a_download_and_who_waits_for_it(opens: Opens, source: FakeSource) -> None:
    faulty = FaultySource(source)
    files = opens(faulty)
    faulty.gate.clear()
    raised: list[BaseException] = []

    def open_one() -> None:
        try:
            files.open(IDS[0])
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=open_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    files.close()
    faulty.gate.set()
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in raised] == [CacheClosed] * 2
    with pytest.raises(CacheClosed):
        files.open(IDS[0])


def test_close_ends_the_wait_for_room(opens: Opens, size: int) -> None:
    files = opens(disk_bytes=size, wait_s=60)
    held = files.open(IDS[0])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(files.open, IDS[1])
        assert Tiny.wait_until(lambda: files.stats().in_flight_loads == 1)
        files.close()
        with pytest.raises(CacheClosed):
            waiting.result(10)
    held.release()
