"""Several processes on one disk tier: one download, one budget, right bytes, and kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from storage_crowd import HERE, Library, cache_on, content_bytes, serves

from adaptercache.packing import read_packed_header


def run(what: str, root: Path, *arguments: int) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    command = [sys.executable, str(HERE / "storage_crowd.py"), what, str(root)]
    done = subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told["stderr"] = done.stderr
    return told


@pytest.fixture(scope="module")
def one_size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of one adapter on disk."""
    root = tmp_path_factory.mktemp("one")
    Library.make(root, 1)
    with cache_on(root) as cache:
        assert serves(cache, "a0", 0)
        return content_bytes(root)


def nothing_half_done(root: Path, layout: Any) -> None:
    """What the next start finds: whole content, and no leftovers."""
    with cache_on(root) as cache:
        disk = cache._parts.disk
        for digest, _ in disk.scan():
            packed = disk.packed_path(digest, layout.digest)
            if packed.exists():
                header = read_packed_header(packed, layout)
                assert header.content == digest
            names = {path.name for path in disk.folder(digest).iterdir()} - {packed.name}
            assert names in (
                set(),
                {"adapter_config.json", "adapter_model.safetensors", "files.json"},
            )
    assert list((root / "disk" / "tmp").iterdir()) == []
    assert list((root / "disk" / "flights").iterdir()) == []
    assert len(list((root / "disk" / "index").iterdir())) <= 64


@pytest.mark.timeout(120)
def test_eight_processes_that_ask_for_one_adapter_download_it_once(tmp_path: Path) -> None:
    Library.make(tmp_path, 1)
    told = run("fly", tmp_path, 8)
    assert told["codes"] == [0] * 8, told["stderr"][-3000:]
    assert Library.downloads(tmp_path) == ["a0"]
    assert list((tmp_path / "disk" / "flights").iterdir()) == []


@pytest.mark.timeout(300)
def test_eight_processes_read_right_and_keep_the_budget(
    tiny: Any, tmp_path: Path, one_size: int
) -> None:
    """16 threads each over 40 adapters, and the disk holds 10 of them."""
    Library.make(tmp_path, 40)
    budget = 10 * one_size
    told = run("share", tmp_path, 8, 16, 40, 4, budget)
    assert told["codes"] == [0] * 8, told["stderr"][-3000:]
    assert 0 < told["most"] <= budget
    nothing_half_done(tmp_path, tiny.layout)


def churn(tiny: Any, root: Path, kills: int, one_size: int) -> None:
    Library.make(root, 12)
    told = run("churn", root, kills, 12, 5 * one_size)
    assert told["reader"] == 0, told["stderr"][-3000:]
    assert set(told["writers"]) == {-9}, told["stderr"][-3000:]
    nothing_half_done(root, tiny.layout)


@pytest.mark.timeout(300)
def test_kills_leave_nothing_wrong_and_nothing_behind(
    tiny: Any, tmp_path: Path, one_size: int
) -> None:
    churn(tiny, tmp_path, 20, one_size)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_hundred_kills(tiny: Any, tmp_path: Path, one_size: int) -> None:
    churn(tiny, tmp_path, 300, one_size)
