"""What a user's code does when it is called: hooks and handlers of `logging`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from adaptercache import AdapterCache
from adaptercache.tiers.disk import DiskTier

LOGGER = logging.getLogger("adaptercache")


class Raises(logging.Handler):
    """As a handler that puts records on a full queue."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the handler is broken")


class Asks(logging.Handler):
    """A handler that adds the cache's state to what it writes."""

    def __init__(self, cache: AdapterCache) -> None:
        super().__init__()
        self.cache = cache
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.cache.stats()
        self.seen.append(record.getMessage())


@pytest.fixture
def handlers() -> Iterator[list[logging.Handler]]:
    """Handlers of the package's logger, until the test ends."""

    class Added(list[logging.Handler]):
        def append(self, handler: logging.Handler) -> None:
            super().append(handler)
            LOGGER.addHandler(handler)

    level, added = LOGGER.level, Added()
    LOGGER.setLevel(logging.DEBUG)
    yield added
    LOGGER.setLevel(level)
    for handler in added:
        LOGGER.removeHandler(handler)


def test_a_handler_that_raises_stops_no_load(tiny: Any, handlers: list[logging.Handler]) -> None:
    with tiny.cache(tiny.source("a", "b")) as cache:
        handlers.append(Raises())
        tiny.load(cache, "a", "b")


def test_a_handler_that_raises_lets_acquire_and_release_be(
    tiny: Any, handlers: list[logging.Handler]
) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        handlers.append(Raises())
        for adapter_id in ("nobody", "a", "nobody"):
            lease = cache.acquire(adapter_id)
            tiny.wait_until(lambda: lease.ready)  # noqa: B023
            lease.release()


def test_a_handler_that_asks_the_cache_is_called_without_the_lock_at_a_failed_deletion(
    tiny: Any, handlers: list[logging.Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DiskTier, digest: bytes) -> None:
        raise OSError("injected")

    with tiny.cache() as cache:
        cache.put("a", *tiny.tensors(1)).result(10)
        asking = Asks(cache)
        handlers.append(asking)
        monkeypatch.setattr(DiskTier, "delete", fail)
        cache.remove("a")
        told = tiny.wait_until(lambda: any("delet" in text for text in asking.seen), 3)
        if not told and cache._deciding.lock.locked():
            cache._deciding.lock.release()  # so that this test can end
        assert told


class Outcome(BaseException):
    """Not an Exception, as what `sys.exit` and `pytest.fail` raise."""


def test_a_hook_that_raises_a_base_exception_stops_no_load(tiny: Any) -> None:
    def leave(*args: object) -> None:
        raise Outcome

    with tiny.cache(tiny.source("a", "b", "c"), gpu_slots=1, on_evict=leave) as cache:
        for adapter_id in ("a", "b", "c", "a"):
            lease = cache.acquire(adapter_id)
            tiny.wait_until(lambda: lease.ready, 3)  # noqa: B023
            assert lease.ready
            with contextlib.suppress(Outcome):
                lease.release()


def test_a_hook_that_closes_the_cache_leaves_nothing_running(tiny: Any) -> None:
    cache: AdapterCache

    def close(*args: object) -> None:
        cache.close()

    cache = tiny.cache(tiny.source("a", "b"), gpu_slots=1, on_evict=close)
    tiny.load(cache, "a")
    lease = cache.acquire("b")
    assert tiny.wait_until(lambda: cache._deciding.closed)
    lease.release()
    cache.close()  # and the fixtures see that no thread is left
