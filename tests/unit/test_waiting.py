"""The order of arrival of leases and requests, and hints that lapse."""

from __future__ import annotations

import pytest

from adaptercache import Request, Tier
from adaptercache.waiting import (
    HINT_LASTS_S,
    LOOK_AHEAD,
    MAX_HINTS,
    Grant,
    WaitingList,
)


@pytest.fixture
def line() -> WaitingList:
    return WaitingList()


def ask(line: WaitingList, adapter_id: str) -> Grant:
    grant = Grant(adapter_id, 0.0, "remote")
    line.join(grant)
    return grant


def want(line: WaitingList, *adapter_ids: str) -> None:
    replace(line, [Request(f"r-{adapter_id}", adapter_id) for adapter_id in adapter_ids])


def replace(line: WaitingList, requests: list[Request], now: float = 0.0) -> None:
    ids = {request.request_id: "loading" for request in requests}
    adapters = dict[str, str]()
    for request in requests:
        if request.adapter_id is not None:
            adapters.setdefault(request.adapter_id, request.request_id)
    line.replace_requests(requests, ids.keys(), adapters, now, lambda adapter_id: "remote")


def test_leases_come_in_order_of_arrival_each_adapter_once(line: WaitingList) -> None:
    for adapter_id in ("b", "a", "b", "c"):
        ask(line, adapter_id)
    assert line.order() == ["b", "a", "c"]


def test_leases_and_requests_are_merged_in_order_of_arrival(line: WaitingList) -> None:
    ask(line, "a")
    want(line, "b")
    ask(line, "c")
    want(line, "b", "d")
    assert line.order() == ["a", "b", "c", "d"]


def test_a_request_keeps_its_place_while_it_is_on_the_list(line: WaitingList) -> None:
    want(line, "a")
    ask(line, "b")
    want(line, "a")
    assert line.order() == ["a", "b"]


def test_a_request_that_was_off_the_list_comes_anew(line: WaitingList) -> None:
    want(line, "a")
    want(line)
    ask(line, "b")
    want(line, "a")
    assert line.order() == ["b", "a"]


def test_an_adapters_place_is_that_of_the_first_request_that_still_waits_for_it(
    line: WaitingList,
) -> None:
    """Where there was always another one waiting, a lease never came to its turn."""
    replace(line, [Request("old", "a")])
    ask(line, "b")
    replace(line, [Request("old", "a"), Request("new", "a")])
    assert line.order() == ["a", "b"]
    replace(line, [Request("new", "a")])
    assert line.order() == ["b", "a"]


def test_among_requests_the_lists_own_order_decides(line: WaitingList) -> None:
    want(line, "a", "b")
    want(line, "b", "a")
    assert line.order() == ["b", "a"]


def test_a_lease_that_left_is_gone(line: WaitingList) -> None:
    first, second = ask(line, "a"), ask(line, "a")
    line.leave(first)
    assert line.grants("a") == [second]
    line.leave(second)
    line.leave(second)
    assert line.order() == []
    assert not line


def test_only_the_first_of_a_long_line_are_looked_at(line: WaitingList) -> None:
    for number in range(LOOK_AHEAD + 10):
        ask(line, f"a{number}")
    assert line.order() == [f"a{number}" for number in range(LOOK_AHEAD)]


def test_a_hint_lapses(line: WaitingList) -> None:
    line.hint("a", Tier.GPU, 0.0)
    assert line.hints(HINT_LASTS_S - 0.1) == [("a", Tier.GPU)]
    assert line.hints(HINT_LASTS_S) == []
    assert not line


def test_a_hint_that_is_said_again_lasts_on(line: WaitingList) -> None:
    line.hint("a", Tier.GPU, 0.0)
    line.hint("a", Tier.HOST, 5.0)
    assert line.hints(HINT_LASTS_S + 1.0) == [("a", Tier.HOST)]


def test_a_hint_ends_when_what_it_means_is_used(line: WaitingList) -> None:
    line.hint("a", Tier.GPU, 0.0)
    line.forget_hint("a")
    assert line.hints(0.0) == []


def test_hints_are_bounded(line: WaitingList) -> None:
    for number in range(MAX_HINTS + 10):
        line.hint(f"a{number}", Tier.GPU, 0.0)
    assert len(line._hints) == MAX_HINTS


def test_the_most_kv_pages_that_one_request_asks_for_are_known(line: WaitingList) -> None:
    requests = [Request("r1", "a", kv_pages=2), Request("r2", None, kv_pages=5)]
    replace(line, requests)
    assert line.kv_pages == 5


def test_when_a_request_was_first_seen_is_known_while_it_waits(line: WaitingList) -> None:
    first, second, third = (Request(f"r{n}", "a") for n in range(3))
    replace(line, [first, second], 1.0)
    replace(line, [second, third, Request("base")], 2.0)
    assert line.first_seen("r0") is None
    assert line.first_seen("r1") == (1.0, "remote")
    assert line.first_seen("r2") == (2.0, "remote")
    assert line.first_seen("base") == (2.0, "gpu")
