"""A flood of ids that nobody knows: `admit` with a growing backlog of them stood still for minutes,
since each load that failed looked at the whole line again with the lock held, and so did each
`acquire`."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import Request
from adaptercache.movers import Hop
from adaptercache.prefetch import MAX_FETCHES


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that the whole line is looked at."""
    from adaptercache.lifts import Lifts

    seen: list[int] = []
    look = Lifts.place_on_gpu

    def count(self: Lifts, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return look(self, *args, **kwargs)

    monkeypatch.setattr(Lifts, "place_on_gpu", count)
    return seen


def test_an_acquire_of_an_unknown_id_looks_at_nobody_else(tiny: Any, looks: list[int]) -> None:
    with tiny.cache(tiny.source()) as cache, cache._deciding.lock:
        # The movers are kept out by the lock: what follows is what `acquire` does under it.
        waiting, lifter = cache._ledger.waiting, cache._parts.lifter
        for number in range(2 * MAX_FETCHES):
            lifter.look_for(f"unknown-{number}")
        assert not waiting
        assert not looks
        assert cache._parts.movers.queued(Hop.FETCH) == MAX_FETCHES


def test_failing_loads_don_t_look_at_the_line_one_by_one(tiny: Any, looks: list[int]) -> None:
    with tiny.cache(tiny.source()) as cache:
        leases = [cache.acquire(f"unknown-{number}") for number in range(2000)]
        assert tiny.wait_until(lambda: all(lease.ready for lease in leases))
        assert cache.stats().errors["AdapterNotFound"] == 2000
        for lease in leases:
            lease.release()
    assert len(looks) < 1000


def test_a_backlog_of_unknown_ids_is_failed_and_nobody_is_forgotten(tiny: Any) -> None:
    with tiny.cache(tiny.source("known")) as cache:
        waiting = [Request(f"u{number}", f"unknown-{number}") for number in range(1500)]
        waiting.append(Request("last", "known"))
        failed, admitted = 0, 0

        def step() -> bool:
            nonlocal waiting, failed, admitted
            admission = cache.admit(waiting)
            waiting = admission.deferred
            failed += len(admission.failed)
            admitted += len(admission.admitted)
            for _, lease in admission.admitted:
                lease.release()
            return not waiting

        assert tiny.wait_until(step, 20)
        assert (failed, admitted) == (1500, 1)


def test_two_requests_of_one_id_are_refused(tiny: Any) -> None:
    """One's reason was written over the other's, and its KV pages were promised to whom?"""
    with tiny.cache(tiny.source("a")) as cache:
        with pytest.raises(ValueError, match="two requests are called 'r'"):
            cache.admit([Request("r", "a"), Request("r", None)])
        ((request, lease),) = cache.admit([Request("r")]).admitted
        with pytest.raises(ValueError, match="'r'"):
            cache.admit([Request("r", "a")], running=[(request, lease)])
