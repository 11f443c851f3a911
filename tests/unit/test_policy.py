from __future__ import annotations

from heapq import heappush
from itertools import islice
from typing import Any

import pytest

from adaptercache.policy import LFU, LRU, EvictionPolicy, new_policy


def use(policy: EvictionPolicy[str], *keys: str) -> None:
    """Each key is leased, used and released."""
    for key in keys:
        policy.discard(key)
        policy.touch(key)
        policy.add(key)


@pytest.fixture(params=["lru", "lfu"])
def policy(request: pytest.FixtureRequest) -> EvictionPolicy[str]:
    return new_policy(request.param)


def test_the_coldest_key_is_popped_first(policy: EvictionPolicy[str]) -> None:
    use(policy, "a", "b", "c")
    assert [policy.pop() for _ in range(3)] == ["a", "b", "c"]
    assert len(policy) == 0


def test_a_use_makes_a_key_hotter(policy: EvictionPolicy[str]) -> None:
    use(policy, "a", "b", "c")
    policy.touch("a")
    assert list(policy) == ["b", "c", "a"]


def test_iterating_changes_nothing(policy: EvictionPolicy[str]) -> None:
    use(policy, "a", "b", "c", "d")
    assert list(policy) == list(policy)
    assert len(policy) == 4


def test_a_leased_key_is_no_victim_and_comes_back_at_its_release(
    policy: EvictionPolicy[str],
) -> None:
    use(policy, "a", "b")
    policy.discard("a")
    policy.touch("a")
    assert "a" not in policy
    assert list(policy) == ["b"]
    policy.add("a")
    assert list(policy) == ["b", "a"]


def test_discarding_an_absent_key_is_fine(policy: EvictionPolicy[str]) -> None:
    use(policy, "a")
    policy.discard("b")
    assert list(policy) == ["a"]


def test_touching_a_key_does_not_make_it_evictable(policy: EvictionPolicy[str]) -> None:
    policy.touch("a")
    assert "a" not in policy
    assert list(policy) == []


def test_there_is_nothing_to_pop_from_an_empty_order(policy: EvictionPolicy[str]) -> None:
    with pytest.raises(KeyError, match="no key can be evicted"):
        policy.pop()


def test_a_release_counts_as_a_use_for_lru() -> None:
    lru = LRU[str]()
    for key in ("a", "b", "a"):
        lru.add(key)
    assert list(lru) == ["b", "a"]


def test_lfu_prefers_many_uses_to_a_late_one() -> None:
    lfu = LFU[str]()
    use(lfu, "often", "often", "often", "once")
    assert list(lfu) == ["once", "often"]


def test_lfu_forgets_the_favourite_of_yesterday() -> None:
    lfu = LFU[str](half_life=2)
    use(lfu, *["yesterday"] * 50)
    use(lfu, *["today", "other"] * 20)
    assert lfu.pop() == "yesterday"


def test_a_count_of_lfu_outlives_eviction() -> None:
    lfu = LFU[str](half_life=1000)
    use(lfu, "a", "a", "a", "b", "b")
    lfu.discard("a")
    lfu.add("a")
    assert list(lfu) == ["b", "a"]


def test_lfu_forgets_the_counts_that_left_first_when_there_are_too_many() -> None:
    lfu = LFU[str](half_life=1000, history=2)
    use(lfu, "a", "a", "a", "b", "b", "b", "b")
    lfu.discard("a")
    lfu.discard("b")
    use(lfu, "c", "c")  # leased in between, "c" is one of two that are remembered
    lfu.add("b")
    lfu.add("a")
    assert list(lfu) == ["a", "c", "b"]


def test_the_memory_of_lfu_is_bounded() -> None:
    lfu = LFU[int](history=10)
    for key in range(1000):
        lfu.touch(key)
    assert len(lfu._left) == 10


def test_for_lfu_a_prefetched_key_is_as_hot_as_one_use_makes_it() -> None:
    lfu = LFU[str]()
    use(lfu, "a", "b", "b")
    lfu.add("prefetched")
    assert list(lfu) == ["a", "prefetched", "b"]


def test_lfu_counts_on_after_any_number_of_uses() -> None:
    lfu = LFU[str](half_life=0.001)  # 500 half-lives a use: a count not kept as a logarithm
    use(lfu, *["a", "b"] * 50)  # would overflow at once
    assert list(lfu) == ["a", "b"]


def test_looking_for_a_victim_of_lfu_reads_only_the_cold_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lfu = LFU[int]()
    for key in range(10_000):
        lfu.add(key)
    read: list[Any] = []

    def counting_heappush(frontier: list[Any], entry: Any) -> None:
        read.append(entry)
        heappush(frontier, entry)

    monkeypatch.setattr("adaptercache.policy.heappush", counting_heappush)
    assert list(islice(lfu, 20)) == list(range(20))
    assert len(read) <= 40


@pytest.mark.parametrize(
    ("half_life", "history"), [(0.0, 1), (-1.0, 1), (float("nan"), 1), (1.0, -1)]
)
def test_lfu_refuses_parameters_that_make_no_sense(half_life: float, history: int) -> None:
    with pytest.raises(ValueError, match="half_life"):
        LFU(half_life=half_life, history=history)


def test_a_policy_is_had_by_its_name() -> None:
    assert isinstance(new_policy("lru"), LRU)
    assert isinstance(new_policy("lfu"), LFU)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fifo'.*\['lfu', 'lru'\]"):
        new_policy("fifo")
