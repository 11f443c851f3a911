"""docs/results.md says what the committed figures say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def plots(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benchmarks/plots.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_page_and_its_pictures_agree_with_the_figures() -> None:
    done = plots(ROOT, "--check")
    assert done.returncode == 0, f"run `make results`:\n{done.stdout}{done.stderr}"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    names = ("plots.py", "results_page.py", "charts.py")
    (tmp_path / "benchmarks").mkdir()
    for name in names:
        shutil.copy(ROOT / "benchmarks" / name, tmp_path / "benchmarks")
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    (tmp_path / "docs").mkdir()
    return tmp_path


def test_a_figure_that_changed_and_a_picture_of_none_are_seen(copied: Path) -> None:
    assert plots(copied).returncode == 0
    assert plots(copied, "--check").returncode == 0
    path = copied / "benchmarks/results/cpu/pages.json"
    content = json.loads(path.read_text())
    content["cases"]["1 to 64 pages"]["pairs_per_second"] = 123_456
    path.write_text(json.dumps(content))
    (copied / "docs/results-old-card-kernels.svg").write_text("<svg/>")
    found = plots(copied, "--check")
    assert found.returncode == 1
    assert "results.md: differs" in found.stdout
    assert "results-old-card-kernels.svg" in found.stdout
    assert plots(copied).returncode == 0
    assert "123,456" in (copied / "docs/results.md").read_text()
    assert not (copied / "docs/results-old-card-kernels.svg").exists()


def test_figures_of_another_machine_get_tables_and_pictures_of_their_own(copied: Path) -> None:
    figures, page = copied / "benchmarks/results", copied / "docs/results.md"
    picture = "![S-LoRA's workload on the example engine]"
    assert plots(copied).returncode == 0
    before = page.read_text().count(picture)
    shutil.copytree(figures / "cpu", figures / "some-card")
    assert plots(copied).returncode == 0
    assert page.read_text().count(picture) == before + 1 > 1
    assert (copied / "docs/results-some-card-serving-workload.svg").is_file()
