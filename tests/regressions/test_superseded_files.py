"""Files of superseded content stayed on the disk when their deletion met a read of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from adaptercache.disk_room import DiskRoom
from adaptercache.tiers.disk import DiskTier


def test_content_superseded_while_it_is_read_is_deleted_in_the_end(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read_into = DiskTier.read_into

    def read_slowly(*args: Any) -> None:
        reading.set()
        go_on.wait(10)
        read_into(*args)

    drop, deciding, decided = DiskRoom.drop, threading.Event(), threading.Event()

    def drop_slowly(self: DiskRoom, digest: bytes) -> None:
        drop(self, digest)  # finds that it is being read
        deciding.set()
        decided.wait(10)

    with tiny.cache(disk_dir=tmp_path) as cache:
        cache.put("a", *tiny.tensors(1)).result(10)
        monkeypatch.setattr(DiskTier, "read_into", read_slowly)
        monkeypatch.setattr(DiskRoom, "drop", drop_slowly)
        lease = cache.acquire("a")
        assert reading.wait(10)
        cache.put("a", *tiny.tensors(2)).result(10)
        assert deciding.wait(10)
        go_on.set()  # the read ends while the deletion has not quite
        assert tiny.wait_until(lambda: lease.ready)
        decided.set()
        lease.release()
        assert tiny.wait_until(lambda: len(list((tmp_path / "objects").iterdir())) == 1)
