"""When the system refused CPU memory, the sound copy on disk was blamed and deleted."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import CapacityError, Tier


def test_memory_that_is_refused_is_a_capacity_error_and_the_disk_keeps_its_copy(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptercache.tiers.host import HostTier

    def refuse(*args: object) -> None:
        raise CapacityError("the system gives no more page-locked CPU memory")

    monkeypatch.setattr(HostTier, "views", refuse)
    with tiny.cache(tiny.source("a")) as cache:
        lease = cache.acquire("a")
        with pytest.raises(CapacityError):
            lease.result(10)
        assert cache.resident(Tier.DISK) == {"a"}
