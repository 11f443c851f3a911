"""`plan`, on states made up by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest

from adaptercache import AdapterNotFound, CapacityError
from adaptercache.batch import Decision, KVRoom, Load, Request, Standing, plan
from adaptercache.placement import Placement

READY = {name: Standing(name.encode(), ready=True) for name in "abc"}

MUCH_KV = KVRoom(used=0, reclaimable=100, limit=100)
NOTHING = Placement((), (), (), 0)


@dataclass
class FakeState:
    """What `plan` reads: by default a, b and c are resident, x is cold, and there is much KV."""

    standings: dict[str, Standing] = field(default_factory=lambda: dict(READY))
    room: KVRoom = MUCH_KV
    idle: dict[bytes, int] = field(default_factory=dict)
    placement: Placement = NOTHING
    asked: list[tuple[list[bytes], list[str], int]] = field(default_factory=list)

    def standing(self, adapter_id: str) -> Standing:
        return self.standings.get(adapter_id, Standing(adapter_id.encode()))

    def kv_room(self) -> KVRoom:
        return self.room

    def idle_pages(self, digest: bytes) -> int:
        return self.idle.get(digest, 0)

    def place_on_gpu(
        self, admitted: Collection[bytes], waiting: Sequence[str], kv_promised: int
    ) -> Placement:
        self.asked.append((list(admitted), list(waiting), kv_promised))
        return self.placement

    def kv_pages_wanted(self, placement: Placement) -> int:
        return placement.short

    def number(self, placement: Placement) -> tuple[Load, ...]:
        return ()


def requests(*adapter_ids: str | None, kv_pages: int = 0) -> list[Request]:
    return [Request(f"r{n}", key, kv_pages=kv_pages) for n, key in enumerate(adapter_ids)]


def admitted(decision: Decision) -> list[str]:
    return [request.request_id for request, _ in decision.admitted]


def test_resident_adapters_are_admitted_past_cold_ones() -> None:
    decision = plan(requests("x", "a", "x", "b"), FakeState())
    assert admitted(decision) == ["r1", "r3"]
    assert decision.reasons == {"r0": "loading", "r2": "loading"}


def test_each_request_is_answered_once_and_the_order_is_kept() -> None:
    state = FakeState(READY | {"bad": Standing(error=AdapterNotFound("no"))})
    decision = plan(requests("x", "bad", "a", None, "bad", "x"), state)
    assert admitted(decision) == ["r2", "r3"]
    assert [request.request_id for request in decision.deferred] == ["r0", "r5"]
    assert [request.request_id for request, _ in decision.failed] == ["r1", "r4"]


def test_the_cap_counts_distinct_adapters_and_those_that_run() -> None:
    decision = plan(requests("a", "b", "c", "a", None), FakeState(), running=[b"c"], max_adapters=2)
    assert admitted(decision) == ["r0", "r2", "r3", "r4"]
    assert decision.reasons == {"r1": "max_adapters"}


@pytest.mark.parametrize("cap", [0, 1])
def test_a_cap_that_is_full_admits_base_requests_alone(cap: int) -> None:
    decision = plan(requests("a", None), FakeState(), running=[b"z"] * cap, max_adapters=cap)
    assert admitted(decision) == ["r1"]


def test_once_kv_is_short_nobody_behind_takes_any() -> None:
    state = FakeState(room=KVRoom(0, 5, 10))
    waiting = [
        Request("r0", None, kv_pages=3),
        Request("r1", None, kv_pages=3),
        Request("r2", None, kv_pages=1),
        Request("r3", None),
    ]
    decision = plan(waiting, state)
    assert admitted(decision) == ["r0", "r3"]
    assert decision.reasons == {"r1": "kv_pages", "r2": "kv_pages"}


def test_an_adapter_that_is_admitted_no_longer_counts_as_reclaimable() -> None:
    state = FakeState(room=KVRoom(0, 5, 10), idle={b"a": 4})
    decision = plan([Request("r0", "a", kv_pages=2)], state)
    assert decision.reasons == {"r0": "kv_pages"}
    assert admitted(plan([Request("r0", "a", kv_pages=1)], state)) == ["r0"]


def test_an_idle_adapter_whose_pages_were_just_promised_to_kv_waits() -> None:
    state = FakeState(room=KVRoom(0, 5, 10), idle={b"a": 4})
    decision = plan([Request("r0", None, kv_pages=3), Request("r1", "a")], state)
    assert admitted(decision) == ["r0"]


def test_more_kv_than_there_can_be_fails_its_own_request() -> None:
    state = FakeState(room=KVRoom(0, 5, 10))
    decision = plan([Request("r0", "a", kv_pages=11), Request("r1", "a", kv_pages=1)], state)
    assert [(r.request_id, type(e)) for r, e in decision.failed] == [("r0", CapacityError)]
    assert admitted(decision) == ["r1"]


def test_kv_has_a_limit_beside_what_is_reclaimable() -> None:
    state = FakeState(room=KVRoom(used=8, reclaimable=100, limit=10))
    assert plan(requests(None, kv_pages=3), state).reasons == {"r0": "kv_pages"}


def test_loads_are_placed_for_who_goes_on_waiting_and_not_over_who_is_admitted() -> None:
    state = FakeState()
    plan([*requests("x", "a", "y", "x"), Request("r9", None, kv_pages=2)], state)
    assert state.asked == [([b"a"], ["x", "y"], 2)]


def test_who_is_refused_room_is_told_so() -> None:
    state = FakeState(placement=Placement((), (), (b"x",), 3))
    decision = plan(requests("x", "y"), state)
    assert decision.reasons == {"r0": "room", "r1": "loading"}
    assert (decision.pages_wanted, decision.refused) == (3, b"x")


def test_a_resident_adapter_that_is_kept_for_another_says_why() -> None:
    state = FakeState({"a": replace(READY["a"], ready=False, reason="room")})
    assert plan(requests("a"), state).reasons == {"r0": "room"}


def test_nothing_to_do_is_an_empty_decision() -> None:
    assert plan([], FakeState()) == Decision()
