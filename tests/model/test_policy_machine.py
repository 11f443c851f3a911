"""Both policies against models that keep every use and sort."""

from __future__ import annotations

from itertools import islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adaptercache.policy import LFU, LRU, EvictionPolicy

KEYS = st.sampled_from("abcdef")
HALF_LIFE = 1.5
HISTORY = 2


class LRUModel:
    """When each key was used last, and which can be evicted."""

    def __init__(self) -> None:
        self.evictable: set[str] = set()
        self.last_use: dict[str, int] = {}
        self.now = 0

    def use(self, key: str) -> None:
        self.now += 1
        self.last_use[key] = self.now

    def add(self, key: str) -> None:
        self.evictable.add(key)
        self.use(key)

    def touch(self, key: str) -> None:
        if key in self.evictable:
            self.use(key)

    def discard(self, key: str) -> None:
        self.evictable.discard(key)

    def order(self) -> list[str]:
        return sorted(self.evictable, key=lambda key: self.last_use[key])


class LFUModel:
    """All uses of each key that is remembered, as (half-lives since the start, its number)."""

    def __init__(self) -> None:
        self.evictable: set[str] = set()
        self.uses: dict[str, list[tuple[float, int]]] = {}
        self.left: list[str] = []
        self.now = 0.0
        self.number = 0

    def use(self, key: str) -> None:
        self.number += 1
        self.uses.setdefault(key, []).append((self.now, self.number))

    def add(self, key: str) -> None:
        if key not in self.uses:
            self.use(key)
        self.evictable.add(key)
        self.left = [other for other in self.left if other != key]

    def touch(self, key: str) -> None:
        self.now += 1 / (HALF_LIFE * max(1, len(self.uses)))
        self.use(key)
        if key not in self.evictable:
            self.leaves(key)

    def discard(self, key: str) -> None:
        if key in self.evictable:
            self.evictable.remove(key)
            self.leaves(key)

    def leaves(self, key: str) -> None:
        self.left = [other for other in self.left if other != key] + [key]
        for forgotten in self.left[:-HISTORY]:
            del self.uses[forgotten]
        self.left = self.left[-HISTORY:]

    def order(self) -> list[str]:
        def aged_count(key: str) -> tuple[float, int]:
            uses = self.uses[key]
            return sum(2 ** (then - self.now) for then, _ in uses), uses[-1][1]

        return sorted(self.evictable, key=aged_count)


class PolicyMachine(RuleBasedStateMachine):
    policy: EvictionPolicy[str]
    model: LRUModel | LFUModel

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.policy.add(key)
        self.model.add(key)

    @rule(key=KEYS)
    def discard(self, key: str) -> None:
        self.policy.discard(key)
        self.model.discard(key)

    @rule(key=KEYS)
    def touch(self, key: str) -> None:
        self.policy.touch(key)
        self.model.touch(key)

    @precondition(lambda self: self.model.evictable)
    @rule()
    def pop(self) -> None:
        coldest = self.model.order()[0]
        assert self.policy.pop() == coldest
        self.model.discard(coldest)

    @rule(victims=st.integers(0, 6))
    def look_for_victims(self, victims: int) -> None:
        assert list(islice(self.policy, victims)) == self.model.order()[:victims]

    @invariant()
    def the_order_is_the_models(self) -> None:
        assert list(self.policy) == self.model.order()

    @invariant()
    def the_keys_are_the_models(self) -> None:
        assert len(self.policy) == len(self.model.evictable)
        assert {key for key in "abcdef" if key in self.policy} == self.model.evictable


class LRUMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.model = LRU(), LRUModel()


class LFUMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.model = LFU(half_life=HALF_LIFE, history=HISTORY), LFUModel()


TestLRU = LRUMachine.TestCase
TestLFU = LFUMachine.TestCase
TestLRU.settings = TestLFU.settings = settings(stateful_step_count=60)
