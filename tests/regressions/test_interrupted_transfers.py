"""Threads that read and write files for somebody went on when he was gone: into a file number that
was another's by then, and into memory that had been given up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptercache.disk import transfer
from adaptercache.disk.transfer import SPAN_BYTES, Transfer

SIZE = 3 * SPAN_BYTES


@pytest.fixture
def threads() -> Iterator[Transfer]:
    threads = Transfer()
    yield threads
    threads.close()


def test_a_download_that_is_interrupted_writes_into_nobodys_file(
    threads: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def stream(start: int, stop: int) -> Iterator[bytes]:
        yield b"x"
        go_on.wait(10)
        yield b"x" * (stop - start - 1)

    def interrupted(futures: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            threads.fill(tmp_path / "download", SIZE, stream, lambda: None)
    mine = [os.open(tmp_path / f"mine{n}", os.O_RDWR | os.O_CREAT) for n in range(8)]
    go_on.set()
    threads.close()  # waits for what runs
    assert all(os.fstat(file).st_size == 0 for file in mine)
    for file in mine:
        os.close(file)
    assert (tmp_path / "download").read_bytes().count(b"x") < SIZE, "it was given up"


def test_a_read_that_cannot_be_started_leaves_nobody_who_writes_into_the_memory(
    threads: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "packed"
    path.write_bytes(b"x" * (3 * transfer.READ_BYTES))
    packed = SimpleNamespace(path=path, offset=0, nbytes=path.stat().st_size, crc32=0)
    view = torch.zeros(packed.nbytes, dtype=torch.uint8)
    submit, read, started = threads._readers.submit, transfer._read, list[Future[int]]()

    def second_fails(*args: Any) -> Any:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(submit(*args))
        return started[0]

    def slowly(*args: Any) -> int:
        time.sleep(0.2)
        return read(*args)

    monkeypatch.setattr(threads._readers, "submit", second_fails)
    monkeypatch.setattr(transfer, "_read", slowly)
    with pytest.raises(RuntimeError, match="new thread"):
        threads.read_into(packed, [view], lambda nbytes: None)
    assert started[0].done()
    view.zero_()
    time.sleep(0.3)
    assert not view.any()
