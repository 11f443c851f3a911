"""Routing: what moves when instances come and go, how loads are bounded, and that nothing flaps."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptercache.rates import Rates
from adaptercache.routing import AffinityRouter, Costs, Instance

names = st.lists(st.text(max_size=8), min_size=1, max_size=12, unique=True)
ADAPTERS = [f"adapter-{n}" for n in range(60)]


def homes(router: AffinityRouter) -> dict[str, tuple[str, ...]]:
    return {adapter: router.homes(adapter) for adapter in ADAPTERS}


@given(names, st.text(max_size=8))
def test_a_join_moves_adapters_to_the_newcomer_alone(present: list[str], new: str) -> None:
    router = AffinityRouter(present)
    before = homes(router)
    router.join(new)
    for adapter, (home,) in homes(router).items():
        assert (home,) == before[adapter] or (home == new and new not in present)


@given(names, st.data())
def test_a_leave_moves_only_what_was_there(present: list[str], data: st.DataObject) -> None:
    router = AffinityRouter(present)
    before, gone = homes(router), data.draw(st.sampled_from(present))
    router.leave(gone)
    if len(present) > 1:
        for adapter, (home,) in homes(router).items():
            assert home != gone
            assert (home,) == before[adapter] or before[adapter] == (gone,)
    router.join(gone)
    assert homes(router) == before


def test_the_homes_are_the_same_in_every_process_and_release() -> None:
    """Frozen: routers of a fleet that is being upgraded agree."""
    router = AffinityRouter(["ü", "b", "a"])
    found = "".join(router.homes(f"adapter-{n}")[0] for n in range(24))
    assert found == "babaüüüübbbababüabübaüüa"


def test_adapters_are_spread_evenly() -> None:
    router = AffinityRouter([f"instance-{n}" for n in range(16)])
    counts = Counter(router.homes(f"adapter-{n}")[0] for n in range(16_000))
    assert len(counts) == 16
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 40  # chi², 15 degrees


@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=300))
def test_no_load_is_lifted_over_the_bound(number: int, acts: list[tuple[bool, int]]) -> None:
    router = AffinityRouter([f"i{n}" for n in range(number)], bound=1.25)
    ends: list[str] = []
    for step, (ends_one, adapter) in enumerate(acts):
        if ends_one and ends:
            router.finished(ends.pop(adapter % len(ends)))
            continue
        name = router.route(f"a{adapter * adapter // 40}" if adapter else None, float(step))
        ends.append(name)
        mean = len(ends) / number
        assert router.load(name) <= max(1.25 * mean, mean + 1)
    assert sum(router.load(f"i{n}") for n in range(number)) == len(ends)


def test_the_home_is_preferred_and_its_overflow_goes_to_the_next_in_the_ranking() -> None:
    router = AffinityRouter([f"i{n}" for n in range(4)])
    (home,) = router.homes("a")
    first = [router.route("a", 0.0) for _ in range(2)]
    assert first[0] == home
    again = AffinityRouter([f"i{n}" for n in range(4)])
    assert [again.route("a", 0.0) for _ in range(2)] == first


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9)), max_size=60))
def test_a_ranking_begins_where_the_request_would_be_routed(
    number: int, acts: list[tuple[int, int]]
) -> None:
    names = [f"i{n}" for n in range(number)]
    routing, ranking = AffinityRouter(names, slack=3), AffinityRouter(names, slack=3)
    for step, (adapter, ended) in enumerate(acts):
        adapter_id = f"a{adapter}" if adapter else None
        order = ranking.rank(adapter_id, float(step))
        assert order[0] == routing.route(adapter_id, float(step))
        assert len(set(order)) == len(order) == min(number, 8)
        routing.finished(names[ended % number])
        for name in names:
            ranking.weigh(name, routing.load(name))
    assert ranking.limit == routing.limit


def test_a_router_without_instances_has_a_limit() -> None:
    assert AffinityRouter().limit == 1


def test_under_the_slack_a_home_takes_all_that_costs_let_it() -> None:
    """Without it the mean of four requests over four instances lets it take one."""
    for slack, at_home in ((0, 1), (8, 4)):
        router = AffinityRouter([f"i{n}" for n in range(4)], slack=slack)
        (home,) = router.homes("a")
        router.report(Instance(home, gpu={"a"}))
        assert [router.route("a", 0.0) for _ in range(4)].count(home) == at_home


@pytest.mark.parametrize("better", ["gpu", "copying", "host", "disk"])
def test_the_higher_tier_is_preferred(better: str) -> None:
    """Of two homes with equal loads."""
    tiers = ["gpu", "copying", "host", "disk", "absent"]
    below = tiers[tiers.index(better) + 1]
    for one, other in (("x", "y"), ("y", "x")):
        router = AffinityRouter(["x", "y"], hot_share=1.0, costs=Costs(away=0.0))
        router.report(Instance(one, 5, **{better: {"a"}}))
        router.report(Instance(other, 5, **({below: {"a"}} if below != "absent" else {})))
        assert router.route("a", 0.0) == one


def test_residency_is_weighed_against_the_queue() -> None:
    router = AffinityRouter(["x", "y", "z"], bound=3.0, costs=Costs(away=0.0))
    for idle_by, chosen in ((6, True), (10, False)):  # absent costs 8 in the queue
        for name in ("x", "y", "z"):
            router.report(Instance(name, 20))
        first, second = router._ranking("a", 2)
        router.report(Instance(first, 20, gpu={"a"}))
        router.report(Instance(second, 20 - idle_by))
        assert (router.route("a", 0.0) == first) is chosen


def traffic(router: AffinityRouter, weights: dict[str, float], seconds: float, start: float) -> int:
    """Steady Zipf-like traffic at 200 requests a second; how often the homes changed in it."""
    drawn = random.Random(start)
    keys, cumulative = list(weights), list(accumulate(weights.values()))
    before, now, running = router.rehomed, start, list[str]()
    while now < start + seconds:
        now += drawn.expovariate(200.0)
        running.append(router.route(drawn.choices(keys, cum_weights=cumulative)[0], now))
        if len(running) > 80:
            router.finished(running.pop(0))
    for name in running:
        router.finished(name)
    return router.rehomed - before


ZIPF = {f"adapter-{n}": 1.0 / (n + 1) for n in range(300)}


@pytest.mark.parametrize("number", [4, 10])
def test_hot_adapters_get_several_homes_and_nothing_flaps(number: int) -> None:
    router = AffinityRouter([f"i{n}" for n in range(number)])
    traffic(router, ZIPF, 120.0, 0.0)
    share = 1.0 / sum(ZIPF.values())
    assert len(router.homes("adapter-0")) == pytest.approx(share * number / 0.5, abs=1.5)
    assert len(router.homes("adapter-200")) == 1
    assert traffic(router, ZIPF, 300.0, 120.0) == 0


def test_a_share_that_wobbles_about_a_threshold_flaps_nothing() -> None:
    """Of 2 instances, an adapter fills half a one at a quarter of the traffic."""
    router = AffinityRouter(["x", "y"], memory_s=10.0)
    due = 0.0
    for tick in range(60_000):  # ten minutes
        now = tick / 100
        due += 0.22 if int(now / 30) % 2 else 0.28
        adapter_id = "a" if due >= 1.0 else f"other-{tick % 50}"
        due -= adapter_id == "a"
        router.finished(router.route(adapter_id, now))
    assert len(router.homes("a")) == 2
    assert router.rehomed == 1


def test_what_cools_down_is_consolidated_to_one_home() -> None:
    router = AffinityRouter([f"i{n}" for n in range(8)])
    traffic(router, ZIPF, 120.0, 0.0)
    assert len(router.homes("adapter-0")) > 1
    first = router.homes("adapter-0")[0]
    traffic(router, ZIPF | {"adapter-0": 0.02}, 600.0, 120.0)
    assert router.homes("adapter-0") == (first,)


def test_the_base_model_goes_where_the_load_is_least() -> None:
    router = AffinityRouter()
    for name, load in (("a", 3), ("b", 1), ("c", 2)):
        router.report(Instance(name, load))
    assert [router.route(None, 0.0) for _ in range(2)] == ["b", "b"]


def test_what_left_is_gone_and_a_router_of_none_says_so() -> None:
    router = AffinityRouter(["a"])
    router.route("x", 0.0)
    router.leave("a")
    router.leave("a")
    router.finished("a")
    with pytest.raises(LookupError):
        router.route("x", 0.0)
    router.join("b")
    assert router.route("x", 0.0) == "b"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"bound": 1.0}, {"hot_share": 0.0}, {"hot_share": 2.0}, {"calm": 1.0}),
        *({"slack": -1}, {"memory_s": 0.0}),
    ],
)
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AffinityRouter(["a"], **wrong)  # type: ignore[arg-type]


# -- the rates that it measures by


def test_rates_are_told_from_the_first_moments_on() -> None:
    rates = Rates(memory_s=60.0)
    for tick in range(1, 1001):
        rates.add("a" if tick % 4 else "b", tick / 100)
    assert rates.share("a") == pytest.approx(0.75, abs=0.01)
    assert rates.total_per_s(10.0) == pytest.approx(100, rel=0.02)


def test_what_is_long_ago_is_forgotten_and_numbers_stay_finite() -> None:
    rates = Rates(memory_s=1.0)
    rates.add("old", 0.0)
    for tick in range(2000):
        rates.add("new", float(tick))
    assert rates.share("old") < 1e-80
    assert rates.count("new", 1999.0) == pytest.approx(1 / (1 - 2.718281828**-1))
    assert list(rates.largest(0.5)) == [("new", pytest.approx(1.0))]


@pytest.mark.parametrize("pause_s", [1e3, 1e5, 1e9])
def test_a_long_pause_is_no_overflow(pause_s: float) -> None:
    rates = Rates(memory_s=1.0)
    rates.add("old", 0.0)
    assert rates.count("old", pause_s) < 1e-80
    assert rates.total_per_s(pause_s) < 1e-80
    rates.add("new", pause_s)
    assert rates.share("new") == 1.0
    assert rates.count("new", pause_s) == 1.0


def test_the_rarest_are_forgotten_where_there_are_too_many() -> None:
    rates = Rates(memory_s=60.0, capacity=10)
    for n in range(50):
        rates.add("hot", float(n))
        rates.add(f"cold-{n}", float(n))
    assert len(rates) <= 11
    assert rates.share("hot") > 0.4
