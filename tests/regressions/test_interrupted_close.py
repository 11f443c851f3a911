"""Where `close` was interrupted, calling it again did nothing: threads, the arena and the temporary
directory stayed."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from adaptercache.testing import FaultySource


def names_of_threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("adaptercache")}


def assert_all_is_gone(tiny: Any, cache: Any, before: set[str]) -> None:
    assert not cache._gpu.is_up
    assert not cache._parts.disk.root.exists()
    tiny.wait_until(lambda: names_of_threads() <= before)


@pytest.mark.parametrize("place", range(6))
def test_closing_again_does_the_rest(tiny: Any, place: int) -> None:
    """Each step of it in turn is the one that Ctrl-C comes in."""
    before = names_of_threads()
    cache = tiny.cache(tiny.source("a"))
    tiny.load(cache, "a")
    ends = cache._parts.ends
    step = ends[place]

    def interrupted() -> None:
        ends[0] = step
        raise KeyboardInterrupt

    ends[place] = interrupted
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    cache.close()
    assert_all_is_gone(tiny, cache, before)


def test_an_interrupt_from_a_callback_keeps_nothing_from_being_closed(tiny: Any) -> None:
    before = names_of_threads()
    source = FaultySource(tiny.source("a"))
    cache = tiny.cache(source)
    source.gate.clear()

    def interrupt(future: Future[Any]) -> None:
        raise KeyboardInterrupt

    cache.refresh("a")
    cache.refresh("a").add_done_callback(interrupt)
    threading.Timer(0.2, source.gate.set).start()
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    assert_all_is_gone(tiny, cache, before)


def test_a_step_that_fails_keeps_nothing_from_being_closed(tiny: Any) -> None:
    before = names_of_threads()
    cache = tiny.cache(tiny.source("a"))

    def fail() -> None:
        raise OSError("the device is gone")

    cache._parts.ends.appendleft(fail)
    with pytest.raises(OSError, match="gone"):
        cache.close()
    cache.close()
    assert_all_is_gone(tiny, cache, before)
