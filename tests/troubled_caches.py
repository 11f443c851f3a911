"""Live caches, each in one kind of trouble, or in none, for alerts to find.

As a program it serves the metrics of the case ``name`` at ``/name`` of a port that it prints, until
its input ends. `CASES` says which alerts each must make fire: these, and no others.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prometheus_client import CollectorRegistry, generate_latest

from adaptercache import (
    AdapterCache,
    AdapterCacheError,
    AdapterNotFound,
    KVLayout,
    Lease,
    LoraLayout,
    Request,
    Tier,
)
from adaptercache.metrics import PrometheusCollector
from adaptercache.testing import FakeSource, FaultySource, random_adapter

__all__ = ["CASES"]

CONFIG = Path(__file__).parent / "conformance" / "configs" / "tiny-llama.tf5.24.json"
LAYOUT = LoraLayout.from_config(CONFIG, max_rank=8, dtype="float32")
KV = KVLayout(block_size=16, kv_heads=2, head_dim=8, dtype="float32")
PAGE, KV_PAGE, BLOCK = 64 << 10, 4096, 4096  # an adapter takes one of each
IDS = [f"acme/a{number}" for number in range(12)]


def adapter(seed: int, rank: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    return random_adapter(LAYOUT.base, rank=rank, targets=("q_proj",), layers=(0,), seed=seed)


def source_of(ids: Iterable[str] = IDS) -> FakeSource:
    source = FakeSource()
    for seed, adapter_id in enumerate(ids):
        source.put(adapter_id, *adapter(seed))
    return source


class EveryId:
    """A source with one content under every id, but for those that ``fails`` has an error for."""

    def __init__(
        self,
        content: tuple[Any, Any],
        fails: Callable[[str], Exception | None] = lambda _: None,
    ) -> None:
        self._one, self._fails = FakeSource(), fails
        self._one.put("it", *content)

    def revision(self, adapter_id: str) -> str:
        error = self._fails(adapter_id)
        if error is not None:
            raise error
        return self._one.revision("it")

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        return self._one.files("it", revision)

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        return self._one.read("it", revision, name, offset, into)

    def ids(self) -> Iterable[str]:
        return ()


class Stage:
    """Where a case builds its cache and says what happens to it, over and over."""

    def __init__(self, name: str, closing: ExitStack) -> None:
        self._name, self.closing = name, closing
        self._stop = threading.Event()
        self.registry = CollectorRegistry()

    def cache(self, source: Any, *, slots: int = 12, **options: Any) -> AdapterCache:
        options = {"gpu_bytes": slots * PAGE, "host_bytes": 64 * BLOCK} | options
        made = AdapterCache(
            LAYOUT, source, gpu_slots=slots, host_block_bytes=BLOCK, device="cpu", **options
        )
        self.closing.enter_context(made)
        self.registry.register(PrometheusCollector(made, gateway_prefix="vllm:", per_adapter=4))
        return made

    def hold(self, lease: Lease) -> None:
        """Until the end."""
        self.closing.callback(lease.release)

    def repeat(self, step: Callable[[], object], pause_s: float = 0.06) -> None:
        def run() -> None:
            while not self._stop.wait(pause_s):
                step()

        def end() -> None:
            self._stop.set()
            thread.join()

        thread = threading.Thread(target=run, name=self._name)
        thread.start()
        self.closing.callback(end)

    def use_in_turn(self, cache: AdapterCache, ids: Iterable[str]) -> None:
        each = itertools.cycle(ids)
        self.repeat(lambda: use(cache, next(each)))

    def use_new_ones(self, cache: AdapterCache) -> None:
        number = itertools.count()
        self.repeat(lambda: use(cache, f"new/{next(number)}"))


def use(cache: AdapterCache, adapter_id: str) -> None:
    try:
        with cache.acquire(adapter_id):
            pass
    except AdapterCacheError:
        pass  # it is what the case is about


def hurried() -> float:
    """A clock by which 0.1 s of waiting are 20."""
    return 200 * time.monotonic()


class Case(NamedTuple):
    begin: Callable[[Stage], None]
    alerts: frozenset[str]


CASES: dict[str, Case] = {}


def fires(*alerts: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """A case is added by its function, with the alerts that must fire for it."""

    def add(begin: Callable[[Stage], None]) -> Callable[[Stage], None]:
        CASES[begin.__name__] = Case(begin, frozenset(f"Adaptercache{each}" for each in alerts))
        return begin

    return add


@fires()
def healthy(stage: Stage) -> None:
    stage.use_in_turn(stage.cache(source_of()), IDS)


# Requests fail.


@fires("SourceDown", "LoadsFail")
def source_down(stage: Stage) -> None:
    refused = OSError("connection refused")
    stage.use_new_ones(stage.cache(EveryId(adapter(0), lambda _: refused)))


@fires("LoadsFail")
def some_loads_fail(stage: Stage) -> None:
    reset = OSError("connection reset")
    source = EveryId(adapter(0), lambda each: reset if each.endswith(("3", "6")) else None)
    stage.use_new_ones(stage.cache(source))


@fires("BadPublication")
def bad_publication(stage: Stage) -> None:
    tensors, config = adapter(0)
    stage.use_new_ones(stage.cache(EveryId((tensors, config | {"use_dora": True}))))


@fires("AdapterTooLarge")
def too_large(stage: Stage) -> None:
    content = random_adapter(LAYOUT.base, rank=8, targets=("q_proj", "v_proj"))
    stage.use_new_ones(stage.cache(EveryId(content), host_bytes=2 * BLOCK))


@fires("UnknownAdapters")
def unknown_adapters(stage: Stage) -> None:
    def missing(each: str) -> Exception:
        return AdapterNotFound("no such adapter", adapter_id=each)

    stage.use_new_ones(stage.cache(EveryId(adapter(0), missing)))


# Requests wait.


@fires("LoadsHang")
def loads_hang(stage: Stage) -> None:
    source = FaultySource(source_of())
    source.gate.clear()
    cache = stage.cache(source)
    stage.closing.callback(source.gate.set)
    for each in IDS[:3]:
        stage.hold(cache.acquire(each))


@fires("Slow")
def slow_source(stage: Stage) -> None:
    source = FaultySource(source_of())
    source.delay_s = 0.05
    cache = stage.cache(source, clock=hurried)
    each = itertools.cycle(IDS)

    def use_anew() -> None:
        adapter_id = next(each)
        cache.remove(adapter_id)
        use(cache, adapter_id)

    stage.repeat(use_anew)


@fires("QueueLong")
def long_queue(stage: Stage) -> None:
    source = FaultySource(EveryId(adapter(0)))
    source.delay_s = 0.2
    cache = stage.cache(source, clock=lambda: time.monotonic() / 10)  # so that it isn't slow, too
    stage.closing.callback(setattr, source, "delay_s", 0.0)
    for number in range(4000):
        stage.hold(cache.acquire(f"new/{number}"))


@fires("NoRoom", "LeasesHeld")
def no_room(stage: Stage) -> None:
    cache = stage.cache(source_of(), slots=3)
    for each in IDS[:3]:
        lease = cache.acquire(each)
        lease.result()
        stage.hold(lease)
    waiting = [Request(each, each) for each in IDS[3:]]
    stage.repeat(lambda: cache.admit(waiting))


@fires("KvPressure")
def kv_pressure(stage: Stage) -> None:
    cache = stage.cache(source_of(), kv=KV, gpu_bytes=64 * KV_PAGE)
    use(cache, IDS[0])
    pages = cache.pages.allocate(cache.pages.num_available)
    assert pages is not None
    stage.closing.callback(cache.pages.free, pages)
    waiting = [Request(str(number), IDS[0], 1, 4) for number in range(16)]

    def decide() -> None:
        cache.admit(waiting)
        use(cache, IDS[0])

    stage.repeat(decide)


@fires("LeasesHeld")
def leases_held(stage: Stage) -> None:
    lease = stage.cache(source_of()).acquire(IDS[0])
    lease.result()
    stage.hold(lease)


# A tier is too small. Where it isn't the GPU, the GPU is, too: else nothing would come back.


@fires("GpuThrashing")
def small_gpu(stage: Stage) -> None:
    stage.use_in_turn(stage.cache(source_of(), slots=3), IDS)


@fires("KvEvictsAdapters", "GpuThrashing")
def kv_evicts(stage: Stage) -> None:
    ids = [f"acme/k{number}" for number in range(48)]  # they don't fit into adapters' floor
    cache = stage.cache(source_of(ids), slots=64, kv=KV, gpu_bytes=64 * KV_PAGE)

    def take_and_return() -> None:
        pages = cache.pages.allocate(cache.pages.num_available)
        assert pages is not None
        cache.pages.free(pages)
        for each in ids:
            use(cache, each)

    stage.repeat(take_and_return)


@fires("SlotsShort", "GpuThrashing")
def few_slots(stage: Stage) -> None:
    stage.use_in_turn(stage.cache(source_of(), slots=3, gpu_bytes=8 * PAGE), IDS)


@fires("HostThrashing", "GpuThrashing")
def small_host(stage: Stage) -> None:
    stage.use_in_turn(stage.cache(source_of(), slots=2, host_bytes=3 * BLOCK), IDS)


@fires("DiskThrashing", "HostThrashing", "GpuThrashing")
def small_disk(stage: Stage) -> None:
    options = {"host_bytes": 3 * BLOCK, "disk_bytes": 40_000}  # of 12, a few
    stage.use_in_turn(stage.cache(source_of(), slots=2, **options), IDS)


@fires("DiskBroken", "HostThrashing", "GpuThrashing")
def broken_disk(stage: Stage) -> None:
    folder = Path(stage.closing.enter_context(tempfile.TemporaryDirectory()))
    cache = stage.cache(source_of(), slots=2, host_bytes=3 * BLOCK, disk_dir=folder)
    each = itertools.cycle(IDS)
    number = itertools.count()

    def damage_and_use() -> None:
        count, step = divmod(next(number), 20)
        packed = sorted(file for file in folder.rglob("*.safetensors") if len(file.stem) > 20)
        if step == 19:
            packed[count % len(packed)].write_bytes(bytes(8))
        use(cache, next(each))

    stage.repeat(damage_and_use)


@fires("PrefetchWasted")
def early_hints(stage: Stage) -> None:
    busy, *soon = [f"acme/h{number}" for number in range(21)]
    source = source_of([busy, *soon])
    cache = stage.cache(source, slots=24, kv=KV, gpu_bytes=64 * KV_PAGE)
    kept = cache.acquire(busy)
    kept.result()
    stage.hold(kept)

    def hint() -> None:
        cache.prefetch(soon)
        deadline = time.monotonic() + 1
        while len(cache.resident(Tier.GPU)) < 21 and time.monotonic() < deadline:
            time.sleep(0.005)
        for _ in range(80):  # nobody asks for them
            use(cache, busy)
        pages = cache.pages.allocate(cache.pages.num_available)
        assert pages is not None
        cache.pages.free(pages)

    stage.repeat(hint)


def main() -> None:
    torch.set_num_threads(1)
    with ExitStack() as closing:
        registries: dict[str, CollectorRegistry] = {}
        for name, case in CASES.items():
            stage = Stage(name, closing)
            case.begin(stage)
            registries[name] = stage.registry

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = generate_latest(registries[self.path.strip("/")])
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = closing.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        print(server.server_port, flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
