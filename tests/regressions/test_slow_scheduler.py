"""A request whose load had failed was not failed by the next `admit`, but tried again, when that
came later than the back-off."""

from __future__ import annotations

from typing import Any

from adaptercache import AdapterNotFound, Request


def test_a_failure_is_told_in_the_next_admit_however_late_it_comes(tiny: Any) -> None:
    now = [0.0]
    with tiny.cache(tiny.source(), clock=lambda: now[0]) as cache:
        waiting = cache.admit([Request("r", "unknown")]).deferred
        assert tiny.wait_until(lambda: cache.stats().errors.get("AdapterNotFound") == 1)
        now[0] += 100.0
        failed = cache.admit(waiting).failed
    assert [(request.request_id, type(error)) for request, error in failed] == [
        ("r", AdapterNotFound)
    ]
