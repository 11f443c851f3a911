"""An engine that gets tensor parallelism wrong is told so, and not served by chance."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import CacheClosed, Request
from adaptercache.peers import Evict, Orders
from adaptercache.ranks import Follower, Leader


def test_orders_are_obeyed_once_and_in_order(tiny: Any) -> None:
    with tiny.cache(tiny.source()) as cache:
        follower = Follower(cache, 1)
        follower.obey(Orders(1))
        for number in (1, 3):
            with pytest.raises(ValueError, match="each once, in order"):
                follower.obey(Orders(number))


def test_a_cache_that_is_in_use_neither_leads_nor_follows(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        tiny.load(cache, "a")
        with pytest.raises(ValueError, match="from the start"):
            Leader(cache, [1])
        with pytest.raises(ValueError, match="from the start"):
            Follower(cache, 1)


def test_a_rank_leads_or_follows_once(tiny: Any) -> None:
    """A second one's orders would lack what the first one's have changed."""
    for one in (lambda cache: Leader(cache, [1]), lambda cache: Follower(cache, 1)):
        for other in (lambda cache: Leader(cache, [1]), lambda cache: Follower(cache, 1)):
            with tiny.cache(tiny.source()) as cache:
                one(cache)
                with pytest.raises(ValueError, match="leads or follows already"):
                    other(cache)


def test_a_closed_rank_obeys_no_orders(tiny: Any) -> None:
    with tiny.cache(tiny.source()) as cache:
        follower = Follower(cache, 1)
    with pytest.raises(CacheClosed):
        follower.obey(Orders(1))
    with pytest.raises(CacheClosed):
        follower.report()
    with pytest.raises(CacheClosed):
        Leader(cache, [1])


def test_ranks_sleep_and_wake_together(tiny: Any) -> None:
    source = tiny.source("a")
    with tiny.cache(source) as first, tiny.cache(source) as second:
        leader, follower = Leader(first, [1]), Follower(second, 1)

        def serve(name: str) -> bytes:
            waiting, leases = [Request(name, "a")], list[Any]()

            def step() -> bool:
                nonlocal waiting
                admission, orders = leader.admit(waiting)
                waiting = admission.deferred
                leases.extend(lease for _, lease in [*admission.admitted, *follower.obey(orders)])
                leader.hear(follower.report())
                return bool(leases)

            assert tiny.wait_until(step)
            digest: bytes = leases[0].digest
            assert leases[0].slot == leases[1].slot
            for lease in leases:
                lease.release()
            return digest

        before = serve("r0")
        for cache in (first, second):
            cache.drop_gpu()
        for cache in (first, second):
            cache.restore()
        assert serve("r1") == before


def test_a_lease_that_a_follower_keeps_too_long_is_named(tiny: Any) -> None:
    source = tiny.source("a")
    with tiny.cache(source) as first, tiny.cache(source) as second:
        leader, follower = Leader(first, [1]), Follower(second, 1)
        waiting, leases = [Request("r", "a")], list[Any]()

        def step() -> bool:
            nonlocal waiting
            admission, orders = leader.admit(waiting)
            waiting = admission.deferred
            leases.extend(lease for _, lease in [*admission.admitted, *follower.obey(orders)])
            leader.hear(follower.report())
            return bool(leases)

        assert tiny.wait_until(step)
        mine, theirs = leases
        assert mine.slot == theirs.slot
        with pytest.raises(RuntimeError, match="leased here"):
            follower.obey(Orders(follower.report().number + 1, (Evict(mine.digest),)))
        mine.release()
        theirs.release()
