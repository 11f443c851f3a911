"""What the constructor must refuse, and what it leaves behind when it fails."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from adaptercache import CapacityError


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_source_that_is_refused_leaves_no_temporary_folder(tiny: Any, temporary: Path) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        tiny.cache("nonsense://bucket")
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    "budget",
    [{"host_bytes": 4095}, {"gpu_slots": 0}, {"disk_bytes": 0}],
    ids=lambda b: next(iter(b)),
)
def test_a_budget_that_holds_nothing_is_refused(tiny: Any, budget: dict[str, int]) -> None:
    with pytest.raises((CapacityError, ValueError)):
        tiny.cache(tiny.source("a"), **budget).close()


PROGRAM = """
import tiny
cache = tiny.Tiny.cache(tiny.Tiny.source("a"))
tiny.Tiny.load(cache, "a")
"""


def test_a_program_that_ends_without_close_leaves_no_temporary_folder(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{here.parent}:{here.parents[1]}"}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, timeout=60)
    assert not list(tmp_path.glob("adaptercache-*"))
