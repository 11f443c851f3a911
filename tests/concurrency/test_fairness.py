"""No adapter starves behind a cap of the batch: a bound in steps."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import Caps, Request, Tier
from adaptercache.testing import FaultySource
from adaptercache.turns import MAX_BYPASSES

STEPS_A_REQUEST = 3


@pytest.mark.parametrize(
    "caps", [Caps(adapters=2), Caps(rank_sum=9), Caps(pages=9)], ids=["adapters", "ranks", "pages"]
)
def test_a_rare_adapter_gets_into_a_capped_batch_within_bounded_steps(
    tiny: Any, caps: Caps
) -> None:
    """Two hot adapters fill the cap; each step brings another request for each of them."""
    with tiny.cache(tiny.source("hot0", "hot1", "rare"), pages=64) as cache:
        tiny.load(cache, "hot0", "hot1", "rare")
        waiting = [Request("first0", "hot0"), Request("first1", "hot1"), Request("rare", "rare")]
        running: list[Any] = []
        passed = 0
        for step in range(MAX_BYPASSES + 20):
            waiting += [Request(f"s{step}-{n}", f"hot{n}") for n in range(2)]
            waiting.append(Request(f"base{step}"))
            admission = cache.admit(waiting, running=[pair[:2] for pair in running], caps=caps)
            waiting = admission.deferred
            assert all(request.adapter_id is not None for request in waiting), "base ones get in"
            running += [(*pair, step) for pair in admission.admitted]
            if any(request.request_id == "rare" for request, _ in admission.admitted):
                break
            passed += bool(admission.admitted)
            ended = [run for run in running if run[2] <= step - STEPS_A_REQUEST]
            running = [run for run in running if run not in ended]
            for _, lease, _ in ended:
                lease.release()
        for _, lease, _ in running:
            lease.release()
    # Passed over so often, and then until the requests of one hot adapter have ended.
    assert MAX_BYPASSES <= passed <= MAX_BYPASSES + STEPS_A_REQUEST + 1


def test_the_order_of_loads_is_that_of_arrival_and_a_ready_one_overtakes(tiny: Any) -> None:
    with tiny.cache(tiny.source("cold", "hot"), pages=64) as cache:
        tiny.load(cache, "hot")
        admission = cache.admit([Request("r0", "cold"), Request("r1", "hot"), Request("r2")])
        assert [request.request_id for request, _ in admission.admitted] == ["r1", "r2"]
        assert admission.reasons == {"r0": "loading"}
        for _, lease in admission.admitted:
            lease.release()
        assert tiny.wait_until(lambda: tiny.idle(cache))
        ((request, lease),) = cache.admit(admission.deferred).admitted
        assert request.request_id == "r0"
        lease.release()


def test_many_names_of_one_content_are_admitted_alike(tiny: Any) -> None:
    """More than can be listed at each decision."""
    from adaptercache.lifts import MANY_NAMES

    source = tiny.source()
    names = [f"name-{n}" for n in range(MANY_NAMES + 10)]
    for name in names:
        source.put(name, *tiny.tensors(0))
    with tiny.cache(source) as cache:
        waiting, admitted = [Request(name, name) for name in names], []

        def step() -> bool:
            nonlocal waiting
            admission = cache.admit(waiting, running=admitted)
            waiting = admission.deferred
            admitted.extend(admission.admitted)
            return not waiting

        assert tiny.wait_until(step, 20)
        assert {lease.slot for _, lease in admitted} == {admitted[0][1].slot}
        for _, lease in admitted:
            lease.release()


def test_what_is_nearer_to_the_gpu_gets_in_first_under_a_cap(tiny: Any) -> None:
    """On the GPU, then in CPU memory, then far away: whatever the order of arrival."""
    source = FaultySource(tiny.source("cold", "warm", "other", "hot"))
    with tiny.cache(source, gpu_slots=2, pages=64) as cache:
        tiny.load(cache, "warm", "other", "hot")  # `warm` was evicted from the GPU
        assert cache.resident(Tier.GPU) == {"other", "hot"}
        source.delay_s = 0.1
        waiting = [Request(name, name) for name in ("cold", "warm", "hot")]
        order: list[str] = []

        def step() -> bool:
            nonlocal waiting
            admission = cache.admit(waiting, max_adapters=1)
            waiting = admission.deferred
            for request, lease in admission.admitted:
                order.append(request.request_id)
                lease.release()
            return not waiting

        assert tiny.wait_until(step)
    assert order == ["hot", "warm", "cold"]
