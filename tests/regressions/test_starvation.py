"""A request for a cold adapter starved while later ones kept a resident adapter leased, or while
those that ran grew into the pages that its adapter had just been given."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from adaptercache import AdapterCache, Lease, Request, Tier
from adaptercache.turns import MAX_BYPASSES


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


LONGEST_RUN = 20  # steps
HOT = ("hot0", "hot1", "hot2")  # 4 pages each
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # 14 pages


@dataclass
class Running:
    request: Request
    lease: Lease
    pages: list[int]
    until: int = field(compare=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kv_pages", [3, 60, 100])
@pytest.mark.parametrize("aborts", [True, False], ids=["aborts", "waits"])
def test_a_cold_adapter_with_many_kv_pages_gets_in_beside_those_that_grow(
    tiny: Any, seed: int, kv_pages: int, aborts: bool
) -> None:
    """Requests that run take a page more in every step, and evict what was loaded for the one that
    waits for its own pages. It was passed over for thousands of steps; now others are admitted
    past it a bounded number of times, and then those that run come to their end."""
    rng, source = random.Random(seed), tiny.source(*HOT)
    source.put("rare", *tiny.tensors(3, targets=MODULES))
    numbers = iter(range(10**6))
    waiting: list[Request] = []
    running: list[Running] = []
    passed = 0
    with tiny.cache(source, pages=127, gpu_slots=8) as cache:  # KV leaves adapters 17
        cache.prefetch(["rare"], to=Tier.HOST)
        tiny.load(cache, *HOT)
        for step in range(10 * MAX_BYPASSES):
            while len(waiting) < 12:
                adapter_id = rng.choice([*HOT, None])
                request_id = f"r{next(numbers)}"
                waiting.append(Request(request_id, adapter_id, kv_pages=rng.randint(1, 6)))
            if step == LONGEST_RUN:
                waiting.append(Request("rare", "rare", kv_pages=kv_pages))
            admission = cache.admit(waiting, running=[(r.request, r.lease) for r in running])
            waiting = admission.deferred
            for request, lease in admission.admitted:
                pages = cache.pages.allocate(request.kv_pages)
                assert pages is not None, "promised"
                until = step + rng.randint(5, LONGEST_RUN)
                running.append(Running(request, lease, list(pages), until))
            if any(request.request_id == "rare" for request, _ in admission.admitted):
                break
            passed += step >= LONGEST_RUN and bool(admission.admitted)
            tiny.wait_until(lambda: tiny.idle(cache))
            for each in list(running):
                grown = cache.pages.allocate(1) if each.until > step else None
                each.pages += grown or ()
                if each.until <= step or (grown is None and aborts):
                    running.remove(each)
                    each.lease.release()
                    cache.pages.free(each.pages)
        for each in running:
            each.lease.release()
    assert passed <= MAX_BYPASSES + LONGEST_RUN
