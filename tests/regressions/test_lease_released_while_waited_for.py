"""A pending lease that was released never settled, so whoever waited for it waited for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from adaptercache.testing import FaultySource


@pytest.fixture
def slow(tiny: Any) -> Any:
    source = FaultySource(tiny.source("a"))
    source.gate.clear()
    yield source
    source.gate.set()


def test_waiting_for_a_released_pending_lease_ends(tiny: Any, slow: FaultySource) -> None:
    with tiny.cache(slow) as cache:
        lease = cache.acquire("a")
        lease.release()

        def wait() -> None:
            with pytest.raises(RuntimeError, match="released"):
                lease.result()

        ended = tiny.ends(wait)
        slow.gate.set()
        assert ended


def test_a_release_by_another_thread_wakes_who_waits(tiny: Any, slow: FaultySource) -> None:
    with tiny.cache(slow) as cache:
        lease = cache.acquire("a")

        def wait() -> None:
            with pytest.raises(RuntimeError, match="released"):
                lease.result()

        import threading

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        waiter.join(0.05)
        lease.release()
        waiter.join(5)
        ended = not waiter.is_alive()
        slow.gate.set()
        assert ended


def test_a_release_wakes_the_task_that_awaits(tiny: Any, slow: FaultySource) -> None:
    async def wait() -> None:
        lease = cache.acquire("a")
        waiting = asyncio.ensure_future(lease.__aenter__())
        await asyncio.sleep(0.01)
        lease.release()
        with pytest.raises(RuntimeError, match="released"):
            await asyncio.wait_for(waiting, 5)

    with tiny.cache(slow) as cache:
        try:
            asyncio.run(wait())
        finally:
            slow.gate.set()
