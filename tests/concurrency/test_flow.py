"""One adapter on its way from the disk to the GPU: what has come is copied while the rest is read.

Whatever goes wrong meanwhile, nobody sees a byte that wasn't checked, and nothing is lost.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import AdapterCache, LoadFailed, Request, Tier
from adaptercache.disk import transfer as disk_transfer
from adaptercache.kernels import add_lora
from adaptercache.testing import any_device, check_consistent, held_weights
from adaptercache.tiers import ways
from adaptercache.tiers.gpu import GpuTier
from adaptercache.tiers.streams import Lane
from adaptercache.tiers.transfer import Transfer

PIECE = 2048
ON_GPU = any_device() == "cuda"


class Medium:
    """The disk, of which adapters are read in small pieces. One piece may be kept back, fail, or
    come with a wrong bit.

    Attributes:
        keep_back: pieces from this one on wait for `go_on`; None: none does.
        before: called with each piece's number before it is read; after: with its memory, too.
    """

    def __init__(self) -> None:
        self.keep_back: int | None = None
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.before: Callable[[int], None] = lambda piece: None
        self.after: Callable[[int, memoryview], None] = lambda piece, into: None
        self._read = disk_transfer._read

    def read(self, file: int, offset: int, into: memoryview) -> int:
        piece = offset // PIECE - 2  # behind a header of 4 KiB
        if self.keep_back is not None and piece >= self.keep_back:
            self.reached.set()
            assert self.go_on.wait(20)
        self.before(piece)
        return self._read(file, offset, into)

    def read_and_sum(self, file: int, offset: int, into: memoryview) -> int:
        self.read(file, offset, into)
        self.after(offset // PIECE - 2, into)
        return zlib.crc32(into)


@pytest.fixture(params=[ways.Staged, ways.Strided])
def medium(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Medium]:
    """And chunks of one page, copied in either way."""
    medium = Medium()
    monkeypatch.setattr(disk_transfer, "READ_BYTES", PIECE)
    monkeypatch.setattr(disk_transfer, "_read", medium.read)
    monkeypatch.setattr(disk_transfer, "_read_and_sum", medium.read_and_sum)
    for name in ("STAGED_BYTES", "STRIDED_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(ways, name, 4096)

    def one_way(streams: Any, stack: Any) -> ways.Ways:
        way = request.param(streams, stack)
        return ways.Ways(way, way, way)

    monkeypatch.setattr(ways.Ways, "of", one_way)
    yield medium
    medium.go_on.set()


@pytest.fixture
def cache(tiny: Any, medium: Medium) -> Iterator[AdapterCache]:
    """With "a", "b" and "c" on disk, of 8 pieces or 4 chunks each, and "h" in CPU memory."""
    with tiny.cache(tiny.source("a", "b", "c", "h")) as cache:
        cache.prefetch(["a", "b", "c"], to=Tier.DISK)
        cache.prefetch(["h"], to=Tier.HOST)
        assert tiny.wait_until(lambda: cache.resident(Tier.DISK) >= {"a", "b", "c"})
        assert tiny.wait_until(lambda: cache.resident(Tier.HOST) == {"h"} and tiny.idle(cache))
        with cache._deciding.lock:
            for adapter_id in "abch":
                cache._ledger.waiting.forget_hint(adapter_id)
        yield cache
        medium.go_on.set()


def copied(cache: AdapterCache) -> int:
    """Chunks whose copies have gone ahead, or have been made."""
    return sum(len(transfer._landed) for transfer in list(cache._gpu._coming.values()))


def stand_midway(tiny: Any, cache: AdapterCache, medium: Medium, piece: int = 5) -> Any:
    """A lease on "a", of which pieces before that one have come and been copied."""
    medium.keep_back = piece
    lease = cache.acquire("a")
    assert medium.reached.wait(10)
    assert tiny.wait_until(lambda: copied(cache) == piece // 2)
    return lease


def go_on(medium: Medium) -> None:
    medium.keep_back = None
    medium.go_on.set()


def check(tiny: Any, cache: AdapterCache, adapter_id: str, seed: int) -> None:
    """The adapter is served, and its bytes are its own."""
    tensors, _ = tiny.tensors(seed)
    with cache.acquire(adapter_id).result(10) as lease:
        for site in tiny.layout.sites:
            want = tensors.get(f"base_model.model.{site.path}.lora_A.weight")
            got = held_weights(cache, lease, site.layer, site.module)
            if want is None or got is None:
                assert got is want
            else:
                assert torch.equal(got[0], want)


def test_what_has_come_is_copied_while_the_rest_is_read(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    lease = stand_midway(tiny, cache, medium)
    assert not lease.ready
    assert "a" not in cache.resident(Tier.HOST) | cache.resident(Tier.GPU)
    check_consistent(cache)
    go_on(medium)
    lease.result(10).release()
    check(tiny, cache, "a", 0)
    loads = cache.stats().loads
    assert loads[Tier.DISK, Tier.HOST, "ok"] == 2
    assert loads[Tier.HOST, Tier.GPU, "ok"] == 1


def test_a_step_waits_for_nothing_that_was_not_checked(
    tiny: Any, cache: AdapterCache, medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipelined request may read layer by layer only what is whole in CPU memory."""
    lease = stand_midway(tiny, cache, medium)
    asks = Request("r", "a", pipelined=True)
    assert cache.admit([asks]).reasons == {"r": "loading"}
    copying, write = threading.Event(), GpuTier.write

    def stand_then_write(*args: Any) -> None:
        copying.wait(10)
        write(*args)

    monkeypatch.setattr(GpuTier, "write", stand_then_write)
    go_on(medium)
    assert tiny.wait_until(lambda: "a" in cache.resident(Tier.HOST))
    ((_, early),) = cache.admit([asks]).admitted
    assert not lease.ready
    with cache.lora_batch([(early, 1)]) as lora:
        x = torch.ones(1, 32, device=cache._gpu.device)
        add_lora(torch.zeros_like(x), x, lora, ("q_proj",), 1)
    copying.set()
    early.release()
    lease.result(10).release()
    check(tiny, cache, "a", 0)


