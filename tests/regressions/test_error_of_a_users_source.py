"""A source's own error class, with a signature of its own, could not be copied: its waiters were
never told."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import AdapterCacheError
from adaptercache.testing import FakeSource


class QuotaExceeded(AdapterCacheError):
    def __init__(self, tenant: str, limit: int) -> None:
        super().__init__(f"{tenant} is over its quota of {limit}")
        self.limit = limit


class Quota(FakeSource):
    def revision(self, adapter_id: str) -> str:
        raise QuotaExceeded("acme", 3)


def test_an_error_class_of_the_users_own_reaches_the_waiters(tiny: Any) -> None:
    with tiny.cache(Quota()) as cache:
        lease = cache.acquire("a")
        with pytest.raises(QuotaExceeded, match="quota of 3"):
            lease.result(5)
