"""Ids that no file system can hold were loads that failed, tried again, instead of not found; and
a router had no answer for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterNotFound
from adaptercache.integrations.replicas import Replicas
from adaptercache.routing import AffinityRouter


@pytest.mark.parametrize("adapter_id", ["\ud800", "a/\udfff", "x" * 300, "y/" * 3000 + "y"])
def test_an_id_that_no_folder_can_have_is_not_found(
    tiny: Any, tmp_path: Path, adapter_id: str
) -> None:
    with tiny.cache(tmp_path) as cache:
        lease = cache.acquire(adapter_id)
        with pytest.raises(AdapterNotFound):
            lease.result(10)


@pytest.mark.parametrize("adapter_id", ["\ud800", "a/\udfff", "x\0", ""])
def test_a_router_has_an_instance_for_every_id(adapter_id: str) -> None:
    router = AffinityRouter(["one", "two"])
    assert router.route(adapter_id, 0.0) in router.homes(adapter_id)
    replicas = Replicas()
    replicas.update({"one": {"adaptercache": {"gpu": [adapter_id]}}, "two": {}})
    assert set(replicas.order(adapter_id, [], 0.0)) == {"one", "two"}
