"""The whole cache against a model that knows only what was published, under which id, and when.

For every lease and every open batch the model remembers which version of the adapter it stands
for; after each step the bytes that its slot names must be that version's, to the bit. The same
holds for what was written into KV pages. In the end everything must settle, and leave nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny import BASE_CONFIG

from adaptercache import (
    AdapterCache,
    AdapterCacheError,
    AdapterInvalid,
    AdapterNotFound,
    KVLayout,
    Lease,
    LoadFailed,
    LoraLayout,
    Request,
    Tier,
)
from adaptercache.disk import transfer as disk_transfer
from adaptercache.kernels import add_lora
from adaptercache.testing import (
    FakeSource,
    FaultySource,
    any_device,
    check_consistent,
    random_adapter,
)
from adaptercache.tiers import ways
from adaptercache.tiers.remote import CONFIG, WEIGHTS, TensorSource

TARGETS = ("q_proj", "v_proj", "down_proj")
LAYOUT = LoraLayout.from_config(
    BASE_CONFIG,
    targets=TARGETS,
    max_rank=16,
    dtype="float32",
)
KV = KVLayout(block_size=16, kv_heads=1, head_dim=16, dtype="float32")
PAGE_BYTES = 2 * KV.block_bytes
NUM_PAGES = 12  # an adapter takes 1 to 7; KV may have 5
KEYS = [f"team/{letter}" for letter in "abcdef"]
DISK_BYTES = 120_000  # two or three adapters
PATIENCE_S = 20.0

keys = st.sampled_from(KEYS)
picks = st.integers(0, 1 << 16)
shapes = st.tuples(
    st.sampled_from([1, 4, 16]),
    st.sampled_from([TARGETS, ("q_proj", "v_proj"), ("v_proj",), ("down_proj",)]),
    st.sampled_from([(0, 1), (0,), (1,)]),
)


@dataclass
class Version:
    """One published adapter, as the caller's tensors."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, object]

    def matrices(self, path: str) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        a = self.tensors.get(f"base_model.model.{path}.lora_A.weight")
        if a is None:
            return None
        b = self.tensors[f"base_model.model.{path}.lora_B.weight"]
        return a, b, float(self.config["lora_alpha"]) / len(a)  # type: ignore[arg-type]


@dataclass
class Held:
    """A lease, the versions that it may turn out to hold, and then the one that it holds."""

    key: str
    lease: Lease
    possible: set[str]
    revision: str | None = None


@dataclass
class Step:
    """An open batch: what its slots held when it was opened."""

    stack: ExitStack
    slots: list[tuple[int, str]]
    freed: dict[int, float] = field(default_factory=dict)  # KV pages freed meanwhile


class Medium:
    """Reads packed files in small pieces, some of which fail, come slowly, or with a wrong bit, so
    that loads break off in the midst of their way from the disk to the GPU.

    Attributes:
        fault: what happens to one piece in seven.
    """

    def __init__(self) -> None:
        self.fault = "none"
        self._count = itertools.count()
        self._read = disk_transfer._read
        self._patched = pytest.MonkeyPatch()
        self._patched.setattr(disk_transfer, "READ_BYTES", 1024)
        self._patched.setattr(disk_transfer, "_read", self._read_piece)
        self._patched.setattr(disk_transfer, "_read_and_sum", self._read_and_sum)
        for name in ("STAGED_BYTES", "STRIDED_BYTES", "FIRST_BYTES"):
            self._patched.setattr(ways, name, PAGE_BYTES)

    def _is_hit(self, fault: str) -> bool:
        return self.fault == fault and next(self._count) % 7 == 5

    def _read_piece(self, file: int, offset: int, into: memoryview) -> int:
        if self._is_hit("fails"):
            raise OSError("injected")
        if self._is_hit("slow"):
            time.sleep(0.003)
        return self._read(file, offset, into)

    def _read_and_sum(self, file: int, offset: int, into: memoryview) -> int:
        self._read_piece(file, offset, into)
        if self._is_hit("flips"):
            into[0] ^= 4
        return zlib.crc32(into)

    def close(self) -> None:
        self._patched.undo()


