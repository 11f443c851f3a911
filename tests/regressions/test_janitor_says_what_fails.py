"""The thread that takes back dropped leases kept to itself what went wrong in it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from adaptercache import Request, janitor
from adaptercache.testing import FaultySource


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged with its exception."""
    return [str(record.exc_info[1]) for record in caplog.records if record.exc_info]


def test_a_dropped_lease_that_cannot_be_taken_back_is_told_of(
    tiny: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(grant: Any) -> None:
        raise RuntimeError("injected")

    with tiny.cache(tiny.source("a")) as cache:
        lease = cache.acquire("a").result(10)
        grant = lease._grant
        with monkeypatch.context() as patched:
            patched.setattr(cache._ledger, "release", fail)
            del lease
            gc.collect()
            assert tiny.wait_until(lambda: complaints(caplog) == ["injected"])
        cache._leasing.abandon(grant)
        assert tiny.wait_until(lambda: not cache.stats().leases), "the thread lives on"


def test_a_promise_that_cannot_be_ended_is_told_of(
    tiny: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "PROMISE_S", 0.05)
    failed = threading.Event()
    source = FaultySource(tiny.source(*"abcdef"))
    with tiny.cache(source, pages=20, gpu_slots=5) as cache:
        end_promise = cache._leasing._janitor._end_promise

        def fail_once() -> Any:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("injected")
            return end_promise()

        monkeypatch.setattr(cache._leasing._janitor, "_end_promise", fail_once)
        held = [cache.acquire(each).result(10) for each in "bcde"]
        source.gate.clear()
        lease = cache.acquire("a")
        assert cache.admit([Request("r", None, kv_pages=3)]).admitted
        source.gate.set()
        assert failed.wait(10)
        assert tiny.wait_until(lambda: complaints(caplog) == ["injected"])
        assert cache.admit([Request("r", None, kv_pages=3)]).admitted
        assert tiny.wait_until(lambda: lease.ready), "the thread lives on"
        for each in (lease, *held):
            each.release()
