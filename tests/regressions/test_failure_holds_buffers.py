"""A failure that was remembered kept its traceback, and with it the buffers of the load."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

from adaptercache import LoadFailed
from adaptercache.testing import FakeSource
from adaptercache.tiers.remote import CONFIG, WEIGHTS

MIB = 1 << 20


class FailsAtTheEnd(FakeSource):
    """Its weights can't be read."""

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        if name == WEIGHTS:
            raise OSError("injected")
        return super().read(adapter_id, revision, name, offset, into)


def test_remembered_failures_do_not_keep_what_was_loaded(tiny: Any) -> None:
    source = FailsAtTheEnd()
    ids = [f"a{n}" for n in range(20)]
    for adapter_id in ids:
        source.put_files(adapter_id, {CONFIG: b"{}", WEIGHTS: bytes(MIB)})
    with tiny.cache(source) as cache:
        tracemalloc.start()
        try:
            for adapter_id in ids:
                lease = cache.acquire(adapter_id)
                try:
                    lease.result(10)
                except LoadFailed:
                    lease.release()
            del lease
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 4 * MIB
