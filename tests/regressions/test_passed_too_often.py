"""Who was passed too often waited on, because what it needed was counted or kept in part only."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from tiny import BASE_CONFIG

from adaptercache import AdapterCache, Admission, Caps, Lease, LoraLayout, Request, Tier, janitor
from adaptercache.pages import Owner
from adaptercache.ranks import Follower, Leader, Report
from adaptercache.testing import check_consistent
from adaptercache.turns import MAX_BYPASSES

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # 14 pages
FEW = 30  # steps: of the longest request in any of these, and some for loads


@dataclass
class Run:
    request: Request
    lease: Lease
    pages: tuple[int, ...]
    until: int


@dataclass
class Stack:
    """A serving loop: requests wait, run for some steps, and end."""

    tiny: Any
    cache: AdapterCache
    caps: Caps | None = None
    waiting: list[Request] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)
    step_number: int = 0
    passed: int = 0  # steps in which others were admitted
    settles: bool = True

    def step(self, lasts: Callable[[], int]) -> Admission:
        """Whatever ends was admitted ``lasts`` steps ago."""
        running = [(run.request, run.lease) for run in self.running]
        admission = self.cache.admit(self.waiting, running=running, caps=self.caps)
        self.waiting = admission.deferred
        for request, lease in admission.admitted:
            pages = self.cache.pages.allocate(request.kv_pages)
            assert pages is not None, "promised"
            self.running.append(Run(request, lease, pages, self.step_number + lasts()))
        self.passed += bool(admission.admitted)
        if self.settles:
            assert self.tiny.wait_until(lambda: self.tiny.idle(self.cache))
        self.end(lambda run: run.until <= self.step_number)
        self.step_number += 1
        return admission

    def end(self, which: Callable[[Run], bool] = lambda run: True) -> None:
        for run in [run for run in self.running if which(run)]:
            self.running.remove(run)
            run.lease.release()
            self.cache.pages.free(run.pages)

    def until_admitted(
        self, request_id: str, before: Callable[[], None], lasts: Callable[[], int] = lambda: 2
    ) -> int:
        """How many steps admitted others before this one got in."""
        first = self.passed
        while self.passed - first <= MAX_BYPASSES + FEW and self.step_number < 20 * MAX_BYPASSES:
            before()
            admission = self.step(lasts)
            if any(request.request_id == request_id for request, _ in admission.admitted):
                self.end()
                return self.passed - first
        self.end()
        raise AssertionError(f"{request_id} waits: {admission.reasons}")


@pytest.mark.parametrize("caps", [Caps(adapters=1), Caps(tokens=8)], ids=["adapters", "tokens"])
def test_a_cap_and_room_are_kept_together(tiny: Any, caps: Caps) -> None:
    """KV evicted its adapter while it waited for the cap, and the cap's turn was forgotten."""
    source = tiny.source("hot")
    source.put("rare", *tiny.tensors(3, targets=MODULES))
    rare = Request("rare", "rare", num_tokens=8 if caps.tokens else 1)
    with tiny.cache(source, pages=127, gpu_slots=8) as cache:
        tiny.load(cache, "rare", "hot")
        stack, grown = Stack(tiny, cache, caps), list[int]()
        stack.waiting = [rare]

        def hot_comes_and_kv_grows_and_shrinks() -> None:
            number = stack.step_number
            stack.waiting = [each for each in stack.waiting if each is rare]
            stack.waiting.append(Request(f"hot{number}", "hot"))
            if number == 0:
                stack.waiting.remove(rare)
            elif number == 1:
                stack.waiting.insert(0, rare)
            if number % 8 == 7:
                grown.extend(cache.pages.allocate(110) or ())
            elif number % 8 == 0:
                cache.pages.free(grown)
                grown.clear()

        stack.until_admitted("rare", hot_comes_and_kv_grows_and_shrinks, lambda: 10)


def test_who_waits_for_tokens_behind_those_of_near_ranks_has_its_turn(tiny: Any) -> None:
    source = tiny.source("hot")
    source.put("big", *tiny.tensors(5, rank=32))
    layout = LoraLayout.from_config(BASE_CONFIG, max_rank=64, dtype="float32")
    sizes = {"gpu_bytes": 1 << 20, "gpu_slots": 4, "host_bytes": 1 << 20, "host_block_bytes": 4096}
    with AdapterCache(layout, source, **sizes, device="cpu") as cache:
        tiny.load(cache, "hot", "big")
        stack = Stack(tiny, cache, Caps(tokens=8, near_ranks=True))
        stack.waiting = [Request(f"first{n}", "hot") for n in range(16)]
        rng = random.Random(0)
        stack.step(lambda: rng.randint(3, 8))
        stack.waiting.insert(0, Request("big", "big"))
        stack.until_admitted(
            "big",
            lambda: stack.waiting.extend(
                Request(f"hot{stack.step_number}-{n}", "hot") for n in range(4)
            ),
            lambda: rng.randint(3, 8),
        )