class Errors(logging.Handler):
    """Defects that the cache itself has logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.getMessage()}: {record.exc_info}")


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def revision_of(key: str, version: Version) -> str:
    """What a source in memory calls it."""
    source = TensorSource()
    source.put(key, version.tensors, version.config)
    return source.revision(key)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, Version] = {}  # by the source's revision
        self.put_here: set[str] = set()
        self.sourced: dict[str, str] = {}
        self.current: dict[str, str] = {}  # what an id stands for: put, else the source's
        self.possible: dict[str, set[str]] = {key: set() for key in KEYS}
        self.may_fail = set(KEYS)
        self.pending: list[Held] = []
        self.held: list[Held] = []
        self.waiting: list[Request] = []
        self.running: list[tuple[Request, Held]] = []
        self.kv: dict[int, float] = {}
        self.steps: list[Step] = []
        self.now = 0.0
        self.count = 0
        self.inner = FakeSource()
        self.source = FaultySource(self.inner)
        self.medium = Medium()
        self.errors = Errors()
        logging.getLogger("adaptercache").addHandler(self.errors)
        self.evicted: list[tuple[Tier, bytes]] = []

    @initialize(
        policy=st.sampled_from(["lru", "lfu"]), first=st.lists(shapes, min_size=6, max_size=6)
    )
    def start(self, policy: str, first: list[Any]) -> None:
        for key, shape in zip(KEYS[:5], first, strict=False):  # one is unknown at first
            self.into_source(key, self.make(shape))
        self.may_fail = {KEYS[5]}
        self.cache = AdapterCache(
            LAYOUT,
            self.source,
            gpu_bytes=NUM_PAGES * PAGE_BYTES,
            gpu_slots=3,
            host_bytes=14 * 4096,
            host_block_bytes=4096,
            disk_bytes=DISK_BYTES,
            policy=policy,
            kv=KV,
            device=any_device(),
            on_evict=self._evicted,
            clock=lambda: self.now,
        )

    def _evicted(self, tier: Tier, digest: bytes) -> None:
        self.cache.stats()  # a hook may ask
        self.evicted.append((tier, digest))

    # -- what an id stands for

    def make(self, shape: Any) -> Version:
        rank, targets, layers = shape
        self.count += 1
        return Version(
            *random_adapter(
                LAYOUT.base,
                rank=rank,
                targets=targets,
                layers=layers,
                seed=self.count,
                dtype=torch.float32,
            )
        )

    def stands_for(self, key: str, revision: str | None) -> None:
        """The id's content changes, for who looks."""
        if revision is None:
            self.current.pop(key, None)
            self.may_fail.add(key)
            return
        self.current[key] = revision
        self.possible[key].add(revision)
        for held in self.pending:
            if held.key == key:
                held.possible.add(revision)

    @rule(
        key=keys,
        other=keys,
        shape=shapes,
        what=st.sampled_from(["new", "new", "new", "as another", "alpha alone", "broken"]),
    )
    def publish(self, key: str, other: str, shape: Any, what: str) -> None:
        if what == "broken":
            self.inner.put_files(key, {CONFIG: b"{", WEIGHTS: b"nonsense"})
            self.sourced.pop(key, None)
            self.may_fail.add(key)
            if key not in self.put_here:
                self.stands_for(key, None)
        elif what == "as another" and other in self.sourced:
            self.into_source(key, self.versions[self.sourced[other]])
        elif what == "alpha alone" and key in self.sourced:
            old = self.versions[self.sourced[key]]
            self.count += 1
            config = old.config | {"lora_alpha": 32.0 + self.count}
            self.into_source(key, Version(old.tensors, config))
        else:
            self.into_source(key, self.make(shape))

    def into_source(self, key: str, version: Version) -> None:
        self.inner.put(key, version.tensors, version.config)
        revision = revision_of(key, version)
        self.versions[revision] = version
        self.sourced[key] = revision
        self.may_fail.add(key)  # a read that it meets fails
        if key not in self.put_here:
            self.stands_for(key, revision)

    @rule(key=keys, shape=shapes)
    def put(self, key: str, shape: Any) -> None:
        version = self.make(shape)
        future = self.cache.put(key, version.tensors, version.config)
        revision = revision_of(key, version)
        self.versions[revision] = version
        self.put_here.add(key)
        self.stands_for(key, revision)
        self.may_fail.add(key)
        if self.source.gate.is_set():
            assert future.result(PATIENCE_S).revision == revision
            self.possible[key] = {revision}

    @rule(key=keys)
    def refresh(self, key: str) -> None:
        future = self.cache.refresh(key)
        if not self.source.gate.is_set():
            return
        try:
            found = future.result(PATIENCE_S)
        except (LoadFailed, AdapterNotFound, AdapterInvalid):
            assert key in self.may_fail
            return
        assert found.revision == self.current[key]
        self.possible[key] = {found.revision}

    @rule(key=keys)
    def remove(self, key: str) -> None:
        self.cache.remove(key)
        self.put_here.discard(key)
        self.may_fail.add(key)
        self.stands_for(key, self.sourced.get(key))
        self.possible[key] = {self.sourced[key]} if key in self.sourced else set()

    @rule(
        key=keys,
        how=st.sampled_from(["fails", "recovers", "slow", "fast", "stands still", "goes on"]),
    )
    def source_behaves(self, key: str, how: str) -> None:
        self.source.gate.set()
        if how == "fails":
            self.source.failing.add(key)
            self.may_fail.add(key)
        elif how == "recovers":
            self.source.failing.discard(key)
        elif how in ("slow", "fast"):
            self.source.delay_s = 0.002 if how == "slow" else 0.0
        elif how == "stands still":
            self.source.gate.clear()

    @rule(fault=st.sampled_from(["fails", "flips", "slow", "none", "none"]))
    def disk_behaves(self, fault: str) -> None:
        if fault in ("fails", "flips"):
            self.may_fail = set(KEYS)  # what was fetched twice may fail twice
        self.medium.fault = fault

    @rule(
        some=st.lists(keys, min_size=1, max_size=3),
        fault=st.sampled_from(["fails", "flips", "slow"]),
        patient=st.booleans(),
    )
    def read_from_disk(self, some: list[str], fault: str, patient: bool) -> None:
        """All that is idle in memory goes, and some are asked for, while the disk misbehaves."""
        self.disk_behaves(fault)
        with self.cache._deciding.lock:
            for tier in (Tier.GPU, Tier.HOST):
                copies = self.cache._ledger.gpu if tier is Tier.GPU else self.cache._ledger.host
                for copy in [copy for copy in copies if copy.idle]:
                    self.cache._ledger.evict(tier, copy.digest, "test")
        self.cache._parts.disk._transfer._verified.clear()  # as in a new process
        for key in some:
            self.acquire(key, patient)

    @rule(seconds=st.sampled_from([0.5, 2.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # -- leases and requests

    @rule(key=keys, patient=st.booleans())
    def acquire(self, key: str, patient: bool) -> None:
        lease = self.cache.acquire(key)
        self.pending.append(Held(key, lease, set(self.possible[key])))
        if patient:
            self.let_run(lambda: lease.ready)
        self.look()

    def let_run(self, enough: Callable[[], bool]) -> None:
        """Give the movers time, until it is enough or they have nothing to do."""

        wait_until(lambda: enough() or self.is_idle(), 0.2)

    def is_idle(self) -> bool:
        stats = self.cache.stats()
        return not stats.in_flight_loads and not any(stats.queue_depth.values())

    @rule(key=keys)
    def acquire_in_a_task_that_is_cancelled(self, key: str) -> None:
        async def wait() -> None:
            async with self.cache.acquire(key):
                pass

        async def cancel() -> None:
            task = asyncio.ensure_future(wait())
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, AdapterCacheError):
                await task

        asyncio.run(cancel())

    @rule(picked=picks, what=st.sampled_from(["held", "held", "pending", "running"]))
    def release(self, picked: int, what: str) -> None:
        if what == "running":
            if self.running:
                self.running.pop(picked % len(self.running))[1].lease.release()
            return
        leases = self.held if what == "held" else self.pending
        if leases:
            leases.pop(picked % len(leases)).lease.release()

    @rule(picked=picks)
    def drop_unreleased(self, picked: int) -> None:
        both = self.pending + self.held
        if both:
            dropped = both[picked % len(both)]
            (self.pending if dropped in self.pending else self.held).remove(dropped)

    @rule(
        some=st.lists(
            st.tuples(keys | st.none(), st.sampled_from([0, 0, 1, 3]), st.booleans()), max_size=4
        )
    )
    def arrive(self, some: list[tuple[str | None, int, bool]]) -> None:
        for key, kv_pages, pipelined in some:
            self.count += 1
            name = f"r{self.count}"
            self.waiting.append(Request(name, key, kv_pages=kv_pages, pipelined=pipelined))

    @rule(max_adapters=st.sampled_from([None, None, 1, 2]), patient=st.booleans())
    def admit(self, max_adapters: int | None, patient: bool) -> None:
        if patient:
            self.let_run(lambda: False)
        running = [(request, held.lease) for request, held in self.running]
        before = {lease.digest for _, lease in running} - {None}
        asked = {request.request_id: request for request in self.waiting}
        admission = self.cache.admit(self.waiting, running=running, max_adapters=max_adapters)
        answered = [request.request_id for request, _ in admission.admitted + admission.failed]
        answered += [request.request_id for request in admission.deferred]
        assert sorted(answered) == sorted(asked), "each is answered once"
        assert set(admission.reasons) == {r.request_id for r in admission.deferred}
        for request, lease in admission.admitted:
            assert lease.ready
            held = Held("" if request.adapter_id is None else request.adapter_id, lease, set())
            if request.adapter_id is not None:
                held.possible = set(self.possible[request.adapter_id])
                self.note(held)
            self.running.append((request, held))
        for request, _ in admission.failed:
            assert request.adapter_id in self.may_fail
        self.waiting = admission.deferred
        digests = {held.lease.digest for _, held in self.running} - {None}
        if max_adapters is not None:
            assert len(digests) <= max(max_adapters, len(before))
        taken = []
        for request, _ in admission.admitted:
            if request.kv_pages:
                pages = self.cache.pages.allocate(request.kv_pages)
                assert pages is not None, "promised"
                taken.append(pages)
        for pages in taken:  # in a step, which ends what was promised
            self.write_kv(pages)

    @rule(wanted=st.lists(keys, max_size=4), to=st.sampled_from([Tier.GPU, Tier.HOST, Tier.DISK]))
    def prefetch(self, wanted: list[str], to: Tier) -> None:
        self.cache.prefetch(wanted, to)

    # -- steps and KV

    @precondition(lambda self: len(self.steps) < 2)
    @rule(then_release=st.booleans())
    def open_a_step(self, then_release: bool) -> None:
        leases = self.held + [held for _, held in self.running]
        pairs = [(held.lease, 1 + index % 3) for index, held in enumerate(leases)]
        stack = ExitStack()
        batch = stack.enter_context(self.cache.lora_batch([*pairs, (self.cache.acquire(None), 2)]))
        revisions = [held.revision for held in leases]
        self.compute(batch, list(zip(revisions, (n for _, n in pairs), strict=True)))
        slots = [(held.lease.slot, held.revision) for held in leases if held.revision is not None]
        self.steps.append(Step(stack, slots))
        if then_release:  # the batch holds them now
            for held in leases:
                held.lease.release()
            self.held, self.running = [], []

    @rule(cycles=st.sampled_from([10_000, 1_000_000, 5_000_000]))
    def gpu_is_slow(self, cycles: int) -> None:
        """A kernel that stands before all that the compute stream does from now on."""
        if any_device() == "cuda":
            torch.cuda._sleep(cycles)

    @rule(n=st.integers(1, 5))
    def press(self, n: int) -> None:
        """KV asks for more and more, until it gets no more."""
        while (pages := self.cache.pages.allocate(n)) is not None:
            self.write_kv(pages)

    def compute(self, batch: Any, tokens: list[tuple[str | None, int]]) -> None:
        """The LoRA term of a layer, against plain products in float64."""
        site = next(s for s in LAYOUT.sites if s.module == "down_proj" and s.layer == 1)
        device = batch.stack.device
        x = torch.randn(batch.num_rows, site.in_features)
        y = torch.zeros(batch.num_rows, site.out_features, device=device)
        add_lora(y, x.to(device), batch, ("down_proj",), 1)
        y = y.cpu()
        row = 0
        for revision, count in tokens:
            want = torch.zeros(count, site.out_features, dtype=torch.float64)
            found = self.versions[revision].matrices(site.path) if revision is not None else None
            if found is not None:
                a, b, scaling = found
                want = scaling * (x[row : row + count].double() @ a.double().T) @ b.double().T
            torch.testing.assert_close(y[row : row + count].double(), want, rtol=1e-4, atol=1e-4)
            row += count
        assert not y[row:].any()

    @rule(picked=picks)
    def close_a_step(self, picked: int) -> None:
        if self.steps:
            self.steps.pop(picked % len(self.steps)).stack.close()

    @rule(n=st.integers(1, 5))
    def allocate_kv(self, n: int) -> None:
        pages = self.cache.pages.allocate(n)
        if pages is not None:
            self.write_kv(pages)

    def write_kv(self, pages: tuple[int, ...]) -> None:
        assert not set(pages) & set(self.kv), "a page has two owners"
        for page in pages:
            self.count += 1
            self.kv[page] = float(self.count)
            for step in self.steps:
                step.freed.pop(page, None)
        with self.cache.lora_batch([]):  # KV is written by steps
            for page in pages:
                for layer in range(LAYOUT.num_layers):
                    self.cache.kv_view(layer)[page] = self.kv[page] + layer / 4

    @rule(picked=picks)
    def free_kv(self, picked: int) -> None:
        pages = sorted(self.kv)[: picked % 6]
        for step in self.steps:
            step.freed.update((page, self.kv[page]) for page in pages)
        for page in pages:
            del self.kv[page]
        self.cache.pages.free(pages)

    @rule()
    def sleep_and_wake(self) -> None:
        if self.pending or self.steps or not self.source.gate.is_set():
            return  # (not a precondition: what is pending depends on the threads)
        self.waiting = []
        self.cache.admit([])
        if self.held or self.kv or any(held.key for _, held in self.running):
            try:
                self.cache.drop_gpu()
            except AdapterCacheError:
                return
            raise AssertionError("dropped what is held")
        try:
            self.cache.drop_gpu()
        except AdapterCacheError:
            return  # a lease that was dropped unreleased is on its way back
        with contextlib.suppress(LoadFailed, AdapterNotFound, AdapterInvalid):
            self.cache.restore()

    # -- what must hold

    def look(self) -> None:
        """Take note of leases that are ready by now."""
        for held in list(self.pending):
            if held.lease.ready:
                self.pending.remove(held)
                try:
                    self.note(held)
                except (LoadFailed, AdapterNotFound, AdapterInvalid):
                    assert held.key in self.may_fail
                else:
                    self.held.append(held)

    def note(self, held: Held) -> None:
        key = held.lease.key
        assert key is not None
        assert key.adapter_id == held.key
        assert key.revision in held.possible, "a version that is not, or no longer, the id's"
        held.revision = key.revision

    def slots(self) -> Iterator[tuple[int, str]]:
        for held in self.held + [held for _, held in self.running]:
            if held.revision is not None and not self.is_coming(held.lease.slot):
                yield held.lease.slot, held.revision
        for step in self.steps:
            yield from step.slots

    def is_coming(self, slot: int) -> bool:
        """Whether it is still being copied: then only a step that waits for it may look."""
        return self.cache._gpu.arrivals([slot]) is not None

    @invariant()
    def leased_bytes_are_those_of_their_version(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.look()
        for slot, revision in set(self.slots()):
            stack = self.cache._gpu.stack
            for site in LAYOUT.sites:
                want = self.versions[revision].matrices(site.path)
                got = stack.dense(slot, site.layer, site.module)
                if want is None or got is None:
                    assert got is want
                    continue
                assert torch.equal(got[0].cpu(), want[0])
                assert torch.equal(got[1].cpu(), want[1])
                assert abs(got[2] - want[2]) <= 1e-6 * want[2]

    @invariant()
    def kv_pages_hold_what_was_written(self) -> None:
        if not hasattr(self, "cache"):
            return
        for step in self.steps:  # a step that is open may still read what was freed in it
            self.check_kv(step.freed)
        self.check_kv(self.kv)

    def check_kv(self, pages: dict[int, float]) -> None:
        for page, value in pages.items():
            for layer in range(LAYOUT.num_layers):
                assert (self.cache.kv_view(layer)[page] == value + layer / 4).all()

    @invariant()
    def tables_agree(self) -> None:
        if hasattr(self, "cache"):
            check_consistent(self.cache)
            assert self.errors.texts == []

    def let_go_of_everything(self) -> None:
        for step in self.steps:
            step.stack.close()
        for held in self.held + [held for _, held in self.running]:
            held.lease.release()
        self.cache.pages.free(self.kv)
        self.kv, self.held, self.running, self.steps = {}, [], [], []
        self.source.gate.set()
        self.source.failing.clear()
        self.source.delay_s = 0.0
        self.medium.fault = "none"

    def settle(self) -> None:
        """Once nothing is held and the source is well, all who wait are served, in turn."""
        self.look()
        waiting, self.waiting = self.waiting, []
        self.cache.admit([])
        self.let_go_of_everything()
        assert wait_until(self.is_idle), "a load that met a fault has not ended"
        self.now += 100.0
        assert wait_until(self.serve_leases), f"{self.pending} starve"
        self.waiting = waiting
        assert wait_until(self.serve_requests), f"{self.waiting} starve"
        self.now += 100.0
        for key in self.current:
            self.cache.refresh(key).result(PATIENCE_S)
            self.possible[key] = {self.current[key]}
            with self.cache.acquire(key).result(PATIENCE_S) as lease:
                self.note(Held(key, lease, self.possible[key]))
        self.may_fail = set(KEYS) - set(self.current)
        if not wait_until(lambda: self.cache.stats().leases == 0, 0.2):
            gc.collect()  # slow; the traceback of an error may hold one that was dropped
        assert wait_until(lambda: self.cache.stats().leases == 0), "a lease leaked"

    def serve_leases(self) -> bool:
        """Releases who has been served, and nothing else: that alone must let in the next."""
        self.look()
        for held in self.held:
            held.lease.release()
        self.held = []
        return not self.pending

    def serve_requests(self) -> bool:
        admission = self.cache.admit(self.waiting)
        for _, lease in admission.admitted:
            lease.release()
        self.waiting = admission.deferred
        return not self.waiting

    def teardown(self) -> None:
        try:
            if hasattr(self, "cache"):
                self.settle()
        finally:
            self.source.gate.set()
            if hasattr(self, "cache"):
                for step in self.steps:
                    step.stack.close()
                self.cache.close()
            self.medium.close()
            logging.getLogger("adaptercache").removeHandler(self.errors)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=120 if settings.default.max_examples <= 100 else settings.default.max_examples,
    stateful_step_count=60,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # threads: a failure hardly shrinks
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
)
