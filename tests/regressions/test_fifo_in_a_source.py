"""A FIFO that took a file's place after a look at the directory: reading it waited for ever for
somebody who writes, and held a mover's thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from adaptercache import AdapterInvalid, BaseModel, DirectorySource
from adaptercache.tiers.remote import CONFIG, WEIGHTS


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_it_is_refused_at_once(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for file in (CONFIG, WEIGHTS):
        (folder / file).write_bytes(b"{}")
    source = DirectorySource(tmp_path)
    revision = source.revision("a")
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(AdapterInvalid, match=f"not a regular file.*{name}"):
        source.read("a", revision, name, 0, memoryview(bytearray(2)))


@pytest.mark.timeout(10)
def test_a_fifo_for_the_bases_config_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(AdapterInvalid, match=r"not a regular file.*config\.json"):
        BaseModel.from_config(tmp_path)
