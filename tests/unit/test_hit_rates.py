"""Policies driven by traces, as a tier drives them: LRU against others' LRU, LFU against LRU."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from adaptercache.policy import LFU, LRU, EvictionPolicy

RANKS = (8, 16, 32, 64, 128)
ADAPTERS = 500
REQUESTS = 60_000
WARM_UP = 6_000


def zipf_trace(exponent: float, *, seed: int, reshuffle_every: int = REQUESTS) -> list[int]:
    """Requests by Zipf's law; whom it favours is drawn anew every so many of them."""
    rng = random.Random(seed)
    weights = list(accumulate((place + 1) ** -exponent for place in range(ADAPTERS)))
    adapters = list(range(ADAPTERS))
    trace: list[int] = []
    while len(trace) < REQUESTS:
        rng.shuffle(adapters)
        trace += rng.choices(adapters, cum_weights=weights, k=reshuffle_every)
    return trace


def sizes_in_pages(*, seed: int, sizes: tuple[int, ...] = RANKS) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(sizes) for _ in range(ADAPTERS)]


def hits(policy: EvictionPolicy[int], trace: list[int], pages: list[int], room: int) -> list[bool]:
    """Whether each request hits, in a tier of ``room`` pages that serves them one by one."""
    resident: set[int] = set()
    free = room
    answers = []
    for adapter in trace:
        answers.append(adapter in resident)
        if adapter in resident:
            policy.discard(adapter)  # leased
        elif pages[adapter] > room:
            continue  # it can never fit
        else:
            while free < pages[adapter]:
                victim = policy.pop()
                resident.remove(victim)
                free += pages[victim]
            resident.add(adapter)
            free -= pages[adapter]
        policy.touch(adapter)
        policy.add(adapter)  # released
    return answers


def hits_of_a_plain_lru(trace: list[int], pages: list[int], room: int) -> list[bool]:
    """LRU by its definition, without an order of keys: the victim has the earliest last use."""
    last_use: dict[int, int] = {}
    answers = []
    for now, adapter in enumerate(trace):
        answers.append(adapter in last_use)
        if adapter not in last_use:
            if pages[adapter] > room:
                continue
            while sum(pages[other] for other in last_use) + pages[adapter] > room:
                del last_use[min(last_use, key=lambda other: last_use[other])]
        last_use[adapter] = now
    return answers


def hit_rate(
    policy: EvictionPolicy[int], trace: list[int], pages: list[int], share: float
) -> float:
    """After the warm-up, in a tier that holds this share of all adapters' pages."""
    answers = hits(policy, trace, pages, int(share * sum(pages)))[WARM_UP:]
    return sum(answers) / len(answers)


# The second has adapters that are larger than the tier.
TIERS = [(RANKS, 0.2), ((1, 16, 4000), 0.002)]


@pytest.mark.parametrize(("sizes", "share"), TIERS, ids=["ranks", "too large"])
@pytest.mark.parametrize("seed", [1, 2])
def test_lru_hits_request_for_request_what_a_plain_lru_hits(
    sizes: tuple[int, ...], share: float, seed: int
) -> None:
    trace = zipf_trace(0.8, seed=seed)[:5_000]
    pages = sizes_in_pages(seed=seed, sizes=sizes)
    room = int(share * sum(pages))
    assert hits(LRU(), trace, pages, room) == hits_of_a_plain_lru(trace, pages, room)


@pytest.mark.parametrize(("sizes", "share"), TIERS, ids=["ranks", "too large"])
@pytest.mark.parametrize("seed", [1, 2])
def test_lru_hits_request_for_request_what_libcachesim_hits(
    sizes: tuple[int, ...], share: float, seed: int
) -> None:
    libcachesim = pytest.importorskip("libcachesim")
    trace = zipf_trace(0.8, seed=seed)
    pages = sizes_in_pages(seed=seed, sizes=sizes)
    room = int(share * sum(pages))
    theirs = libcachesim.LRU(cache_size=room)
    request = libcachesim.Request()
    their_hits = []
    for adapter in trace:
        request.obj_id = adapter + 1
        request.obj_size = pages[adapter]
        their_hits.append(theirs.get(request))
    assert hits(LRU(), trace, pages, room) == their_hits


@pytest.mark.parametrize("seed", [1, 2])
def test_lfu_beats_lru_by_five_points_while_popularity_stays(seed: int) -> None:
    trace = zipf_trace(0.8, seed=seed)
    pages = sizes_in_pages(seed=seed)
    assert hit_rate(LFU(), trace, pages, 0.2) >= hit_rate(LRU(), trace, pages, 0.2) + 0.05


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("exponent", [0.8, 1.2])
def test_lfu_is_at_most_five_points_behind_lru_when_popularity_changes(
    exponent: float, seed: int
) -> None:
    trace = zipf_trace(exponent, seed=seed, reshuffle_every=5_000)
    pages = sizes_in_pages(seed=seed)
    assert hit_rate(LFU(), trace, pages, 0.2) >= hit_rate(LRU(), trace, pages, 0.2) - 0.05
