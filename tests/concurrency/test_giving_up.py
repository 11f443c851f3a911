"""Leases that are abandoned or cancelled, and caches that close, at any point of a load."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterCacheError, CacheClosed, Request, Tier
from adaptercache.disk import transfer as disk_transfer
from adaptercache.testing import FaultySource
from adaptercache.tiers import ways
from adaptercache.tiers.disk import DiskTier
from adaptercache.tiers.gpu import GpuTier
from adaptercache.tiers.transfer import Transfer

POINTS = ["revision", "files", "read", "disk", "flow", "gpu"]


class Halted:
    """A source in which one call, or one step of the tiers, stands still until told to go on."""

    def __init__(self, inner: Any, point: str) -> None:
        self._inner, self._point = inner, point
        self.reached, self.go_on = threading.Event(), threading.Event()

    def stand(self, point: str) -> None:
        if point == self._point:
            self.reached.set()
            self.go_on.wait(20)

    def revision(self, adapter_id: str) -> str:
        self.stand("revision")
        return str(self._inner.revision(adapter_id))

    def files(self, adapter_id: str, revision: str) -> Any:
        self.stand("files")
        return self._inner.files(adapter_id, revision)

    def read(self, *args: Any) -> int:
        self.stand("read")
        return int(self._inner.read(*args))

    def ids(self) -> Any:
        return self._inner.ids()


def standing_first(do: Any, source: Halted, point: str) -> Any:
    def stand_then_do(*args: Any) -> Any:
        source.stand(point)
        return do(*args)

    return stand_then_do


@pytest.fixture(params=POINTS)
def halted(
    request: pytest.FixtureRequest, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Halted]:
    source = Halted(tiny.source("a", "b"), request.param)
    monkeypatch.setattr(disk_transfer, "READ_BYTES", 2048)  # several pieces
    monkeypatch.setattr(ways, "STAGED_BYTES", 4096)  # and several chunks
    for owner, name, point in (
        (DiskTier, "read_into", "disk"),
        (Transfer, "_queue", "flow"),  # the first chunk goes ahead
        (GpuTier, "write", "gpu"),
    ):
        monkeypatch.setattr(owner, name, standing_first(getattr(owner, name), source, point))
    yield source
    source.go_on.set()


def gave_everything_back(tiny: Any, cache: Any) -> bool:
    return bool(tiny.wait_until(lambda: tiny.idle(cache) and cache.stats().leases == 0))


def test_a_lease_released_during_its_load_leaks_nothing(tiny: Any, halted: Halted) -> None:
    with tiny.cache(halted) as cache:
        lease = cache.acquire("a")
        assert halted.reached.wait(10)
        lease.release()
        halted.go_on.set()
        assert gave_everything_back(tiny, cache)


def test_a_lease_dropped_during_its_load_leaks_nothing(tiny: Any, halted: Halted) -> None:
    with tiny.cache(halted) as cache:
        lease = cache.acquire("a")
        assert halted.reached.wait(10)
        del lease
        halted.go_on.set()
        assert gave_everything_back(tiny, cache)


def test_a_task_cancelled_during_the_load_leaks_nothing(tiny: Any, halted: Halted) -> None:
    async def use() -> None:
        async with cache.acquire("a"):
            pass

    async def cancel() -> None:
        task = asyncio.ensure_future(use())
        await asyncio.to_thread(halted.reached.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with tiny.cache(halted) as cache:
        asyncio.run(cancel())
        halted.go_on.set()
        assert gave_everything_back(tiny, cache)


def test_a_task_that_is_cancelled_leaves_the_others_waiting(tiny: Any, halted: Halted) -> None:
    async def use() -> int:
        async with cache.acquire("a") as lease:
            return int(lease.slot)

    async def cancel_one() -> int:
        one, other = asyncio.ensure_future(use()), asyncio.ensure_future(use())
        await asyncio.to_thread(halted.reached.wait, 10)
        one.cancel()
        await asyncio.sleep(0)
        halted.go_on.set()
        return await asyncio.wait_for(other, 10)

    with tiny.cache(halted) as cache:
        assert asyncio.run(cancel_one()) >= 0


def test_requests_that_vanish_during_the_load_leak_nothing(tiny: Any, halted: Halted) -> None:
    with tiny.cache(halted) as cache:
        cache.admit([Request("r", "a")])
        assert halted.reached.wait(10)
        cache.admit([])
        halted.go_on.set()
        assert gave_everything_back(tiny, cache)


def test_an_adapter_removed_during_its_load_is_loaded_anew_for_who_waits(
    tiny: Any, halted: Halted
) -> None:
    with tiny.cache(halted) as cache:
        lease = cache.acquire("a")
        assert halted.reached.wait(10)
        cache.remove("a")
        halted.go_on.set()
        lease.result(10).release()
        assert gave_everything_back(tiny, cache)


def test_an_adapter_removed_during_its_load_for_nobody_is_gone(tiny: Any, halted: Halted) -> None:
    with tiny.cache(halted) as cache:
        lease = cache.acquire("a")
        assert halted.reached.wait(10)
        lease.release()
        cache.remove("a")
        halted.go_on.set()
        assert gave_everything_back(tiny, cache)
        assert not any("a" in cache.resident(tier) for tier in (Tier.GPU, Tier.HOST, Tier.DISK))


def test_closing_during_a_load_tells_who_waits(tiny: Any, halted: Halted) -> None:
    cache = tiny.cache(halted)
    lease, other = cache.acquire("a"), cache.acquire("b")
    assert halted.reached.wait(10)
    closing = threading.Thread(target=cache.close)
    closing.start()
    for waiting in (lease, other):  # before the load has ended
        with pytest.raises(CacheClosed):
            waiting.result(10)
    halted.go_on.set()
    closing.join(20)
    assert not closing.is_alive()


def test_closing_during_a_load_leaves_no_temporary_file(
    tiny: Any, halted: Halted, tmp_path: Path
) -> None:
    cache = tiny.cache(halted, disk_dir=tmp_path)
    lease = cache.acquire("a")
    assert halted.reached.wait(10)
    closing = threading.Thread(target=cache.close)
    closing.start()
    with pytest.raises(CacheClosed):
        lease.result(10)
    halted.go_on.set()
    closing.join(20)
    assert tiny.files(tmp_path / "tmp") == []


def test_a_closing_cache_answers_refreshes(tiny: Any, halted: Halted) -> None:
    cache = tiny.cache(halted)
    lease = cache.acquire("a")
    assert halted.reached.wait(10)
    future = cache.refresh("b")
    threading.Timer(0.05, halted.go_on.set).start()
    cache.close()
    lease.release()
    try:
        assert future.result(10).adapter_id == "b"
    except AdapterCacheError as error:
        assert isinstance(error, CacheClosed)  # noqa: PT017


@pytest.fixture
def closed(tiny: Any) -> Any:
    cache = tiny.cache(tiny.source("a"))
    lease = cache.acquire("a").result(10)
    cache.close()
    return cache, lease


@pytest.mark.parametrize(
    "verb",
    [
        lambda cache: cache.acquire("a"),
        lambda cache: cache.admit([]),
        lambda cache: cache.prefetch(["a"]),
        lambda cache: cache.refresh("a"),
        lambda cache: cache.drop_gpu(),
        lambda cache: cache.restore(),
        lambda cache: cache.lora_batch([]).__enter__(),
    ],
    ids=["acquire", "admit", "prefetch", "refresh", "drop_gpu", "restore", "lora_batch"],
)
def test_a_closed_cache_says_so(closed: Any, verb: Any) -> None:
    with pytest.raises(CacheClosed):
        verb(closed[0])


def test_a_lease_can_be_released_after_the_cache_has_closed(closed: Any) -> None:
    closed[1].release()


def test_closing_twice_is_fine(closed: Any) -> None:
    closed[0].close()


def test_statistics_can_be_read_after_closing(closed: Any) -> None:
    assert closed[0].stats().requests


def test_a_lease_dropped_in_a_reference_cycle_under_load_is_taken_back(tiny: Any) -> None:
    import gc

    class Node:
        pass

    with tiny.cache(tiny.source("a", "b", "c", "d")) as cache:
        for adapter_id in "abcd" * 10:
            node = Node()
            node.lease = cache.acquire(adapter_id)  # type: ignore[attr-defined]
            node.self = node  # type: ignore[attr-defined]
            del node
            gc.collect(0)  # at any moment, also in the midst of the cache's own code
        gc.collect()
        assert gave_everything_back(tiny, cache)


def test_a_lease_that_settles_after_its_loop_has_closed_logs_no_error(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = FaultySource(tiny.source("a"))
    source.gate.clear()
    with tiny.cache(source) as cache:
        lease = cache.acquire("a")

        async def give_up() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(lease, 0.01)

        asyncio.run(give_up())
        source.gate.set()
        lease.result(10).release()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
