"""`plan`, on states made up by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptercache import AdapterNotFound, CapacityError, Request
from adaptercache.batch import Batch, plan
from adaptercache.caps import RANK_CLASSES, Caps, Footprint
from adaptercache.decision import Decision
from adaptercache.kernels import segments
from adaptercache.placement import Placement
from adaptercache.standing import Load, Need, Standing
from adaptercache.step_room import KVRoom

READY = {name: Standing(name.encode(), ready=True) for name in "abc"}

MUCH_KV = KVRoom(used=0, reclaimable=100, limit=100)
NOTHING = Placement((), (), (), 0)


@dataclass
class FakeState:
    """What `plan` reads: by default a, b and c are resident, x is cold, and there is much KV."""

    standings: dict[str, Standing] = field(default_factory=lambda: dict(READY))
    room: KVRoom = MUCH_KV
    idle: dict[bytes, int] = field(default_factory=dict)
    to_load: dict[str, int] = field(default_factory=dict)  # pages, of those in CPU memory
    footprints: dict[bytes, Footprint] = field(default_factory=dict)
    placement: Placement = NOTHING
    loads: tuple[Load, ...] = ()
    too_late: frozenset[bytes] = frozenset()  # loads that no step can wait for
    asked: list[tuple[list[bytes], list[str], int]] = field(default_factory=list)

    def standing(self, adapter_id: str) -> Standing:
        return self.standings.get(adapter_id, Standing(adapter_id.encode()))

    def settled(self) -> Collection[str] | None:
        return None

    def names_of(self, digests: Collection[bytes]) -> Collection[str]:
        return {digest.decode() for digest in digests}

    def footprint(self, digest: bytes) -> Footprint:
        return self.footprints.get(digest, Footprint(16, 4))

    def kv_room(self) -> KVRoom:
        return self.room

    def idle_pages(self, digest: bytes) -> int:
        return self.idle.get(digest, 0)

    def need_of(self, adapter_id: str | None) -> Need | None:
        if adapter_id is None:
            return Need(None, 0)
        standing = self.standing(adapter_id)
        assert standing.digest is not None
        if standing.ready:
            return Need(standing.digest, self.idle.get(standing.digest, 0))
        pages = self.to_load.get(adapter_id)
        return Need(standing.digest, pages) if pages is not None else None

    def place_on_gpu(
        self, admitted: Collection[bytes], waiting: Mapping[str, str], kv_promised: int
    ) -> Placement:
        self.asked.append((list(admitted), list(waiting), kv_promised))
        return self.placement

    def kv_pages_wanted(self, placement: Placement, most: int) -> int:
        return placement.short + sum(placement.behind[: most - 1])

    def number(self, placement: Placement) -> tuple[Load, ...]:
        return self.loads

    def can_pipeline(self, load: Load) -> bool:
        return load.digest not in self.too_late


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
    decision = plan(requests("a", "b", "c", "a", None), FakeState(), Batch([b"c"], caps=Caps(2)))
    assert admitted(decision) == ["r0", "r2", "r3", "r4"]
    assert decision.reasons == {"r1": "max_adapters"}


@pytest.mark.parametrize("cap", [0, 1])
def test_a_cap_that_is_full_admits_base_requests_alone(cap: int) -> None:
    decision = plan(requests("a", None), FakeState(), Batch([b"z"] * cap, caps=Caps(cap)))
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


@pytest.mark.parametrize(("cap", "pages"), [(None, 9), (4, 9), (3, 7), (2, 3), (1, 3)])
def test_as_many_as_may_join_the_batch_are_asked_room_for(cap: int | None, pages: int) -> None:
    state = FakeState(placement=Placement((), (), (b"x", b"y", b"z"), 3, (4, 2)))
    batch = Batch([b"a"], caps=Caps(adapters=cap))
    assert plan(requests("x", "y", "z"), state, batch).pages_wanted == pages


def test_a_resident_adapter_that_is_kept_for_another_says_why() -> None:
    state = FakeState({"a": replace(READY["a"], ready=False, reason="room")})
    assert plan(requests("a"), state).reasons == {"r0": "room"}


def test_of_settled_ids_alone_the_standing_is_asked_for() -> None:
    class Settled(FakeState):
        def settled(self) -> Collection[str] | None:
            return {"a", "bad"}

        def standing(self, adapter_id: str) -> Standing:
            assert adapter_id in ("a", "bad")
            return super().standing(adapter_id)

    state = Settled({"bad": Standing(error=AdapterNotFound("no"))} | READY)
    decision = plan(requests("x", "a", "bad", "b", "x"), state)
    assert admitted(decision) == ["r1"]
    assert [r.request_id for r, _ in decision.failed] == ["r2"]
    assert decision.reasons == {"r0": "loading", "r3": "loading", "r4": "loading"}


def test_nothing_to_do_is_an_empty_decision() -> None:
    assert plan([], FakeState()) == Decision()


RANKS = {b"a": Footprint(64, 16), b"b": Footprint(16, 4), b"c": Footprint(8, 2)}


def test_the_sum_of_the_ranks_is_capped() -> None:
    state = FakeState(footprints=RANKS)
    decision = plan(requests("b", "a", "c", "b"), state, Batch(caps=Caps(rank_sum=30)))
    assert admitted(decision) == ["r0", "r2", "r3"]
    assert [r.request_id for r, _ in decision.failed] == ["r1"]  # 64 alone is over the cap
    decision = plan(requests("b", "a", "c"), state, Batch(caps=Caps(rank_sum=70)))
    assert admitted(decision) == ["r0", "r2"]
    assert decision.reasons == {"r1": "max_rank_sum"}


def test_the_pages_that_a_step_reads_are_capped_and_running_adapters_count() -> None:
    state = FakeState(footprints=RANKS)
    decision = plan(requests("b", "c", "a"), state, Batch([b"a", b"a"], caps=Caps(pages=18)))
    assert admitted(decision) == ["r1", "r2"]
    assert decision.reasons == {"r0": "max_pages"}


def test_an_adapter_over_a_cap_by_itself_is_told_so() -> None:
    state = FakeState(footprints=RANKS)
    ((_, error),) = plan(requests("a"), state, Batch(caps=Caps(pages=8))).failed
    assert isinstance(error, CapacityError)
    assert (error.needed, error.limit, error.unit, error.adapter_id) == (16, 8, "pages", "a")


def test_tokens_are_capped_in_order_of_arrival() -> None:
    drafts = [Request("r0", "a", num_tokens=5), Request("r1", None, num_tokens=4)]
    batch = Batch(tokens=2, caps=Caps(tokens=8))
    decision = plan([*drafts, Request("r2", None, num_tokens=1)], FakeState(), batch)
    assert admitted(decision) == ["r0"]
    assert decision.reasons == {"r1": "max_tokens", "r2": "max_tokens"}
    decision = plan([drafts[0], Request("r2", "b", num_tokens=1)], FakeState(), batch)
    assert admitted(decision) == ["r0", "r2"]


def test_more_tokens_than_a_step_may_have_fail_their_own_request() -> None:
    waiting = [Request("r0", "a", num_tokens=9), Request("r1", "a", num_tokens=8)]
    decision = plan(waiting, FakeState(), Batch(caps=Caps(tokens=8)))
    assert [(r.request_id, type(e)) for r, e in decision.failed] == [("r0", CapacityError)]
    assert admitted(decision) == ["r1"]


def test_near_ranks_fill_a_capped_batch_first() -> None:
    state = FakeState(footprints=RANKS)
    caps = Caps(2, near_ranks=True)
    assert admitted(plan(requests("b", "a", "c"), state, Batch(caps=caps))) == ["r0", "r2"]
    assert admitted(plan(requests("b", "a", "c"), state, Batch(caps=Caps(2)))) == ["r0", "r1"]
    # a preference: what is left of the cap goes to the others, and the order is kept
    decision = plan(requests("b", "a", "x", "c"), state, Batch(caps=Caps(3, near_ranks=True)))
    assert admitted(decision) == ["r0", "r1", "r3"]


def test_near_ranks_keep_the_order_of_those_that_wait() -> None:
    state = FakeState(footprints=RANKS)
    waiting = requests("b", "a", "x", "c", "a")
    decision = plan(waiting, state, Batch(caps=Caps(2, near_ranks=True)))
    assert [request.request_id for request in decision.deferred] == ["r1", "r2", "r4"]
    assert state.asked[-1][1] == ["a", "x"]
    assert [*decision.cold] == ["a", "x"]


def test_rank_classes_are_those_of_the_kernels() -> None:
    assert RANK_CLASSES == segments.RANK_CLASSES


def test_who_is_first_in_line_for_a_cap_is_named() -> None:
    decision = plan(requests("x", "a", "b", "c"), FakeState(), Batch(caps=Caps(1)))
    assert decision.first["cap"].request_id == "r2"
    assert plan(requests("x", "a", "b"), FakeState()).first == {}


def test_an_overdue_request_closes_the_batch_behind_it_to_the_least_used_adapter() -> None:
    batch = Batch([b"a", b"a", b"b"], caps=Caps(2), overdue=["r1"])
    decision = plan(requests("b", "c", "b", "a", None), FakeState(), batch)
    assert admitted(decision) == ["r0", "r3", "r4"]  # r0 came before it
    assert decision.reasons == {"r1": "max_adapters", "r2": "max_adapters"}


def test_nobody_small_slips_in_behind_an_overdue_request() -> None:
    state = FakeState(footprints=RANKS)
    batch = Batch([b"b"], caps=Caps(rank_sum=70), overdue=["r0"])
    assert admitted(plan(requests("a", "c", "b"), state, batch)) == []
    batch = Batch([b"b"], caps=Caps(rank_sum=70))
    assert admitted(plan(requests("a", "c", "b"), state, batch)) == ["r1", "r2"]


def test_who_is_first_in_line_for_room_is_named_whether_for_pages_or_for_a_slot() -> None:
    no_room = Placement((), (), (b"x",), 1)
    full = KVRoom(used=99, reclaimable=1, limit=100)
    decision = plan(requests("a", "x", "y"), FakeState(placement=no_room))
    assert decision.first["room"].request_id == "r1"
    waiting = [Request("big", "b", kv_pages=2), *requests("x")]
    decision = plan(waiting, FakeState(room=full, placement=no_room))
    assert decision.first["room"].request_id == "big"


def test_behind_an_overdue_request_nobody_takes_the_pages_that_it_needs() -> None:
    """7 for its adapter and 60 of its own, of 100: 33 are left over."""
    state = FakeState(to_load={"x": 7}, placement=Placement((), (), (b"x",), 1))
    behind = [Request("s", "a", kv_pages=30), Request("t", None, kv_pages=4), Request("u", "b")]
    waiting = [Request("first", "c", kv_pages=0), Request("big", "x", kv_pages=60), *behind]
    assert admitted(plan(waiting, state)) == ["first", "s", "t", "u"]
    decision = plan(waiting, state, Batch(overdue=["big"]))
    assert admitted(decision) == ["first", "s", "u"]
    assert decision.reasons == {"big": "room", "t": "kv_pages"}


def test_behind_an_overdue_request_idle_adapters_that_pages_are_to_come_from_stay_idle() -> None:
    state = FakeState(room=KVRoom(used=60, reclaimable=40, limit=100), idle={b"a": 5, b"b": 30})
    waiting = [Request("big", "a", kv_pages=38), *requests("b", "c")]
    assert admitted(plan(waiting, state)) == ["r0", "r1"]
    decision = plan(waiting, state, Batch(overdue=["big"]))
    assert admitted(decision) == ["r1"]  # c is leased already: it takes nothing
    assert decision.reasons == {"big": "kv_pages", "r0": "kv_pages"}


def test_no_pages_are_kept_for_an_overdue_request_whose_adapter_is_far_away() -> None:
    waiting = [Request("big", "x", kv_pages=100), Request("small", None, kv_pages=1)]
    assert admitted(plan(waiting, FakeState(), Batch(overdue=["big"]))) == ["small"]


# -- whatever the state: caps hold, order is kept, everybody is answered

IDS = [None, *"abcdef"]
ranks = st.sampled_from([4, 8, 16, 32, 64])
states = st.builds(
    FakeState,
    standings=st.fixed_dictionaries(
        {
            name: st.sampled_from(
                [
                    Standing(name.encode(), ready=True),
                    Standing(name.encode()),
                    Standing(name.encode(), reason="room"),
                    Standing(error=AdapterNotFound("no")),
                ]
            )
            for name in "abcdef"
        }
    ),
    footprints=st.fixed_dictionaries(
        {name.encode(): st.builds(Footprint, ranks, st.integers(1, 8)) for name in "abcdef"}
    ),
    room=st.builds(KVRoom, st.just(0), st.integers(0, 20), st.integers(10, 20)),
    idle=st.dictionaries(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 6)),
)
caps_of = st.builds(
    Caps,
    st.none() | st.integers(1, 4),
    st.none() | st.integers(8, 128),
    st.none() | st.integers(4, 16),
    st.none() | st.integers(4, 16),
    st.booleans(),
)
some_requests = st.lists(
    st.tuples(st.sampled_from(IDS), st.integers(0, 5), st.integers(0, 6)), max_size=20
)


@given(states, caps_of, some_requests, st.integers(-1, 19), st.integers(0, 2))
def test_caps_hold_order_is_kept_and_everybody_is_answered(
    state: FakeState,
    caps: Caps,
    wanted: list[tuple[str | None, int, int]],
    overdue: int,
    num_running: int,
) -> None:
    waiting = [Request(f"r{n}", *args) for n, args in enumerate(wanted)]
    running = [b"a", b"b"][:num_running]
    batch = Batch(running, num_running, caps, f"r{overdue}")
    decision = plan(waiting, state, batch)

    place = {request.request_id: n for n, request in enumerate(waiting)}
    answers = [
        [request for request, _ in decision.admitted],
        list(decision.deferred),
        [request for request, _ in decision.failed],
    ]
    for answer in (answers[0], answers[1]):
        assert answer == sorted(answer, key=lambda request: place[request.request_id])
    assert sorted(r.request_id for answer in answers for r in answer) == sorted(place)
    assert decision.reasons.keys() == {request.request_id for request in decision.deferred}

    adapters = {*running, *(digest for _, digest in decision.admitted if digest is not None)}
    prints = [state.footprints[digest] for digest in adapters]
    is_new = bool(adapters - set(running))
    assert caps.adapters is None or len(adapters) <= max(caps.adapters, num_running)
    assert caps.rank_sum is None or not is_new or sum(p.rank for p in prints) <= caps.rank_sum
    assert caps.pages is None or not is_new or sum(p.pages for p in prints) <= caps.pages
    tokens = num_running + sum(request.num_tokens for request, _ in decision.admitted)
    assert caps.tokens is None or tokens <= max(caps.tokens, num_running)
    assert sum(r.kv_pages for r, _ in decision.admitted) <= min(
        state.room.reclaimable, state.room.limit
    )
    for request in decision.deferred:
        if request.adapter_id is None:
            assert decision.reasons[request.request_id] in ("max_tokens", "kv_pages")
    for request, digest in decision.admitted:
        standing = state.standing(request.adapter_id) if request.adapter_id else None
        assert digest == (standing.digest if standing else None)
        assert standing is None or standing.ready


@given(states, caps_of, some_requests)
def test_near_ranks_are_a_preference_that_leaves_no_room_unused(
    state: FakeState, caps: Caps, wanted: list[tuple[str | None, int, int]]
) -> None:
    """Whoever waits for a cap on adapters finds it full, near ranks or not."""
    waiting = [Request(f"r{n}", adapter_id) for n, (adapter_id, _, _) in enumerate(wanted)]
    decision = plan(waiting, state, Batch(caps=replace(caps, tokens=None, near_ranks=True)))
    adapters = {digest for _, digest in decision.admitted if digest is not None}
    if "max_adapters" in decision.reasons.values():
        assert len(adapters) == caps.adapters


# Requests that are admitted while their adapter is still coming.


def pipelined(*adapter_ids: str, kv_pages: int = 0) -> list[Request]:
    return [
        Request(f"p{n}", key, kv_pages=kv_pages, pipelined=True)
        for n, key in enumerate(adapter_ids)
    ]


COMING = READY | {"y": Standing(b"y", coming=True)}


def test_who_can_wait_layer_by_layer_joins_while_its_adapter_comes() -> None:
    waiting = [*requests("y", "a"), *pipelined("y")]
    decision = plan(waiting, FakeState(COMING))
    assert admitted(decision) == ["r1", "p0"]
    assert decision.reasons == {"r0": "loading"}
    assert [*decision.cold] == ["y"], "r0 still waits for it"
    assert plan(pipelined("y"), FakeState(COMING)).cold == {}


def test_a_load_that_is_decided_on_now_admits_in_the_same_decision() -> None:
    loads = (Load(b"x", 0, (1, 2)), Load(b"z", 1, (3, 4)))
    state = FakeState(loads=loads, too_late=frozenset([b"z"]))
    decision = plan([*pipelined("x", "z"), *requests("a")], state)
    assert admitted(decision) == ["p0", "r0"], "in order of arrival"
    assert decision.reasons == {"p1": "loading"}
    assert [*decision.cold] == ["z"]
    assert plan(requests("x"), state).reasons == {"r0": "loading"}, "who doesn't say so waits"


def test_caps_and_kv_bind_those_too() -> None:
    loads = (Load(b"x", 0, (1, 2)), Load(b"y", 1, (3, 4)))
    capped = plan(pipelined("x", "y"), FakeState(loads=loads), Batch(caps=Caps(1)))
    assert admitted(capped) == ["p0"]
    assert capped.reasons == {"p1": "max_adapters"}
    # What loads take, KV can't get any more: of 7 pages 3 are left.
    state = FakeState(loads=loads, room=KVRoom(used=0, reclaimable=7, limit=7))
    short = plan(pipelined("x", "y", kv_pages=2), state)
    assert admitted(short) == ["p0"]
    assert short.reasons == {"p1": "kv_pages"}
    # What was kept for one who is overdue is there when its load begins, whoever is behind.
    kept = FakeState(loads=loads[:1], to_load={"x": 2}, room=KVRoom(used=0, reclaimable=7, limit=7))
    waiting = [*pipelined("x", kv_pages=4), Request("behind", None, kv_pages=3)]
    decision = plan(waiting, kept, Batch(overdue=["p0"]))
    assert admitted(decision) == ["p0"]
    assert decision.reasons == {"behind": "kv_pages"}
    measured = plan(pipelined("x"), FakeState(loads=loads), Batch(caps=Caps(rank_sum=64)))
    assert measured.reasons == {"p0": "loading"}, "what it adds is known once it has begun"
