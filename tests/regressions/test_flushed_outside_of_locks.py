"""Publishing flushed folders to the device while it held the lock of all processes: where the
device is slow, or others are writing, each of them waited for each flush."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterFiles


@pytest.mark.parametrize("kind", ["cache", "files"])
def test_nobody_waits_for_the_device_but_who_writes(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fsync, flushed = os.fsync, list[Path]()

    def free_of_locks(handle: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        other = os.open(tmp_path / "lock", os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
        fsync(handle)

    source = tiny.source("a")
    monkeypatch.setattr(os, "fsync", free_of_locks)
    if kind == "cache":
        with tiny.cache(source, disk_dir=tmp_path) as cache:
            tiny.load(cache, "a")
            with cache.acquire("a") as lease:
                content = tmp_path / "objects" / lease.digest.hex()
    else:
        files = AdapterFiles(source, tiny.layout.base, disk_dir=tmp_path, disk_bytes=1 << 20)
        held = files.open("a")
        content = held.path
        held.release()
        files.close()
    assert flushed[-2:] == [content, tmp_path / "objects"], "the last is the rename itself"
    assert any(path.parent.parent == tmp_path / "tmp" for path in flushed), "its entries, before"
