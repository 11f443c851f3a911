"""Adapters hinted at, more than the disk holds, pushed each other out and were fetched for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptercache import Tier
from adaptercache.waiting import HINT_LASTS_S


def test_hints_for_more_than_the_disk_holds_fetch_each_but_once(tiny: Any, tmp_path: Path) -> None:
    ids, now = [f"a{n}" for n in range(5)], [0.0]
    source = tiny.source(*ids)
    with tiny.cache(source, disk_dir=tmp_path / "probe") as cache:
        tiny.load(cache, "a0")
        size = cache.stats().resident_bytes[Tier.DISK]
        fetched = source.calls["read", "a0"]
    source.calls.clear()
    options = {"disk_bytes": size * 5 // 2, "clock": lambda: now[0]}
    with tiny.cache(source, disk_dir=tmp_path / "small", **options) as cache:
        for _ in range(3):  # a scheduler says so in every step
            cache.prefetch(ids, to=Tier.DISK)
            assert tiny.wait_until(lambda: tiny.idle(cache), 5)
        assert [source.calls["read", each] for each in ids] == [fetched] * 5
        now[0] += HINT_LASTS_S
        cache.prefetch(ids[:1], to=Tier.DISK)
        assert tiny.wait_until(lambda: "a0" in cache.resident(Tier.DISK), 5)
