"""What bears the name of an adapter's file and is none: a FIFO that nobody writes to was opened
(and waited for) if it took the file's place after a look, and a pickle beside it was preferred."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from adapter_files import BASE, write_adapter

from adaptercache import AdapterCacheError, AdapterInvalid
from adaptercache.checkpoint import ReadOptions, read_checkpoint


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path.name)  # relative: the name of a socket is short


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, device, listener, loop, dangling])
def test_it_is_refused_at_once(
    tmp_path: Path, name: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (write_adapter(tmp_path) / name).unlink()
    make(tmp_path / name)
    with pytest.raises(AdapterInvalid, match=name):
        read_checkpoint(tmp_path, BASE)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, device])
def test_a_pickle_is_not_read_in_its_stead(tmp_path: Path, make: Callable[[Path], None]) -> None:
    weights = write_adapter(tmp_path) / "adapter_model.safetensors"
    weights.unlink()
    make(weights)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(AdapterInvalid, match="not a regular file"):
        read_checkpoint(tmp_path, BASE, options=ReadOptions(allow_pickle=True))


def test_links_of_a_model_hub_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_adapter(tmp_path / "blobs")
    for file in list((tmp_path / "blobs").iterdir()):
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert read_checkpoint(tmp_path / "snapshot", BASE).max_rank == 1


@pytest.mark.parametrize("path", ["\0", "a\0b", "x" * 5000, "\ud800"])
def test_a_path_that_no_file_can_have_is_an_error_of_ours(path: str) -> None:
    with pytest.raises(AdapterCacheError):
        read_checkpoint(path, BASE)
