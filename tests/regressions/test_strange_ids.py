"""Ids that no file system can hold were loads that failed, tried again, instead of not found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterNotFound


@pytest.mark.parametrize("adapter_id", ["\ud800", "a/\udfff", "x" * 300, "y/" * 3000 + "y"])
def test_an_id_that_no_folder_can_have_is_not_found(
    tiny: Any, tmp_path: Path, adapter_id: str
) -> None:
    with tiny.cache(tmp_path) as cache:
        lease = cache.acquire(adapter_id)
        with pytest.raises(AdapterNotFound):
            lease.result(10)