def test_a_wrong_bit_in_the_last_piece_is_seen_by_nobody(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    def flip(piece: int, into: memoryview) -> None:
        if piece == 7:
            into[3] ^= 1
            medium.after = lambda piece, into: None

    medium.after = flip
    lease = stand_midway(tiny, cache, medium, 7)
    seen = []
    cache._ledger.on_evict = lambda tier, digest: seen.append((tier, cache.stats().pages))
    go_on(medium)
    lease.result(10).release()
    check(tiny, cache, "a", 0)
    assert [tier for tier, _ in seen] == [Tier.DISK]
    assert seen[0][1]["adapter"] == 0, "the pages were given back"
    stats = cache.stats()
    assert stats.evictions[Tier.DISK, "broken"] == 1
    assert stats.loads[Tier.DISK, Tier.HOST, "failed"] == 1


@pytest.mark.parametrize("piece", [0, 3, 7])
def test_a_piece_that_cannot_be_read_gives_all_back(
    tiny: Any, cache: AdapterCache, medium: Medium, piece: int
) -> None:
    failures = [piece]

    def fail(number: int) -> None:
        if number in failures:
            failures.remove(number)
            raise OSError("injected")

    medium.before = fail
    check(tiny, cache, "a", 0)
    stats = cache.stats()
    assert stats.loads[Tier.DISK, Tier.HOST, "failed"] == 1
    assert stats.pages["adapter"] == 4


def test_what_fails_over_and_over_tells_who_waits_and_keeps_nothing(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    def fail(number: int) -> None:
        if number == 6:
            raise OSError("injected")

    medium.before = fail
    with pytest.raises(LoadFailed):
        cache.acquire("a").result(10)
    assert tiny.wait_until(lambda: tiny.idle(cache))
    stats = cache.stats()
    assert stats.pages["adapter"] == 0
    assert stats.slots["used"] == 0
    assert cache.resident(Tier.HOST) == {"h"}
    check_consistent(cache)
    assert not cache._gpu._coming
    assert not cache._parts.lifter.hops._reads


@pytest.mark.parametrize("call", [0, 3])
def test_a_copy_that_fails_while_it_goes_ahead_blames_no_disk(
    tiny: Any, cache: AdapterCache, medium: Medium, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls, mark = [0], Lane.mark

    def fail(lane: Lane) -> Any:
        calls[0] += 1
        if calls[0] == call + 1:
            raise OSError("injected")
        return mark(lane)

    monkeypatch.setattr(Lane, "mark", fail)
    with pytest.raises(LoadFailed):
        cache.acquire("a").result(10)
    assert tiny.wait_until(lambda: tiny.idle(cache))
    assert cache.stats().pages["adapter"] == 0
    assert "a" in cache.resident(Tier.HOST)
    assert (Tier.DISK, "broken") not in cache.stats().evictions
    cache.refresh("a").result(10)  # forgets the failure
    check(tiny, cache, "a", 0)


def test_pages_that_a_step_may_still_use_are_not_written_ahead(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    pages = cache.pages.allocate(15)  # "a" gets some of them
    assert pages is not None
    with cache.lora_batch([]):
        for layer in range(2):
            cache.kv_view(layer)[list(pages)] = 7.0
        cache.pages.free(pages)
        lease = cache.acquire("a")
        assert tiny.wait_until(lambda: "a" in cache.resident(Tier.HOST))
        assert not lease.ready
        for layer in range(2):
            assert (cache.kv_view(layer)[list(pages)] == 7.0).all()
    lease.result(10).release()
    check(tiny, cache, "a", 0)


def test_without_room_on_the_gpu_it_is_read_and_copied_once_there_is(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    held = [cache.acquire(adapter_id) for adapter_id in ("b", "c", "h")]  # all slots
    for each in held:
        each.result(10)
    lease = cache.acquire("a")
    assert tiny.wait_until(lambda: "a" in cache.resident(Tier.HOST))
    assert not lease.ready
    held.pop().release()
    lease.result(10).release()
    for each in held:
        each.release()
    check(tiny, cache, "a", 0)


def test_room_that_comes_while_it_is_read_is_taken_at_once(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    held = [cache.acquire(adapter_id) for adapter_id in ("b", "c", "h")]
    for each in held:
        each.result(10)
    medium.keep_back = 5
    lease = cache.acquire("a")
    assert medium.reached.wait(10)
    assert not cache._gpu._coming
    for each in held:
        each.release()
    assert tiny.wait_until(lambda: bool(cache._gpu._coming))
    go_on(medium)
    lease.result(10).release()
    check(tiny, cache, "a", 0)


def test_a_slow_disk_keeps_no_copy_and_no_step_waiting(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    """Two that are read stand still; what is in CPU memory goes up, and is read layer by layer."""
    slow = [stand_midway(tiny, cache, medium), cache.acquire("b")]
    with cache.acquire("h").result(5) as lease, cache.lora_batch([(lease, 1)]) as lora:
        lora.wait(1)
        check(tiny, cache, "h", 3)
    assert not any(each.ready for each in slow)
    go_on(medium)
    for each in slow:
        each.result(10).release()


def test_its_pages_are_nobody_elses_meanwhile(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    lease = stand_midway(tiny, cache, medium)
    taken = []
    while (pages := cache.pages.allocate(1)) is not None:
        taken += pages
    with cache.lora_batch([]):
        for layer in range(2):
            cache.kv_view(layer)[taken] = float("nan")
    check_consistent(cache)
    cache.pages.free(taken)
    go_on(medium)
    lease.result(10).release()
    check(tiny, cache, "a", 0)


def test_what_nobody_wants_any_more_ends_and_may_be_evicted(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    stand_midway(tiny, cache, medium).release()
    go_on(medium)
    assert tiny.wait_until(lambda: cache.resident(Tier.GPU) == {"a"})
    assert cache.stats().leases == 0
    tiny.load(cache, "b", "c", "h")
    assert cache.resident(Tier.GPU) == {"b", "c", "h"}


def test_replaced_meanwhile_it_is_not_served(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    lease = stand_midway(tiny, cache, medium)
    new, config = tiny.tensors(9)
    future = cache.put("a", new, config)
    go_on(medium)
    digest = future.result(10)
    lease.result(10).release()
    assert tiny.wait_until(lambda: tiny.idle(cache))
    check(tiny, cache, "a", 9)
    assert digest.adapter_id == "a"
    assert cache.stats().pages["adapter"] == 4, "the old one's pages are free"


def test_removed_meanwhile_nothing_of_it_stays(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    stand_midway(tiny, cache, medium).release()
    cache.remove("a")
    go_on(medium)
    assert tiny.wait_until(lambda: tiny.idle(cache) and not cache.stats().pages["adapter"])
    for tier in (Tier.GPU, Tier.HOST, Tier.DISK):
        assert "a" not in cache.resident(tier)
    check(tiny, cache, "a", 0)


def test_the_gpus_memory_can_be_dropped_meanwhile(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    """`drop_gpu` waits for what is under way; the adapter is loaded again after `restore`."""
    lease = stand_midway(tiny, cache, medium)
    threading.Timer(0.05, go_on, (medium,)).start()
    cache.drop_gpu()
    assert not lease.ready
    assert "a" in cache.resident(Tier.HOST)
    assert not cache._gpu._coming
    cache.restore()
    lease.result(10).release()
    check(tiny, cache, "a", 0)


def test_closing_meanwhile_ends_in_time_and_leaves_no_file(
    tiny: Any, medium: Medium, tmp_path: Path
) -> None:
    cache = tiny.cache(tiny.source("a"), disk_dir=tmp_path)
    lease = stand_midway(tiny, cache, medium)
    threading.Timer(0.05, go_on, (medium,)).start()
    assert tiny.ends(cache.close, 10)
    with pytest.raises(Exception, match="closed"):
        lease.result(1)
    assert tiny.files(tmp_path / "tmp") == []


def test_a_crowd_over_few_pages_with_a_failing_disk_reads_right(tiny: Any, medium: Medium) -> None:
    """Flows of several adapters at once, half of which break off somewhere."""
    ids = [f"a{index}" for index in range(6)]
    count = [0]

    def fail(piece: int) -> None:
        count[0] += 1
        if count[0] % 37 == 0:
            raise OSError("injected")

    medium.before = fail
    # CPU memory for two and the GPU for three: everybody is read anew all the time.
    with tiny.cache(tiny.source(*ids), pages=22, host_bytes=40 << 10) as cache:

        def use(number: int) -> None:
            for turn in range(12):
                which = (number * 5 + turn * 7) % len(ids)
                try:
                    check(tiny, cache, ids[which], which)
                except LoadFailed:
                    cache.refresh(ids[which]).result(10)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        check_consistent(cache)
        assert tiny.wait_until(lambda: tiny.idle(cache) and cache.stats().leases == 0)
        assert cache.stats().loads[Tier.DISK, Tier.HOST, "failed"] > 0


@pytest.mark.gpu
def test_pages_given_back_by_a_flow_that_failed_are_never_written_again(
    tiny: Any, cache: AdapterCache, medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that went ahead stand on their streams behind long kernels when the read fails: the
    pages go to KV only after these copies have ended."""
    mark = Lane.mark

    def mark_after_a_sleep(lane: Lane) -> Any:
        with lane.use():
            torch.cuda._sleep(20_000_000)  # 10 ms
        return mark(lane)

    monkeypatch.setattr(Lane, "mark", mark_after_a_sleep)
    failures = [7]

    def fail(piece: int) -> None:
        if piece in failures:
            failures.clear()
            raise OSError("injected")

    medium.before = fail
    kept: list[int] = []

    def take_pages(tier: Tier, digest: bytes) -> None:
        if tier is Tier.DISK:  # the copy on disk is given up right after the pages
            taken: list[int] = []
            while (pages := cache.pages.allocate(1)) is not None:
                taken.extend(pages)
            with cache.lora_batch([]):
                for layer in range(2):
                    cache.kv_view(layer)[taken] = 7.0
            kept.extend(taken)

    cache._ledger.on_evict = take_pages
    lease = stand_midway(tiny, cache, medium, 7)
    go_on(medium)
    assert tiny.wait_until(lambda: bool(kept))
    torch.cuda.synchronize()
    for layer in range(2):
        assert (cache.kv_view(layer)[kept] == 7.0).all()
    cache.pages.free(kept)
    lease.result(10).release()
    check(tiny, cache, "a", 0)


@pytest.mark.gpu
def test_copies_that_go_ahead_carry_the_bytes_that_came(
    tiny: Any, cache: AdapterCache, medium: Medium
) -> None:
    """Each piece is written into page-locked memory just before its copy is queued."""
    assert cache._parts.host._locked, "CPU memory is page-locked"
    for turn in range(30):
        which = turn % 3
        check(tiny, cache, "abc"[which], which)
        with cache._deciding.lock:
            for tier, copies in ((Tier.GPU, cache._ledger.gpu), (Tier.HOST, cache._ledger.host)):
                for copy in [copy for copy in copies if copy.idle]:
                    cache._ledger.evict(tier, copy.digest, "test")
    assert cache.stats().loads[Tier.DISK, Tier.HOST, "ok"] >= 30


def test_a_transfer_that_was_abandoned_before_its_first_piece_waits_for_nothing(
    tiny: Any, medium: Medium
) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        streams = cache._gpu.streams
        way = cache._gpu._allocated()[1].demand
        spec = type("Spec", (), {"elements": 4096})()
        transfer = Transfer(streams, way, 0, (0, 1, 2, 3), spec, lambda: [], 0)
        with streams.step():
            transfer.abandon()
        assert transfer._landed == []
