"""Pages that `admit` had promised to a request went to an adapter before they were allocated."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from adaptercache import Request, Tier

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_an_admitted_request_gets_its_kv_pages_whoever_asks_for_an_adapter_meanwhile(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.source("cold")
    source.put("large", *tiny.tensors(9, rank=16, targets=ALL))  # 17 pages
    with tiny.cache(source, pages=38) as cache, cache.acquire("large"):
        cache.prefetch(["cold"], to=Tier.HOST)
        assert tiny.wait_until(lambda: "cold" in cache.resident(Tier.HOST))
        assert cache.pages.allocate(17) is not None
        assert cache.stats().pages["free"] == 4  # as many as "cold" takes
        write, go_on = cache._gpu.write, threading.Event()

        def write_slowly(*args: Any) -> None:
            go_on.wait(10)
            write(*args)

        monkeypatch.setattr(cache._gpu, "write", write_slowly)
        admission = cache.admit([Request("r", None, kv_pages=4)])
        assert [request.request_id for request, _ in admission.admitted] == ["r"]
        pending = cache.acquire("cold")
        pages = cache.pages.allocate(4)
        go_on.set()
        pending.release()
        assert pages is not None
