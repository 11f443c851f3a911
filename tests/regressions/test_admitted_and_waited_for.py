"""An adapter of which one request was admitted while another went on waiting counted twice, and so
there seemed to be no room for those behind."""

from __future__ import annotations

from typing import Any

from adaptercache import Caps, Request, Tier


def test_it_takes_its_room_once(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b", "c"), gpu_slots=2) as cache:
        cache.prefetch(["c"], to=Tier.HOST)
        assert tiny.wait_until(lambda: "c" in cache.resident(Tier.HOST))
        tiny.load(cache, "a", "b")
        waiting = [Request("r0", "a"), Request("r1", "a"), Request("r2", "c")]
        admission = cache.admit(waiting, caps=Caps(tokens=1))
        assert [request.request_id for request, _ in admission.admitted] == ["r0"]
        assert admission.reasons == {"r1": "max_tokens", "r2": "loading"}
        assert tiny.wait_until(lambda: cache.resident(Tier.GPU) == {"a", "c"}), "b makes room"
        for _, lease in admission.admitted:
            lease.release()