def test_a_lease_has_its_turn_behind_adapters_for_which_somebody_always_waits(tiny: Any) -> None:
    rng, names = random.Random(0), ("y0", "y1", "y2")
    with tiny.cache(tiny.source(*names, "x"), gpu_slots=2, pages=64) as cache:
        tiny.load(cache, "x", "y0", "y1")
        stack, lease = Stack(tiny, cache, Caps(tokens=4)), None
        for step in range(2 * MAX_BYPASSES + FEW):
            for name in names:
                missing = 30 - sum(request.adapter_id == name for request in stack.waiting)
                stack.waiting += [Request(f"{name}-{step}-{n}", name) for n in range(missing)]
            lease = cache.acquire("x") if step == 5 else lease
            stack.step(lambda: rng.randint(1, 4))
            if lease is not None and lease.ready:
                break
        stack.end()
        assert lease is not None
        assert lease.ready
        lease.release()


@pytest.mark.parametrize("adapter_id", [None, "rare"])
def test_requests_without_kv_pages_of_their_own_keep_nobody_from_his(
    tiny: Any, adapter_id: str | None
) -> None:
    """They kept the adapters leased that the pages had to come from."""
    hot = [f"hot{n}" for n in range(6)]
    with tiny.cache(tiny.source(*hot, "rare"), gpu_slots=8, pages=32) as cache:
        cache.prefetch(["rare"], to=Tier.HOST)
        tiny.load(cache, *hot)
        stack = Stack(tiny, cache)

        def each_hot_one_once_more() -> None:
            if stack.step_number == 5:
                stack.waiting.insert(0, Request("big", adapter_id, kv_pages=10))
            if len(stack.waiting) < 30:
                stack.waiting += [Request(f"{n}-{stack.step_number}", n) for n in hot]

        for _ in range(5):
            each_hot_one_once_more()
            stack.step(lambda: 2)
        stack.until_admitted("big", each_hot_one_once_more)


def test_more_adapters_are_drained_when_kv_has_grown_meanwhile(tiny: Any) -> None:
    """Which ones, was settled once."""
    source = tiny.source("a", "b", "c")
    source.put("x", *tiny.tensors(9, targets=MODULES))
    with tiny.cache(source, pages=127, gpu_slots=8) as cache:
        cache.prefetch(["x"], to=Tier.HOST)
        tiny.load(cache, "a", "b", "c")
        held = [cache.acquire(name).result(5) for name in "abc"]
        assert cache.pages.allocate(103) is not None  # 12 pages are free, and x takes 14
        lease = cache.acquire("x")
        for _ in range(MAX_BYPASSES + 5):
            cache.acquire("b").release()
        assert not cache.acquire("a").ready, "one of them is enough"
        assert cache.pages.allocate(7) is not None  # now it isn't
        cache.prefetch([])  # so that somebody looks
        late = [cache.acquire(name) for name in "bc"]
        assert not any(each.ready for each in late)
        for each in held:
            each.release()
        assert tiny.wait_until(lambda: lease.ready, 5)
        for each in (lease, *late):
            each.release()


def test_publishing_an_adapter_anew_leaves_its_lease_its_turn(tiny: Any) -> None:
    """The count went by content."""
    with tiny.cache(tiny.source("hot", "rare"), gpu_slots=1) as cache:
        tiny.load(cache, "rare", "hot")
        held, rare, hits = cache.acquire("hot").result(10), cache.acquire("rare"), 0
        while not rare.ready and hits < 3 * MAX_BYPASSES:
            hits += 1
            if hits % 50 == 0:
                cache.put("rare", *tiny.tensors(hits)).result(10)
                assert tiny.wait_until(lambda: "rare" in cache.resident(Tier.HOST))
            after = cache.acquire("hot")
            held.release()
            held = after
            if not held.ready:
                break
        assert hits <= MAX_BYPASSES + FEW
        assert tiny.wait_until(lambda: rare.ready, 5)
        rare.release()
        held.release()


