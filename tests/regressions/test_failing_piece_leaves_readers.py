"""When one piece of a parallel read failed, `read_into` returned while others still wrote: into
blocks that were free by then, from a file number that was closed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache.disk import transfer
from adaptercache.tiers.disk import DiskTier


def test_a_failed_read_returns_only_when_no_reader_writes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def read(file: int, offset: int, *args: Any) -> None:
        if offset == 0:
            started.wait(5)
            threading.Timer(0.1, go_on.set).start()
            raise OSError("injected")
        started.set()
        go_on.wait(5)
        ended.set()

    monkeypatch.setattr(transfer, "READ_BYTES", 512)
    monkeypatch.setattr(transfer, "_read_and_sum", read)
    path = tmp_path / "packed"
    path.write_bytes(bytes(1024))

    class Packed:
        offset = 0
        nbytes = 1024
        crc32 = 0

    Packed.path = path  # type: ignore[attr-defined]
    tier = DiskTier(tmp_path / "root")
    with pytest.raises(OSError, match="injected"):
        tier.read_into(Packed, [torch.zeros(1024, dtype=torch.uint8)])  # type: ignore[arg-type]
    had_ended = ended.is_set()
    go_on.set()
    tier.close()
    assert had_ended
