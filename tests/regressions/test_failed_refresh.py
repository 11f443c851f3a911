"""A refresh that failed made the adapter fail too, although a sound copy was in CPU memory."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import LoadFailed
from adaptercache.testing import FaultySource


def test_the_old_content_goes_on_serving_from_cpu_memory(tiny: Any) -> None:
    source = FaultySource(tiny.source("a", "b", "c", "d"))
    with tiny.cache(source) as cache:
        tiny.load(cache, "a", "b", "c", "d")  # three slots: "a" is in CPU memory only
        source.failing.add("a")
        with pytest.raises(LoadFailed):
            cache.refresh("a").result(10)
        tiny.load(cache, "a")


def test_a_lease_that_waits_for_room_is_not_failed(tiny: Any) -> None:
    source = FaultySource(tiny.source("a", "b"))
    with tiny.cache(source, gpu_slots=1) as cache:
        tiny.load(cache, "a")
        with cache.acquire("b"):
            pending = cache.acquire("a")
            source.failing.add("a")
            with pytest.raises(LoadFailed):
                cache.refresh("a").result(10)
        pending.result(10).release()