def test_several_that_are_overdue_for_one_adapter_keep_others_from_its_pages_once(
    tiny: Any,
) -> None:
    source = tiny.source()
    source.put("rare", *tiny.tensors(3, targets=MODULES))
    with tiny.cache(source, pages=127, gpu_slots=1) as cache:
        cache.prefetch(["rare"], to=Tier.HOST)
        assert tiny.wait_until(lambda: "rare" in cache.resident(Tier.HOST))
        overdue = [Request(f"r{n}", "rare", kv_pages=1) for n in range(6)]
        with cache._deciding.lock:
            cache._ledger.waiting.turns.overdue = {each.request_id: each for each in overdue}
        admission = cache.admit([*overdue, Request("base", None, kv_pages=100)])
        assert [request.request_id for request, _ in admission.admitted] == ["base"]


def test_a_hit_leaves_the_pages_that_an_admitted_request_was_promised(tiny: Any) -> None:
    hot = [f"hot{n}" for n in range(7)]
    with tiny.cache(tiny.source(*hot), gpu_slots=8, pages=32) as cache:
        tiny.load(cache, *hot)  # 28 pages are idle, 4 free
        assert cache.admit([Request("big", None, kv_pages=10)]).admitted
        leases = [cache.acquire(name) for name in hot]
        assert sum(lease.ready for lease in leases) == 5
        pages = cache.pages.allocate(10)
        assert pages is not None
        check_consistent(cache)
        cache.pages.free(pages)
        assert all(tiny.wait_until(lambda lease=lease: lease.ready) for lease in leases)
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("ended_by", ["a batch", "the next decision", "time"])
def test_a_hit_that_yielded_to_a_promise_is_served_when_that_ends(
    tiny: Any, ended_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "PROMISE_S", 0.1 if ended_by == "time" else 60.0)
    with tiny.cache(tiny.source("a"), pages=20) as cache:  # KV may have 3
        tiny.load(cache, "a")
        with cache._deciding.lock:  # what is free is in use
            others = cache._ledger.gpu.pages.allocate(16, Owner.KV)
        assert others is not None
        cache._ledger.gpu._kv_limit = 20
        assert cache.admit([Request("big", None, kv_pages=2)]).admitted
        lease = cache.acquire("a")
        assert not lease.ready
        if ended_by == "a batch":
            with cache.lora_batch([]):
                pass
        elif ended_by == "the next decision":
            cache.admit([])
        assert tiny.wait_until(lambda: lease.ready, 5)
        lease.release()
        cache.pages.free(others)


def test_a_copy_that_always_fails_on_one_rank_fails_its_request_and_blocks_nobody(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        tiny.cache(tiny.source("a", "rare")) as first,
        tiny.cache(tiny.source("a", "rare")) as second,
    ):
        leader, follower = Leader(first, [1]), Follower(second, 1)

        def fail(*_: Any) -> None:
            raise OSError("injected")

        monkeypatch.setattr(second._parts.gpu, "write", fail)
        monkeypatch.setattr(follower, "report", partial(without_failures, follower.report))
        waiting, failed = [Request("r", "rare")], list[Any]()

        def step() -> bool:
            nonlocal waiting
            admission, orders = leader.admit(waiting)
            waiting = admission.deferred
            failed.extend(admission.failed)
            follower.obey(orders)
            leader.hear(follower.report())
            return bool(failed)

        assert tiny.wait_until(step)
        assert "onto the GPU of rank 1 has failed 3 times" in str(failed[0][1])
        check_consistent(first)


def without_failures(report: Callable[[], Report]) -> Report:
    """One in whose CPU memory it stays, so that it doesn't say it can't be loaded."""
    return replace(report(), failed={})


def always_first(
    cache: AdapterCache, first: Request, running: list[tuple[Request, Lease]], times: int
) -> Admission:
    """It waits, and others are admitted past it so often."""
    for number in range(times):
        admission = cache.admit([first, Request(f"base{number}")], running=running)
    return admission


def test_an_adapter_that_is_not_on_the_gpu_any_more_is_not_drained(tiny: Any) -> None:
    """Loaded again for a pipelined request, it couldn't be leased: `admit` failed half-way."""
    with tiny.cache(tiny.source("d", "e"), pages=32, gpu_slots=1) as cache:
        cache.prefetch(["e"], to=Tier.HOST)
        tiny.load(cache, "d")
        lease = cache.acquire("d").result(5)
        kv = cache.pages.allocate(10)
        assert kv is not None
        first = Request("first", None, kv_pages=15)
        always_first(cache, first, [(Request("run", "d"), lease)], MAX_BYPASSES + 3)
        lease.release()
        cache.acquire("e").result(5).release()
        assert cache._ledger.waiting.draining <= {copy.digest for copy in cache._ledger.gpu}
        for _ in range(3):
            admission = cache.admit([first, Request("next", "d", pipelined=True)])
            for _, each in admission.admitted:
                each.release()
            assert tiny.wait_until(lambda: tiny.idle(cache))
        cache.pages.free(kv)


