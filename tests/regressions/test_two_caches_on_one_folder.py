"""A cache that started wiped what another one on the same folder was just downloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptercache.testing import FaultySource


def test_a_second_cache_on_the_folder_does_not_break_the_firsts_download(
    tiny: Any, tmp_path: Path
) -> None:
    source = FaultySource(tiny.source("a"))
    with tiny.cache(source, disk_dir=tmp_path) as first:
        source.delay_s = 0.1
        lease = first.acquire("a")
        assert tiny.wait_until(lambda: any((tmp_path / "tmp").iterdir()))
        with tiny.cache(source, disk_dir=tmp_path):
            lease.result(10).release()
