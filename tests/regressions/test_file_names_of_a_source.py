"""A source that names a file ``../x`` had it written outside its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterCacheError
from adaptercache.tiers.remote import CONFIG


@pytest.mark.parametrize("name", ["../evil", "../../evil", "{root}/evil"])
def test_a_file_name_never_leads_out_of_the_folder(tiny: Any, tmp_path: Path, name: str) -> None:
    source = tiny.source()
    source.put_files("a", {CONFIG: b"{}", name.format(root=tmp_path): b"evil"})
    with tiny.cache(source, disk_dir=tmp_path / "disk") as cache:
        lease = cache.acquire("a")
        with pytest.raises(AdapterCacheError):
            lease.result(10)
        seen = list(tmp_path.rglob("evil"))
    assert not seen
