"""Disks that are full, that can only be read, or whose clock jumps; and what the tier tidies up."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storage_crowd import content_bytes

from adaptercache import LoadFailed, Tier
from adaptercache.disk import budget as budget_module
from adaptercache.disk import contents, transfer
from adaptercache.identity import AdapterKey, content_digest
from adaptercache.tiers.disk import DiskTier


def digest_of(name: str) -> bytes:
    return content_digest([("name", name.encode())])


def publish(tier: DiskTier, name: str, nbytes: int = 100) -> bytes:
    folder = tier.new_folder()
    (folder / "data").write_bytes(bytes(nbytes))
    with tier.changing:
        tier.publish(folder, digest_of(name))
        tier.note(AdapterKey(name, "r"), digest_of(name))
    return digest_of(name)


def always(digest: bytes) -> bool:
    return True


# A device that is full before the budget is


class FullDisk:
    """Writes fail from the ``first`` on, ``times`` in all, as on a device without room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, times: int) -> None:
        self.first, self.times, self.seen = first, times, 0
        for name in ("posix_fallocate", "pwrite", "fsync", "mkdir", "rename"):
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))

    def _counting(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.seen += 1
            if self.first <= self.seen < self.first + self.times:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*args, **options)

        return counted


def test_a_full_device_is_made_room_on_at_every_write(tiny: Any, tmp_path: Path) -> None:
    """Row 217: whichever write finds no room, older adapters go, and it is tried again."""
    source = tiny.source("a", "b", *(f"c{n}" for n in range(40)))
    with tiny.cache(source, disk_dir=tmp_path, device="cpu", host_bytes=1 << 16) as cache:
        tiny.load(cache, "a", "b")
        for first in range(1, 30):
            with pytest.MonkeyPatch.context() as patch:
                disk = FullDisk(patch, first, 1)
                tiny.load(cache, f"c{first}")
            assert first <= 20 or disk.seen >= 10
        assert tiny.wait_until(lambda: not tiny.files(tmp_path / "tmp"))
        assert cache.stats().evictions[Tier.DISK, "room"] > 0


