"""A lease looked ready a moment before its slot was set: another thread could read slot −1, the
base model's."""

from __future__ import annotations

from typing import Any

from adaptercache.waiting import Grant


class Watched(Grant):
    """A grant that looks at itself the moment it turns ready."""

    __slots__ = ("seen",)

    def __setattr__(self, name: str, value: object) -> None:
        Grant.__dict__[name].__set__(self, value) if name != "seen" else object.__setattr__(
            self, name, value
        )
        if name == "key" and value is not None:
            self.seen = (self.digest, self.slot)


def test_a_lease_has_its_slot_and_digest_when_it_turns_ready(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        tiny.load(cache, "a")
        grant = Watched("a", 0.0, "gpu")
        with cache._deciding.lock:
            assert cache._ledger.lease(grant)
        assert grant.seen == (grant.digest, grant.slot)
        cache._leasing.take_back(grant)
