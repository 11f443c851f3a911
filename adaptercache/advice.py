"""Which adapters have traffic enough for an instance of their own, with the adapter merged in."""

from __future__ import annotations

from dataclasses import dataclass

from adaptercache.rates import Rates

__all__ = ["Advice", "advise"]

FULL = 0.8  # of an instance's traffic: a whole one is never reached by measuring
ENOUGH = 100.0  # requests that tell a share from chance


@dataclass(frozen=True, slots=True)
class Advice:
    """An adapter that would fill an instance: `merge` it into a base there, and serve that.

    Args:
        adapter_id: which.
        share: its part of the requests that this cache serves, base-model ones included.
        instances: how many instances its traffic fills.
    """

    adapter_id: str
    share: float
    instances: float


def advise(traffic: Rates, instances: int, now: float) -> tuple[Advice, ...]:
    """The adapters that would fill one of ``instances`` alike, the busiest first.

    Raises:
        ValueError: ``instances`` is not positive.
    """
    if instances < 1:
        raise ValueError(f"instances must be >= 1, not {instances}")
    return tuple(
        Advice(key, share, share * instances)
        for key, share in traffic.largest(FULL / instances)
        if key is not None and traffic.count(key, now) >= ENOUGH
    )
