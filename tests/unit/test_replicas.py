"""Replicas that publish what they have, and the order in which a request tries them."""

from __future__ import annotations

import json
import logging
import random
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import Tiny

from adaptercache import Tier
from adaptercache.integrations.replicas import MOST, Replicas, published
from adaptercache.routing import AffinityRouter, Costs

IDS = [f"adapter-{n}" for n in range(24)]
ADAPTERS = [f"adapter-{n}" for n in range(300)]


def stats(**tiers: list[str]) -> dict[str, Any]:
    """What a replica publishes."""
    none: dict[str, list[str]] = {"gpu": [], "copying": [], "host": [], "disk": []}
    return {"adaptercache": none | tiers}


def fleet(*names: str, **options: Any) -> Replicas:
    replicas = Replicas(**options)
    replicas.update({name: {} for name in names})
    return replicas


def order(replicas: Replicas, adapter_id: str | None = "a", **loads: int) -> list[str]:
    known = dict.fromkeys(replicas.names, 0) | loads
    return list(replicas.order(adapter_id, known.items(), 0.0))


def test_a_replica_tells_where_its_adapters_are(tiny: type[Tiny]) -> None:
    with tiny.cache(tiny.source(*IDS), gpu_slots=2) as cache:
        assert published(cache) == stats()
        tiny.load(cache, *IDS[:3])
        said = published(cache)
        assert said["adaptercache"]["gpu"] == sorted(cache.resident(Tier.GPU))
        assert said["adaptercache"]["host"] == sorted(cache.resident(Tier.HOST))
        assert said == published(cache), "equal while nothing changes: it isn't sent again"
        assert json.loads(json.dumps(said)) == said


def test_what_is_on_its_way_is_told_apart(tiny: type[Tiny]) -> None:
    """In every moment of a load; and of many copies only the latest are looked at."""
    with tiny.cache(tiny.source(*IDS), pages=200, gpu_slots=40) as cache:
        leases = [cache.acquire(adapter_id) for adapter_id in IDS]
        seen_coming = 0
        while not all(lease.ready for lease in leases):
            coming = cache.resident(Tier.GPU, coming=True)
            seen_coming += bool(coming)
            time.sleep(0)
        assert seen_coming
        assert cache.resident(Tier.GPU, coming=True) == frozenset()
        assert len(cache.resident(Tier.GPU)) == 24
        assert len(cache.resident(Tier.GPU, most=7)) == 7
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("better", ["gpu", "copying", "host", "disk"])
def test_the_higher_tier_is_tried_first(better: str) -> None:
    tiers = ["gpu", "copying", "host", "disk", "absent"]
    below = tiers[tiers.index(better) + 1]
    for one, other in (("x", "y"), ("y", "x")):
        replicas = Replicas(hot_share=1.0, costs={"away": 0.0})
        worse = stats() if below == "absent" else stats(**{below: ["a"]})
        replicas.update({one: stats(**{better: ["a"]}), other: worse})
        assert order(replicas, x=5, y=5) == [one, other]


def test_residency_is_weighed_against_the_queue() -> None:
    replicas = Replicas(bound=10.0, costs=Costs(away=0.0))
    replicas.update({"x": stats(gpu=["a"]), "y": stats()})
    assert order(replicas, x=7, y=0)[0] == "x"  # absent costs 8 in the queue
    assert order(replicas, x=9, y=0)[0] == "y"


def test_new_stats_take_the_place_of_old_ones() -> None:
    replicas = Replicas(costs={"away": 0.0})
    replicas.update({"x": stats(gpu=["a"]), "y": stats()})
    assert order(replicas)[0] == "x"
    replicas.update({"x": stats(), "y": stats(gpu=["a"])})
    assert order(replicas)[0] == "y"


