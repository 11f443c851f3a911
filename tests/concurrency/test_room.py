"""When there is no room: who waits, who is told never, and who is let in first."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from adaptercache import AdapterCache, CapacityError, Request, Tier
from adaptercache.testing import held_weights

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SMALL, LARGEST = 4, 17  # pages


@pytest.fixture
def full(tiny: Any) -> Any:
    """Three slots, leased; a fourth adapter asked for; the leases."""
    with tiny.cache(tiny.source("a", "b", "c", "d", "e")) as cache:
        leases = [cache.acquire(adapter_id).result(10) for adapter_id in "abc"]
        yield cache, leases
        for lease in leases:
            lease.release()


def admit_until(tiny: Any, cache: AdapterCache, waiting: list[Request], steps: int = 50) -> Any:
    """Repeats `admit` until somebody is admitted; None after so many steps."""
    for _ in range(steps):
        admission = cache.admit(waiting)
        if admission.admitted:
            return admission
        waiting = admission.deferred
        tiny.wait_until(lambda: tiny.idle(cache))
    return None


def test_slots_full_of_leases_defer_for_room(tiny: Any, full: Any) -> None:
    cache, _ = full
    waiting = [Request("r", "d")]
    tiny.wait_until(lambda: cache.admit(waiting).reasons == {"r": "room"})
    assert cache.admit(waiting).reasons == {"r": "room"}


def test_nothing_that_is_leased_is_evicted_for_who_waits(tiny: Any, full: Any) -> None:
    cache, _ = full
    cache.admit([Request("r", "d")])
    pending = cache.acquire("e")
    tiny.wait_until(lambda: tiny.idle(cache))
    assert cache.resident(Tier.GPU) == {"a", "b", "c"}
    pending.release()


def test_a_request_is_admitted_once_something_is_released(tiny: Any, full: Any) -> None:
    cache, leases = full
    tiny.wait_until(lambda: cache.admit([Request("r", "d")]).reasons == {"r": "room"})
    leases[1].release()
    admission = admit_until(tiny, cache, [Request("r", "d")])
    assert [request.adapter_id for request, _ in admission.admitted] == ["d"]


def test_a_pending_lease_is_served_once_something_is_released(full: Any) -> None:
    cache, leases = full
    pending = cache.acquire("d")
    leases[0].release()
    pending.result(10).release()


def test_pending_leases_are_served_first_come_first_served(tiny: Any, full: Any) -> None:
    cache, leases = full
    first, second = cache.acquire("d"), cache.acquire("e")
    tiny.wait_until(lambda: tiny.idle(cache))
    leases[0].release()
    first.result(10)
    assert not second.ready
    first.release()
    second.result(10).release()


def test_a_release_by_garbage_collection_lets_somebody_in(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b"), gpu_slots=1) as cache:
        lease = cache.acquire("a").result(10)
        pending = cache.acquire("b")
        del lease
        pending.result(10).release()


def test_the_end_of_a_batch_lets_somebody_in(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b"), gpu_slots=1) as cache:
        lease = cache.acquire("a").result(10)
        pending = cache.acquire("b")
        with cache.lora_batch([(lease, 1)]):
            lease.release()
            tiny.wait_until(lambda: tiny.idle(cache))
            assert not pending.ready
        pending.result(10).release()


def test_pages_full_of_leases_defer_for_room(tiny: Any) -> None:
    source = tiny.source("a")
    source.put("large", *tiny.tensors(9, rank=16, targets=ALL))
    with tiny.cache(source, pages=LARGEST + SMALL - 1) as cache, cache.acquire("large"):
        tiny.wait_until(lambda: cache.admit([Request("r", "a")]).reasons == {"r": "room"})
        assert cache.admit([Request("r", "a")]).reasons == {"r": "room"}


@pytest.fixture
def tight(tiny: Any) -> Any:
    """A cache whose arena is smaller than the largest adapter."""
    source = tiny.source("small")
    source.put("large", *tiny.tensors(9, rank=16, targets=ALL))
    with tiny.cache(source, pages=16, kv=None) as cache:
        yield cache


def test_an_adapter_that_can_never_fit_the_gpu_fails_its_lease_at_once(tight: Any) -> None:
    with pytest.raises(CapacityError):
        tight.acquire("large").result(10)


def test_an_adapter_that_can_never_fit_fails_its_own_request_alone(tiny: Any, tight: Any) -> None:
    failed, admitted, waiting = [], [], [Request("r1", "large"), Request("r2", "small")]
    for _ in range(50):
        admission = tight.admit(waiting)
        failed += admission.failed
        admitted += admission.admitted
        waiting = admission.deferred
        tiny.wait_until(lambda: tiny.idle(tight))
        if not waiting:
            break
    assert [(request.request_id, type(error)) for request, error in failed] == [
        ("r1", CapacityError)
    ]
    assert [request.request_id for request, _ in admitted] == ["r2"]


def test_an_adapter_that_can_never_fit_cpu_memory_is_refused_at_once(tiny: Any) -> None:
    with tiny.cache(tiny.source("a"), host_bytes=8192) as cache, pytest.raises(CapacityError):
        cache.acquire("a").result(10)


def test_an_adapter_that_can_never_fit_the_disk_is_refused_at_once(tiny: Any) -> None:
    with tiny.cache(tiny.source("a"), disk_bytes=10_000) as cache, pytest.raises(CapacityError):
        cache.acquire("a").result(10)


@pytest.fixture
def full_of_kv(tiny: Any) -> Any:
    """An arena in which KV holds all that it may, beside one leased adapter of maximum size but
    one page: a cold adapter of 4 pages finds no room."""
    source = tiny.source("cold")
    source.put("large", *tiny.tensors(9, rank=16, targets=ALL))
    with tiny.cache(source, pages=40) as cache, cache.acquire("large"):
        pages = cache.pages.allocate(23)
        assert pages is not None
        yield cache, list(pages)


def test_an_arena_full_of_idle_kv_says_how_many_pages_are_wanted(
    tiny: Any, full_of_kv: Any
) -> None:
    cache, _ = full_of_kv
    waiting = [Request("r", "cold")]
    assert tiny.wait_until(lambda: cache.admit(waiting).pages_wanted == SMALL)


def test_once_the_pages_wanted_are_freed_the_cold_adapter_is_admitted_in_few_steps(
    tiny: Any, full_of_kv: Any
) -> None:
    cache, pages = full_of_kv
    waiting = [Request("r", "cold")]
    assert tiny.wait_until(lambda: cache.admit(waiting).pages_wanted > 0)
    wanted = cache.admit(waiting).pages_wanted
    cache.pages.free(pages[:wanted])
    assert admit_until(tiny, cache, waiting, steps=5) is not None


@pytest.mark.parametrize(
    ("cap", "slots", "adapters"), [(None, 8, 3), (None, 3, 2), (3, 8, 2), (2, 8, 1), (1, 8, 1)]
)
def test_pages_are_wanted_for_as_many_cold_adapters_as_may_join(
    tiny: Any, cap: int | None, slots: int, adapters: int
) -> None:
    source = tiny.source("a", "b", "c")
    source.put("large", *tiny.tensors(9, rank=16, targets=ALL))
    with tiny.cache(source, pages=40, gpu_slots=slots) as cache, cache.acquire("large") as large:
        pages = cache.pages.allocate(23)
        assert pages is not None
        waiting = [Request(name, name) for name in "abc"]
        running = [(Request("r", "large"), large)]

        def admission() -> Any:
            return cache.admit(waiting, running=running, max_adapters=cap)

        assert tiny.wait_until(lambda: set(admission().reasons.values()) == {"room"})
        wanted = admission().pages_wanted
        assert wanted == adapters * SMALL
        cache.pages.free(pages[:wanted])
        reasons = ["loading"] * adapters + ["room"] * (3 - adapters)
        assert list(admission().reasons.values()) == reasons


def test_an_arena_full_of_kv_evicts_no_kv_for_an_adapter(tiny: Any, full_of_kv: Any) -> None:
    cache, pages = full_of_kv
    pending = cache.acquire("cold")
    tiny.wait_until(lambda: tiny.idle(cache))
    assert cache.stats().pages["kv"] == len(pages)
    pending.release()


def test_kv_takes_the_pages_of_cold_adapters(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b"), pages=40) as cache:
        tiny.load(cache, "a", "b")
        free = cache.stats().pages["free"]
        cache.pages.allocate(23)
        kept = cache.resident(Tier.GPU)
        assert free < 40
        assert cache.pages.num_used == 23
        assert kept <= {"a", "b"}


def test_kv_never_takes_the_last_pages_of_an_adapter_of_maximum_rank(tiny: Any) -> None:
    with tiny.cache(tiny.source("a"), pages=40) as cache:
        assert cache.pages.allocate(23) is not None
        assert cache.pages.allocate(1) is None


def test_more_kv_than_there_can_ever_be_is_refused(tiny: Any) -> None:
    with tiny.cache(tiny.source("a"), pages=40) as cache, pytest.raises(CapacityError):
        cache.pages.allocate(24)


@pytest.mark.parametrize("ids", [(0, 0), (5,), (-1,), (99,)], ids=str)
def test_freeing_what_is_not_kvs_changes_nothing(tiny: Any, ids: tuple[int, ...]) -> None:
    with tiny.cache(tiny.source("a"), pages=40) as cache:
        assert cache.pages.allocate(2) == (0, 1)
        with pytest.raises(ValueError, match="page"):
            cache.pages.free(ids)
        assert cache.pages.num_used == 2


def test_as_many_adapters_as_slots_and_base_rows_make_one_batch(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b", "c")) as cache:
        leases = [cache.acquire(key).result(10) for key in ("a", None, "b", "c", None)]
        with cache.lora_batch([(lease, 2) for lease in leases]) as batch:
            slots = batch.token_slots.tolist()
        assert sorted(set(slots)) == [-1, 0, 1, 2]
        for lease in leases:
            lease.release()


def test_requests_for_the_base_model_are_never_held_back(full: Any) -> None:
    cache, _ = full
    admission = cache.admit([Request("r1", "d"), Request("r2", None)])
    assert [request.request_id for request, _ in admission.admitted] == ["r2"]


def test_the_cap_on_adapters_counts_those_that_run(full: Any) -> None:
    cache, leases = full
    running = [(Request("r0", "a"), leases[0])]
    waiting = [Request("r1", "b"), Request("r2", "a"), Request("r3", "c")]
    admission = cache.admit(waiting, running=running, max_adapters=2)
    assert [request.request_id for request, _ in admission.admitted] == ["r1", "r2"]
    assert admission.reasons == {"r3": "max_adapters"}


def test_evicting_and_reloading_three_times_gives_the_same_bits(tiny: Any) -> None:
    tensors, config = tiny.tensors(1, rank=3)
    source = tiny.source("b")
    source.put("a", tensors, config)
    with tiny.cache(source, gpu_slots=1, host_bytes=5 * 4096) as cache:
        for _ in range(3):
            with cache.acquire("a").result(10) as lease:
                for site in tiny.layout.sites:
                    found = held_weights(cache, lease, site.layer, site.module)
                    name = f"base_model.model.{site.path}.lora_A.weight"
                    assert (found is None) == (name not in tensors)
                    if found is not None:
                        assert torch.equal(found[0], tensors[name])
            tiny.load(cache, "b")
        assert cache.stats().evictions[Tier.GPU, "room"] >= 5


def test_a_crowd_on_more_adapters_than_slots_gets_through(tiny: Any) -> None:
    """Threads that each hold one lease at a time, in random order: no deadlock, no starvation."""
    ids = [f"a{n}" for n in range(8)]
    generator = torch.Generator().manual_seed(5)
    orders = [torch.randperm(8, generator=generator).tolist() * 3 for _ in range(16)]
    done: list[int] = []

    with tiny.cache(tiny.source(*ids), host_bytes=5 * 4 * 4096) as cache:

        def use(order: list[int]) -> None:
            for index in order:
                with cache.acquire(ids[index]):
                    pass
            done.append(1)

        threads = [threading.Thread(target=use, args=(order,), daemon=True) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(done) == len(orders)


def test_dropping_the_gpu_is_refused_while_a_lease_is_held(full: Any) -> None:
    cache, leases = full
    with pytest.raises(Exception, match="leased"):
        cache.drop_gpu()
    assert leases[0].slot >= 0


def test_what_comes_back_after_sleep_is_the_same_to_the_bit(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b")) as cache:

        def bits() -> list[Any]:
            found = []
            for adapter_id in ("a", "b"):
                with cache.acquire(adapter_id).result(10) as lease:
                    a, b, scaling = held_weights(cache, lease, 1, "v_proj")
                    found += [a.tolist(), b.tolist(), scaling]
            return found

        before = bits()
        cache.drop_gpu()
        cache.restore()
        assert cache.resident(Tier.GPU) == {"a", "b"}
        assert bits() == before


def test_a_lease_asked_for_during_sleep_is_served_after_it(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b")) as cache:
        tiny.load(cache, "a")
        cache.drop_gpu()
        leases = [cache.acquire("a"), cache.acquire("b")]
        tiny.wait_until(lambda: tiny.idle(cache))
        assert not any(lease.ready for lease in leases)
        cache.restore()
        for lease in leases:
            lease.result(10).release()
