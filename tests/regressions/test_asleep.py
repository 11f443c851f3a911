"""`drop_gpu` and `restore`, out of the usual order."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from adaptercache import AdapterCacheError, CacheClosed, CapacityError, LoadFailed, Tier
from adaptercache.disk import transfer as disk_transfer
from adaptercache.tiers import ways


def test_a_cache_that_is_asleep_can_be_closed(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        tiny.load(cache, "a")
        cache.drop_gpu()


def test_dropping_twice_forgets_nothing(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        tiny.load(cache, "a")
        cache.drop_gpu()
        cache.drop_gpu()
        cache.restore()
        assert cache.resident(Tier.GPU) == {"a"}


def test_restoring_a_closed_cache_takes_no_memory(tiny: Any) -> None:
    cache = tiny.cache(tiny.source("a"))
    cache.close()
    with pytest.raises(CacheClosed):
        cache.restore()
    assert not cache._gpu.is_up


def test_restore_ends_though_leases_took_all_slots_meanwhile(tiny: Any) -> None:
    with tiny.cache(tiny.source("a", "b"), gpu_slots=1) as cache:
        tiny.load(cache, "a")
        cache.drop_gpu()
        lease = cache.acquire("b")
        ended = tiny.ends(cache.restore)
        lease.release()
        assert ended


def test_restore_ends_though_an_adapter_was_removed_meanwhile(tiny: Any) -> None:
    with tiny.cache() as cache:
        cache.put("a", *tiny.tensors(1)).result(10)
        cache.put("b", *tiny.tensors(2)).result(10)
        tiny.load(cache, "a", "b")
        cache.drop_gpu()
        cache.remove("a")
        cache.restore()
        assert cache.resident(Tier.GPU) == {"b"}


def test_a_restore_that_found_no_memory_can_be_tried_again(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise CapacityError("the GPU has not enough free memory")

    with tiny.cache(tiny.source("a")) as cache:
        tiny.load(cache, "a")
        cache.drop_gpu()
        with monkeypatch.context() as patched:
            patched.setattr(cache._gpu, "restore", refuse)
            with pytest.raises(CapacityError):
                cache.restore()
        cache.restore()
        assert cache.resident(Tier.GPU) == {"a"}


def test_what_needs_the_arena_says_so_while_it_is_given_back(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        cache.drop_gpu()
        with pytest.raises(AdapterCacheError, match="restore"), cache.lora_batch([]):
            pass
        base = [(cache.acquire(None), 3)]
        with pytest.raises(AdapterCacheError, match="restore"), cache.lora_batch(base):
            pass
        with pytest.raises(AdapterCacheError, match="restore"):
            cache.warmup()
        cache.restore()
        with cache.lora_batch(base) as lora:
            assert lora.num_tokens == 3


@pytest.mark.parametrize("end", ["drop_gpu", "close"])
def test_the_arena_goes_at_once_and_not_when_garbage_is_collected(tiny: Any, end: str) -> None:
    """A transfer that had run held a generator which held the transfer, and both the arena: on a
    GPU the memory was not given back."""
    gc.collect()
    gc.disable()
    try:
        with tiny.cache(tiny.source("a")) as cache:
            lease = cache.acquire("a").result(10)
            with cache.lora_batch([(lease, 2)]) as lora:
                lora.wait(0)
            del lora
            lease.release()
            arena = weakref.ref(cache._gpu.stack.arena)
            getattr(cache, end)()
            assert tiny.wait_until(lambda: arena() is None, 2)
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["drop_gpu", "close"])
@pytest.mark.parametrize("fails", ["copy", "flow", "read"])
def test_errors_that_somebody_keeps_do_not_keep_the_arena(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, fails: str, end: str
) -> None:
    """Frames of a failed load had its transfer, also those that had called where the error was
    caught on its way; and the transfer had the arena, even one that was abandoned half-way."""
    break_loads(fails, monkeypatch)
    gc.collect()
    gc.disable()
    try:
        with tiny.cache(tiny.source("a")) as cache:
            memory = [weakref.ref(cache._gpu.stack.arena)]
            views = cache._parts.host.views

            def noted(*args: Any) -> Any:
                found = views(*args)
                memory.extend(map(weakref.ref, found))
                return found

            monkeypatch.setattr(cache._parts.host, "views", noted)
            if fails == "copy":
                cache.prefetch(["a"], Tier.HOST)
                assert tiny.wait_until(lambda: "a" in cache.resident(Tier.HOST))
            with pytest.raises(LoadFailed) as kept:
                cache.acquire("a").result(10)
            assert isinstance(kept.value.__cause__, OSError)
            getattr(cache, end)()
            assert tiny.wait_until(lambda: not any(each() is not None for each in memory), 2)
            assert len(memory) > 1
    finally:
        gc.enable()


def break_loads(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk can be copied; or pieces can't be read, behind chunks that were copied."""
    monkeypatch.setattr(disk_transfer, "READ_BYTES", 2048)
    for name in ("STAGED_BYTES", "STRIDED_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(ways, name, 4096)
    if fails == "read":
        good = disk_transfer._read_and_sum

        def read(file: int, offset: int, into: memoryview) -> int:
            if offset > 12 << 10:
                raise OSError("injected")
            return good(file, offset, into)

        monkeypatch.setattr(disk_transfer, "_read_and_sum", read)
        return
    for way in (ways.Staged, ways.Strided):

        def queue(self: Any, *args: Any, _good: Any = way.queue) -> Any:
            for number, landed in enumerate(_good(self, *args)):
                if number:
                    raise OSError("injected")
                yield landed

        monkeypatch.setattr(way, "queue", queue)
