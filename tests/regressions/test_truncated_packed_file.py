"""A packed file found broken was made again, but the broken one stayed in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_packed_file_cut_short_between_runs_is_rebuilt(
    tiny: Any, tmp_path: Path, keep: int
) -> None:
    source = tiny.source("a")
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    (packed,) = tmp_path.glob(f"objects/*/{tiny.layout.digest.hex()}.safetensors")
    whole = packed.read_bytes()
    packed.write_bytes(whole[:keep])
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    assert packed.read_bytes() == whole
