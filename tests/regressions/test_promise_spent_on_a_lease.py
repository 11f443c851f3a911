"""KV pages that were promised out of an idle adapter's were gone when a request behind, with no KV
pages of its own, was admitted on that very adapter."""

from __future__ import annotations

from typing import Any

from adaptercache import Request

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_all_requests_of_one_admission_get_what_they_were_promised(tiny: Any) -> None:
    source = tiny.source("small")
    source.put("large", *tiny.tensors(9, rank=16, targets=ALL))  # 17 pages
    with tiny.cache(source, pages=34) as cache:
        tiny.load(cache, "large", "small")  # idle: 17 and 4 pages; 13 are free, KV may have 17
        admission = cache.admit(
            [Request("r0", None, kv_pages=17), Request("r1", "large"), Request("r2", "small")]
        )
        promised = sum(request.kv_pages for request, _ in admission.admitted)
        assert promised == 17
        assert cache.pages.allocate(promised) is not None
        for _, lease in admission.admitted:
            lease.release()
