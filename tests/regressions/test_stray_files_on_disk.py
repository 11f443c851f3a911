"""A stray file among the contents kept the cache from starting."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_a_stray_file_with_a_hexadecimal_name_is_left_alone(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "abcd").write_text("not ours")
    with tiny.cache(tiny.source("a"), disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    assert (tmp_path / "objects" / "abcd").read_text() == "not ours"
