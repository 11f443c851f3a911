"""Closing inside an open batch hung for ever: a copy waited for the step, and `close` for it."""

from __future__ import annotations

from typing import Any


def test_closing_inside_a_batch_ends_though_a_copy_waits_for_the_step(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b")) as cache:
        lease = cache.acquire("a").result(10)
        pages = cache.pages.allocate(2)
        assert pages is not None
        with cache.lora_batch([(lease, 1)]):
            cache.pages.free(pages)
            pending = cache.acquire("b")
            assert tiny.wait_until(lambda: len(cache._ledger.gpu) == 2)  # it is on its way
            ended = tiny.ends(cache.close)
        assert ended
        pending.release()