def test_a_full_device_with_nothing_to_evict_fails_the_load_and_serves_what_is_there(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny.source("a", "b", "c")
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        held = cache.acquire("a").result(10)
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            FullDisk(patch, 1, 10**9)
            for adapter_id in ("b", "c"):
                with pytest.raises(LoadFailed, match="No space left"):
                    cache.acquire(adapter_id).result(10)
            tiny.load(cache, "a")
        held.release()
        said = [line for line in caplog.messages if "the device is full" in line]
        assert len(said) == 1
        cache.refresh("b").result(10)
        tiny.load(cache, "b")


def test_a_small_file_system_that_fills_up(tiny: Any, tmp_path: Path) -> None:
    """A real one, where we may mount it: its size, and not the budget, is the bound."""
    import subprocess

    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system; the same is tested by failing writes")
    try:
        ids = [f"a{n}" for n in range(20)]
        with tiny.cache(tiny.source(*ids), disk_dir=tmp_path / "disk", device="cpu") as cache:
            for adapter_id in ids:
                tiny.load(cache, adapter_id)
            assert cache.stats().evictions[Tier.DISK, "room"] > 0
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# A disk that can only be read


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, nothing can be written (also not by root, whom permissions don't stop)."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    def begin() -> None:
        opened = os.open

        def open_to_read(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                refuse()
            return opened(path, flags, *rest, **options)

        for name in ("mkdir", "rename", "replace", "unlink", "utime", "rmdir"):
            monkeypatch.setattr(os, name, refuse)
        monkeypatch.setattr(os, "open", open_to_read)

    return begin


def test_a_disk_that_can_only_be_read_serves_what_is_on_it_and_says_so_once(
    tiny: Any,
    tmp_path: Path,
    read_only: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Row 211."""
    source = tiny.source("a", "b", "c")
    with tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache:
        tiny.load(cache, "a")
    reads = sum(source.calls.values())
    read_only()
    with (
        caplog.at_level(logging.WARNING),
        tiny.cache(source, disk_dir=tmp_path, device="cpu") as cache,
    ):
        tiny.load(cache, "a")
        for adapter_id in ("b", "c"):
            with pytest.raises(LoadFailed, match="Read-only"):
                cache.acquire(adapter_id).result(10)
        tiny.load(cache, "a")
    assert source.calls["read", "a"] * 2 <= reads
    assert len([line for line in caplog.messages if "it serves what is there" in line]) == 1


# Time


def test_a_clock_that_jumps_does_not_change_what_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, 350)
    now = [1_000_000_000_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    for name, step in (("a", 0), ("b", 10**18), ("c", -(10**18) * 3 // 2)):
        now[0] += step
        assert tier.set_aside(100, always).granted
        tier.give_back(100)
        publish(tier, name)
        tier._holds.drop(digest_of(name))
    assert [digest for digest, _ in tier.scan()] == [digest_of(name) for name in "abc"]
    monkeypatch.setattr(contents, "_TOUCH_EVERY_S", 0.0)
    now[0] -= 10**15
    with tier.reading(digest_of("a")):
        pass
    assert tier.set_aside(100, always).granted
    assert [digest for digest, _ in tier.scan()] == [digest_of(name) for name in "ca"]
    tier.close()


def test_uses_are_written_down_once_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path)
    digest = publish(tier, "a")
    written = []
    monkeypatch.setattr(os, "utime", lambda *args, **options: written.append(args))
    for _ in range(100):
        with tier.reading(digest):
            pass
    tier.close()
    assert len(written) <= 1


# Budgets and holds among several


def test_two_tiers_on_one_directory_count_together(tmp_path: Path) -> None:
    one, other = DiskTier(tmp_path, 250), DiskTier(tmp_path, 250)
    publish(one, "a")
    publish(other, "b")
    one._holds.close()
    other._holds.close()
    assert one.set_aside(100, always).granted
    assert [digest for digest, _ in one.scan()] == [digest_of("b")], "the older one went"
    assert other.set_aside(100, always).granted
    assert other.scan() == [], "as the first has set 100 aside"
    assert not other.set_aside(100, always).granted
    one.close()
    assert other.set_aside(100, always).granted, "what the first had set aside went with it"
    other.close()


def test_what_another_is_about_to_read_is_not_evicted(tmp_path: Path) -> None:
    one, other = DiskTier(tmp_path, 150), DiskTier(tmp_path, 150)
    digest = publish(one, "a")
    assert not other.set_aside(100, always).granted
    with one.reading(digest):
        assert not other.set_aside(100, always).granted
        other.delete(digest)
        assert (one.folder(digest) / "data").exists()
    room = other.set_aside(100, always)
    assert room.granted
    assert not one.folder(digest).exists()
    with pytest.raises(FileNotFoundError), one.reading(digest):
        pass
    assert not one.hold(digest)
    one.close()
    other.close()


def test_what_we_hold_ourselves_goes_last_but_goes(tmp_path: Path) -> None:
    """(A download waited until the hold on what nobody read had lapsed.)"""
    tier = DiskTier(tmp_path, 250)
    publish(tier, "a")
    publish(tier, "b")
    tier._holds.drop(digest_of("b"))
    assert tier.set_aside(100, always).granted
    assert [digest for digest, _ in tier.scan()] == [digest_of("a")]
    assert tier.set_aside(100, always).granted
    assert tier.scan() == []
    tier.close()


def test_a_hold_lapses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaptercache.disk import holds

    monkeypatch.setattr(holds, "LASTS_S", 0.05)
    one, other = DiskTier(tmp_path, 150), DiskTier(tmp_path, 150)
    publish(one, "a")
    assert not other.set_aside(100, always).granted
    deadline = time.monotonic() + 5
    while not other.set_aside(100, always).granted:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    one.close()
    other.close()


@pytest.mark.parametrize("text", ["", "12", "x\n", "-\n"])
def test_a_torn_count_is_counted_again(tmp_path: Path, text: str) -> None:
    tier = DiskTier(tmp_path, 350)
    publish(tier, "a")
    tier._holds.drop(digest_of("a"))
    (tmp_path / "used").write_text(text)
    assert tier.set_aside(200, always).present == {digest_of("a")}
    assert int((tmp_path / "used").read_text()) == 300
    tier.close()


def test_the_count_of_a_process_that_died_is_corrected(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 350)
    publish(tier, "a")
    (tmp_path / "used").write_text(f"{340:20d}\n")  # as it leaves it: too high
    assert tier.set_aside(150, always).granted
    assert int((tmp_path / "used").read_text()) == 250
    tier.close()
    assert budget_module.CLAIMS not in os.listdir(tmp_path)


# Notes


def test_notes_of_what_is_gone_are_removed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    for name in "abc":
        publish(tier, name)
    with tier.changing:
        tier.delete(digest_of("a"))
    assert len(os.listdir(tmp_path / "index")) == 2, "with its content, where we know of it"
    other = DiskTier(tmp_path)
    with other.changing:
        tier._holds.close()
        other.delete(digest_of("b"))
    (tmp_path / "index" / "stray").write_text("no note")
    third = DiskTier(tmp_path)
    third.tidy(())
    assert len(os.listdir(tmp_path / "index")) == 1, "the others at the next start"
    assert third.lookup(AdapterKey("c", "r")) == digest_of("c")
    for each in (tier, other, third):
        each.close()


def test_every_crc_of_parts_is_that_of_the_whole() -> None:
    import random
    import zlib

    from adaptercache.disk.crc import join_crc32

    rng = random.Random(0)
    for sizes in ([], [0], [1], [5, 0, 7], [1000, 1, 4096, 65537, 3], [1 << 20, 12345]):
        parts = [rng.randbytes(size) for size in sizes]
        joined = join_crc32((zlib.crc32(part), len(part)) for part in parts)
        assert joined == zlib.crc32(b"".join(parts)), sizes


def test_a_source_that_gives_more_or_less_than_it_says_fails(tmp_path: Path) -> None:
    moved = transfer.Transfer()
    for number, given in enumerate((9, 11, 0)):

        def stream(start: int, stop: int, given: int = given) -> Any:
            yield bytes(given)

        with pytest.raises(LoadFailed):
            moved.fill(tmp_path / str(number), 10, stream, lambda: None)
    moved.close()


def test_content_bytes_counts(tmp_path: Path) -> None:
    """The tests' own measure of what lies there."""
    tier = DiskTier(tmp_path / "disk")
    publish(tier, "a", 123)
    tier.close()
    assert content_bytes(tmp_path) == 123
