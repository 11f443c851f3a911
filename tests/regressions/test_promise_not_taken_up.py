"""KV pages promised to an admitted request, and never taken, kept adapters out for ever."""

from __future__ import annotations

from typing import Any

from adaptercache import Request


def test_a_lease_is_served_though_promised_pages_were_not_taken(tiny: Any) -> None:
    with tiny.cache(tiny.source("a"), pages=20) as cache:
        admission = cache.admit([Request("r", None, kv_pages=3)])
        assert len(admission.admitted) == 1
        for _ in range(2):
            cache.admit([Request("r", None, kv_pages=3)])
        assert cache.acquire("a").result(10).ready