WRONG: list[Any] = [
    *(None, 7, "gpu", [], {"adaptercache": None}, {"adaptercache": ["a"]}, {"loads": 3}),
    *({"adaptercache": {"gpu": "a"}}, {"adaptercache": {"gpu": [["a"], 3, None]}}),
    *({"adaptercache": {"gpu": {"a": 1}, "host": 3}}, {"adaptercache": {}}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_stats_that_are_none_tell_nothing_and_stop_nothing(wrong: object) -> None:
    replicas, plain = Replicas(slack=8), fleet("x", "y", slack=8)
    replicas.update({"x": wrong, "y": stats()})
    for adapter_id in ADAPTERS[:20]:
        assert order(replicas, adapter_id) == order(plain, adapter_id)
    replicas.update({"x": stats(gpu=["a"]), "y": stats()})  # and it may come to its senses
    assert order(replicas, x=3, y=0)[0] == "x"


def test_a_replica_without_adapters_of_ours_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replicas = Replicas()
    with caplog.at_level(logging.WARNING):
        replicas.update({"new": {}, "empty": stats(), "other": {"loads": 0}})
        replicas.update({"new": {}, "empty": stats(), "other": {"loads": 1}})
    assert [record.args for record in caplog.records] == [("other",)]


def test_a_deployments_own_stats_are_none_of_our_business() -> None:
    """They may be what can't even be compared."""

    class Own:
        def __eq__(self, other: object) -> bool:
            raise TypeError("compares with nothing")

        __hash__ = None  # type: ignore[assignment]

    replicas = Replicas(slack=8)
    for _ in range(2):
        replicas.update({"x": stats(gpu=["a"]) | {"own": Own()}, "y": stats() | {"own": Own()}})
    assert order(replicas, x=3, y=0)[0] == "x"


def test_those_who_join_or_leave_move_their_own_share_alone() -> None:
    replicas = fleet("a", "b", "c")
    before = {adapter_id: order(replicas, adapter_id)[0] for adapter_id in ADAPTERS}
    replicas.update({name: {} for name in "abcd"})
    after = {adapter_id: order(replicas, adapter_id)[0] for adapter_id in ADAPTERS}
    changed = [adapter_id for adapter_id in ADAPTERS if before[adapter_id] != after[adapter_id]]
    assert 0 < len(changed) < 1.5 * len(ADAPTERS) / 4
    assert {after[adapter_id] for adapter_id in changed} == {"d"}
    replicas.left("d")
    replicas.left("d")
    assert {adapter_id: order(replicas, adapter_id)[0] for adapter_id in ADAPTERS} == before


def test_one_that_is_known_by_its_load_alone_is_tried_too() -> None:
    """A candidate of whom no update told."""
    replicas = Replicas()
    assert list(replicas.order("a", [("x", 2), ("y", 0)], 0.0)) != []
    assert set(replicas.order("a", [("x", 2), ("y", 0)], 0.0)) == {"x", "y"}


def test_without_replicas_there_is_nothing_to_try() -> None:
    assert list(Replicas().order("a", [], 0.0)) == []


def test_the_base_model_goes_where_the_load_is_least() -> None:
    assert order(fleet("x", "y", "z"), None, x=3, y=1, z=2) == ["y", "z", "x"]


@given(st.integers(1, 20), st.data())
def test_each_replica_is_tried_once(number: int, data: st.DataObject) -> None:
    names = [f"r{n}" for n in range(number)]
    replicas = fleet(*names)
    loads = {name: data.draw(st.integers(0, 40)) for name in names}
    found = order(replicas, data.draw(st.sampled_from(["a", None])), **loads)
    assert len(found) == len(set(found)) == min(number, 8)
    assert set(found) <= set(names)


def test_a_request_that_is_tried_again_counts_once() -> None:
    """Where all are full, a request is ranked every few ms."""
    names = ["x", "y", "z", "w"]
    replicas = fleet(*names)
    drawn = random.Random(0)
    loads = [(name, 0) for name in names]
    for tick in range(2000):
        replicas.order(drawn.choice(ADAPTERS), loads, tick / 100)
        replicas.order("waits", loads, tick / 100, again=tick > 0)
    assert len(replicas.router.homes("waits")) == 1


def test_a_hot_adapter_is_served_by_several_and_the_others_by_one() -> None:
    names = [f"r{n}" for n in range(4)]
    replicas, drawn = fleet(*names, slack=1), random.Random(1)
    served: dict[str, set[str]] = {}
    for tick in range(6000):
        hot = drawn.random() < 0.5
        adapter_id = "hot" if hot else drawn.choice(ADAPTERS)
        loads = [(name, drawn.randrange(3)) for name in names]
        first = next(iter(replicas.order(adapter_id, loads, tick / 100)))
        if tick > 3000:
            served.setdefault(adapter_id, set()).add(first)
    assert len(served["hot"]) == 4
    assert len(replicas.router.homes("hot")) == 4
    assert len(replicas.router.homes("adapter-1")) == 1


def test_options_are_the_routers_and_a_wrong_one_is_refused() -> None:
    assert order(fleet("x", "y", slack=5), x=4, y=0)[0] == order(fleet("x", "y"))[0]
    for wrong in ({"costs": {"far": 1.0}}, {"bounds": 2.0}):
        with pytest.raises(TypeError):
            Replicas(**wrong)
    with pytest.raises(ValueError, match="must be"):
        Replicas(slack=-1)


def test_several_routers_agree_without_talking() -> None:
    one, other = fleet("x", "y", "z"), fleet("z", "y", "x")
    chosen = Counter(order(one, a) == order(other, a) for a in ADAPTERS)
    assert chosen == {True: len(ADAPTERS)}


def test_stats_stay_small_however_many_adapters_there_are(tiny: type[Tiny]) -> None:
    with tiny.cache(tiny.source(*IDS[:3])) as cache:
        asked: list[int | None] = []
        whole = cache.resident

        def resident(
            tier: Tier, *, coming: bool = False, most: int | None = None
        ) -> frozenset[str]:
            asked.append(most)
            return whole(tier, coming=coming, most=most)

        cache.resident = resident  # type: ignore[method-assign]
        published(cache)
        assert asked == [MOST] * 4


def test_the_router_is_the_one_of_the_simulation() -> None:
    assert type(Replicas().router) is AffinityRouter
