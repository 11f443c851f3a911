"""What callers give. Lists are looked at closely only once something has failed: a step must not
pay for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from adaptercache.caps import NO_CAPS, Caps
from adaptercache.decision import Decision
from adaptercache.request import Request

__all__ = ["all_of", "caps_of", "check_distinct", "no_pair", "requests_of"]


def all_of(name: str, values: Iterable[Any]) -> list[Any]:
    """Raises TypeError, which names the argument, if they are no iterable."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {values!r:.80}: give a list") from None


def requests_of(waiting: Iterable[Request]) -> list[Request]:
    """Raises TypeError if there is anything but a request among them."""
    waiting = all_of("waiting", waiting)
    for request in waiting:
        if not isinstance(request, Request):
            raise TypeError(f"waiting has {request!r:.80}: give a Request")
    return waiting


def caps_of(caps: Caps | None, max_adapters: int | None) -> Caps:
    """Raises TypeError if they are anything else, ValueError if both say how many adapters."""
    if not isinstance(caps, (Caps, type(None))):
        raise TypeError(f"caps is {caps!r:.80}: give Caps, or None")
    if not isinstance(max_adapters, (int, type(None))):
        raise TypeError(f"max_adapters is {max_adapters!r:.80}: give an int, or None")
    if caps is not None and None not in (caps.adapters, max_adapters):
        raise ValueError(f"{max_adapters=} and caps.adapters={caps.adapters}: give one of them")
    if max_adapters is None:
        return caps or NO_CAPS
    return replace(caps or NO_CAPS, adapters=max_adapters)


def no_pair(name: str, values: list[Any], kinds: tuple[type, type], meant: str) -> TypeError:
    """The error for the first of ``values`` that is no pair of these kinds."""
    for place, value in enumerate(values):
        is_pair = isinstance(value, (tuple, list)) and len(value) == 2
        if not is_pair or not all(map(isinstance, value, kinds)):
            return TypeError(f"{name}[{place}] is {value!r:.80}: give {meant}")
    return TypeError(f"{name}: give {meant}")


def check_distinct(decision: Decision, running: list[str]) -> None:
    """Raises ValueError where an id comes twice: its reason, and its KV pages, would be whose?"""
    answered = [*decision.admitted, *decision.failed]
    ids = [*running, *(request.request_id for request, _ in answered)]
    reasons, deferred = decision.reasons, decision.deferred
    if (
        len(reasons) == len(deferred)
        and len(set(ids)) == len(ids)
        and reasons.keys().isdisjoint(ids)
    ):
        return
    times = Counter([*ids, *(request.request_id for request in deferred)])
    twice = next(request_id for request_id, count in times.items() if count > 1)
    raise ValueError(f"two requests are called {twice!r}: ids are unique, running ones too")
