"""A directory as the source: no network, and any name under any locale."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from storage_crowd import HERE, Library


def test_a_directory_needs_no_socket(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 214."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a socket")

    Library.make(tmp_path, 1)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with tiny.cache(tmp_path / "adapters", disk_dir=tmp_path / "disk", device="cpu") as cache:
        tiny.load(cache, "a0")


PROGRAM = """
import sys
from pathlib import Path
import tiny
with tiny.Tiny.cache(Path(sys.argv[1]) / "adapters", disk_dir=Path(sys.argv[1]) / "disk",
                     device="cpu") as cache:
    tiny.Tiny.load(cache, "\\u00fcn\\u00ef/\\U0001f600")
"""


def test_names_beyond_ascii_load_under_the_c_locale(tmp_path: Path) -> None:
    """Row 227."""
    Library.publish(tmp_path, "ünï/😀", 1)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))
    }
    environment |= {"LC_ALL": "C", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_half_published_directory_is_not_taken_for_the_adapter(tiny: Any, tmp_path: Path) -> None:
    """Row 143: what lies on the disk tier counts by its content, never by the id's name."""
    from adaptercache import AdapterInvalid

    Library.make(tmp_path, 1)
    (tmp_path / "adapters/a0/adapter_model.safetensors").unlink()
    with tiny.cache(tmp_path / "adapters", disk_dir=tmp_path / "disk", device="cpu") as cache:
        with pytest.raises(AdapterInvalid):
            cache.acquire("a0").result(10)
        Library.publish(tmp_path, "a0", 0)
        cache.refresh("a0").result(10)
        tiny.load(cache, "a0")
