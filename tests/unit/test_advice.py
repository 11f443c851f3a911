"""Which adapters would fill an instance of their own."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import Request
from adaptercache.advice import ENOUGH


def test_the_share_of_all_traffic_counts_base_requests_too(tiny: Any) -> None:
    now = [0.0]
    with tiny.cache(tiny.source("busy", "rare"), clock=lambda: now[0]) as cache:
        tiny.load(cache, "busy", "rare")
        assert cache.advice() == ()
        for n in range(600):
            now[0] += 0.01
            adapter_id = (None, "busy", "busy", "rare")[n % 4]
            (pair,) = cache.admit([Request(f"r{n}", adapter_id)]).admitted
            pair[1].release()
        assert cache.advice(instances=1) == ()  # a half does not fill this one
        (advice,) = cache.advice(instances=3)
        assert advice.adapter_id == "busy"
        assert advice.share == pytest.approx(0.5, abs=0.01)
        assert advice.instances == pytest.approx(1.5, abs=0.03)
        assert [each.adapter_id for each in cache.advice(instances=4)] == ["busy", "rare"]

        now[0] += 3600.0  # an hour later nobody speaks of it
        for _ in range(int(ENOUGH) * 2):
            cache.acquire("rare").release()
        assert [each.adapter_id for each in cache.advice(instances=4)] == ["rare"]


def test_a_fleet_of_none_is_refused(tiny: Any) -> None:
    with tiny.cache(tiny.source()) as cache, pytest.raises(ValueError, match="instances"):
        cache.advice(instances=0)
