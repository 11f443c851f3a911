"""A request for a cold adapter starved while later ones kept a resident adapter leased."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import AdapterCache, Request


@pytest.fixture
def cache(tiny: Any) -> Any:
    with tiny.cache(tiny.source("hot", "rare"), gpu_slots=1) as cache:
        tiny.load(cache, "rare", "hot")
        yield cache


def test_a_rare_adapter_is_admitted_within_bounded_steps_beside_a_hot_one(
    tiny: Any, cache: AdapterCache
) -> None:
    rare, running, steps = Request("rare", "rare"), [], 0
    waiting = [Request("hot0", "hot"), rare]
    while rare in waiting and steps < 200:
        steps += 1
        waiting.append(Request(f"hot{steps}", "hot"))
        admission = cache.admit(waiting, running=running)
        waiting = admission.deferred
        for _, lease in running:  # each runs for one step beside the next one
            lease.release()
        running = list(admission.admitted)
        tiny.wait_until(lambda: tiny.idle(cache))
    for _, lease in running:
        lease.release()
    assert rare not in waiting


def test_a_pending_lease_is_served_within_bounded_hits_of_others(
    tiny: Any, cache: AdapterCache
) -> None:
    held, rare, hits = cache.acquire("hot").result(10), cache.acquire("rare"), 0
    while not rare.ready and hits < 200:
        hits += 1
        after = cache.acquire("hot")
        held.release()
        held = after
        tiny.wait_until(lambda: tiny.idle(cache))
        if not held.ready:  # the later one waits its turn
            break
    served = tiny.wait_until(lambda: rare.ready, 2)
    rare.release()
    held.release()
    assert served
