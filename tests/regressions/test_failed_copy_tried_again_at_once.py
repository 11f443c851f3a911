"""A load that failed was started again at once, over and over, for a request or a hint that was
still on the list, in spite of the back-off."""

from __future__ import annotations

import time
from typing import Any

import pytest

from adaptercache import AdapterCache, Request


@pytest.fixture
def copies() -> list[int]:
    return []


@pytest.fixture
def cache(tiny: Any, copies: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    with tiny.cache(tiny.source("a")) as cache:

        def fail(slot: int, *args: Any) -> None:
            copies.append(slot)
            raise OSError("injected")

        monkeypatch.setattr(cache._gpu, "write", fail)
        yield cache


def test_a_copy_for_a_waiting_request_is_not_repeated_before_the_back_off(
    tiny: Any, cache: AdapterCache, copies: list[int]
) -> None:
    cache.admit([Request("r", "a")])
    assert tiny.wait_until(lambda: bool(copies))
    time.sleep(0.1)  # far less than the back-off
    assert len(copies) == 1


def test_a_hinted_copy_is_not_repeated_before_the_back_off(
    tiny: Any, cache: AdapterCache, copies: list[int]
) -> None:
    cache.prefetch(["a"])
    assert tiny.wait_until(lambda: bool(copies))
    time.sleep(0.1)
    assert len(copies) == 1
