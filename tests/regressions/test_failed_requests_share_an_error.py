"""All requests of a failed adapter were given one error, the one that the cache remembers."""

from __future__ import annotations

from typing import Any

from adaptercache import Request


def test_each_failed_request_has_an_error_of_its_own(tiny: Any) -> None:
    requests = [Request("r1", "nobody"), Request("r2", "nobody")]
    with tiny.cache(tiny.source()) as cache:
        failed: list[Any] = []
        assert tiny.wait_until(lambda: bool(failed.extend(cache.admit(requests).failed) or failed))
        failed += cache.admit(requests).failed
    errors = {id(error) for _, error in failed}
    assert len(failed) == 4
    assert len(errors) == 4