def test_once_there_is_room_nothing_is_drained(tiny: Any) -> None:
    source = tiny.source("d", "h")
    source.put("x", *tiny.tensors(9, targets=MODULES))
    with tiny.cache(source, pages=127, gpu_slots=6) as cache:
        cache.prefetch(["x"], to=Tier.HOST)
        tiny.load(cache, "d", "h")
        held = [cache.acquire(name).result(5) for name in "dh"]
        kv = cache.pages.allocate(110)
        assert kv is not None
        running = [(Request(f"run{n}", lease.adapter_id), lease) for n, lease in enumerate(held)]
        always_first(cache, Request("first", "x"), running, MAX_BYPASSES + 3)
        assert cache._ledger.waiting.draining
        cache.pages.free(kv)
        assert tiny.wait_until(lambda: tiny.idle(cache))
        assert not cache._ledger.waiting.draining
        with cache.acquire("d") as lease:
            assert lease.ready
        for lease in held:
            lease.release()


def test_no_adapter_is_drained_for_what_only_kv_can_give_back(tiny: Any) -> None:
    with tiny.cache(tiny.source("d"), pages=32) as cache:  # KV may have 15, and has them
        tiny.load(cache, "d")
        lease, kv = cache.acquire("d").result(5), cache.pages.allocate(15)
        assert kv is not None
        running = [(Request("run", "d"), lease)]
        always_first(cache, Request("first", None, kv_pages=14), running, MAX_BYPASSES + 3)
        assert not cache._ledger.waiting.draining
        lease.release()
        cache.pages.free(kv)


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_what_waits_for_something_else_keeps_tokens_half_the_time_at_most(
    tiny: Any, num_tokens: int
) -> None:
    """It waits for a slot that one long request holds. 9 tokens will never fit."""
    with tiny.cache(tiny.source("long", "rare"), gpu_slots=1, pages=32) as cache:
        cache.prefetch(["rare"], to=Tier.HOST)
        tiny.load(cache, "long")
        lease = cache.acquire("long").result(5)
        stack = Stack(tiny, cache, Caps(tokens=8))
        admitted = 0
        for step in range(6 * MAX_BYPASSES):
            bases = [each for each in stack.waiting if each.request_id != "rare"]
            rare = Request("rare", "rare", num_tokens=num_tokens)
            stack.waiting = [rare, *bases, Request(f"base{step}")][:10]
            admitted += len(stack.step(lambda: 1).admitted)
        stack.end()
        assert admitted >= (2.5 if num_tokens == 8 else 6) * MAX_BYPASSES - FEW
        lease.release()


def test_a_hit_that_yielded_is_served_as_soon_as_there_is_room(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "PROMISE_S", 60.0)
    hot = [f"hot{n}" for n in range(7)]
    with tiny.cache(tiny.source(*hot), gpu_slots=8, pages=32) as cache:
        tiny.load(cache, *hot)
        assert cache.admit([Request("big", None, kv_pages=10)]).admitted
        leases = [cache.acquire(name) for name in hot]
        waiting = [lease for lease in leases if not lease.ready]
        assert waiting
        for lease in leases:
            if lease not in waiting:
                lease.release()
        assert all(tiny.wait_until(lambda lease=lease: lease.ready, 5) for lease in waiting)
        for lease in waiting:
            lease.release()


def test_a_lease_that_is_served_in_a_call_that_fails_is_told(tiny: Any) -> None:
    with tiny.cache(tiny.source("hot", "rare"), gpu_slots=1) as cache:
        cache.prefetch(["rare"], to=Tier.HOST)
        held = cache.acquire("hot").result(5)
        always_first(cache, Request("rare", "rare"), [], MAX_BYPASSES + 3)
        late = cache.acquire("hot")
        assert not late.ready, "it is drained"
        told = threading.Event()
        threading.Thread(target=lambda: (late.result(10), told.set())).start()
        with pytest.raises(ValueError, match="two requests"):
            cache.admit([Request("x"), Request("x")])
        assert told.wait(5)
        held.release()
        late.release()
