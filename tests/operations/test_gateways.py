"""Residency, read from a real ``/metrics`` and scored as gateways score it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gateway_rules as rules
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from adaptercache import AdapterCache, KVLayout, LoraLayout, Request, Tier
from adaptercache.metrics import PrometheusCollector
from adaptercache.testing import FakeSource, FaultySource, any_device, random_adapter

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests/conformance/configs/tiny-llama.tf5.24.json"
LAYOUT = LoraLayout.from_config(CONFIG, max_rank=8, dtype="float32")
PAGE = 64 << 10
WAIT_S = 60.0
ODD = (
    *("acme/sql v3", 'says "hi"', "back\\slash", "{curly}=x", "naïve-Ω-中文", "🚀", "a=b;c", "'"),
    *("#hash", "%2C", "-", ".", "None", "nul"),
)
TORN = ("a,b", " blank", "two\nlines", "tab\tbed", "\u00a0hard", "half \ud800")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def source_of(*ids: str, rank: int = 1) -> FaultySource:
    source = FakeSource()
    for seed, adapter_id in enumerate(ids):
        parts: dict[str, Any] = {"targets": ("q_proj",), "layers": (0,), "seed": seed}
        source.put(adapter_id, *random_adapter(LAYOUT.base, rank=rank, **parts))
    return FaultySource(source)


class Scraped:
    """A live cache behind prometheus_client's HTTP server."""

    def __init__(
        self, source: FaultySource, *, slots: int, per_adapter: int = 64, **options: Any
    ) -> None:
        options = {"gpu_bytes": slots * PAGE} | options
        self.source = source
        self.cache = AdapterCache(
            LAYOUT,
            source,
            gpu_slots=slots,
            host_bytes=1 << 20,
            host_block_bytes=4096,
            device=any_device(),
            **options,
        )
        registry = CollectorRegistry()
        registry.register(
            PrometheusCollector(
                self.cache, gateway_prefix="vllm:", base_name="base", per_adapter=per_adapter
            )
        )
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)

    def text(self) -> str:
        url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=WAIT_S) as response:
            return str(response.read().decode())

    def read(self) -> rules.Instance:
        return rules.read(self.text())

    def use(self, *adapter_ids: str) -> None:
        for adapter_id in adapter_ids:
            with self.cache.acquire(adapter_id):
                pass

    def close(self) -> None:
        self.source.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.cache.close()


@pytest.fixture
def scraped() -> Iterator[Callable[..., Scraped]]:
    with ExitStack() as stack:

        def make(*ids: str, slots: int = 3, rank: int = 1, **options: Any) -> Scraped:
            made = Scraped(source_of(*ids, rank=rank), slots=slots, **options)
            stack.callback(made.close)
            return made

        yield make


def scores(instance: rules.Instance, *adapters: str) -> list[float]:
    """Both versions of the scorer, which are told the same by us."""
    found = [rules.affinity(instance, adapter) for adapter in adapters]
    assert found == [rules.affinity_by_union(instance, adapter) for adapter in adapters]
    return found


# The lists.


def test_loaded_instances_score_1_whether_a_request_runs_or_not(
    scraped: Callable[..., Scraped],
) -> None:
    instance = scraped("runs", "idle", "absent")
    instance.use("idle")
    with instance.cache.acquire("runs"):
        assert scores(instance.read(), "runs", "idle", "absent") == [1.0, 1.0, 0.8]
    assert scores(instance.read(), "runs", "idle", "absent") == [1.0, 1.0, 0.8]


def test_a_free_slot_scores_0_8_until_the_last_is_taken(scraped: Callable[..., Scraped]) -> None:
    instance = scraped("a", "b", "c", "d")
    assert scores(instance.read(), "a", "d") == [0.8, 0.8]
    instance.use("a")
    assert scores(instance.read(), "a", "d") == [1.0, 0.8]
    instance.use("b", "c")
    assert scores(instance.read(), "a", "d") == [1.0, 0.0]
    instance.use("d")  # evicts a
    assert scores(instance.read(), "a", "d") == [0.0, 1.0]
    assert instance.read().most == 3


def test_who_is_waited_for_scores_0_6_where_nothing_is_free(
    scraped: Callable[..., Scraped],
) -> None:
    instance = scraped("a", "b", "c", "waits", slots=2)
    with instance.cache.acquire("a"), instance.cache.acquire("b"):
        pending = instance.cache.acquire("waits")
        assert scores(instance.read(), "a", "waits", "c") == [1.0, 0.6, 0.0]
        pending.release()
        instance.cache.admit([Request("1", "waits")])
        assert scores(instance.read(), "a", "waits", "c") == [1.0, 0.6, 0.0]
        instance.cache.admit([])
        assert scores(instance.read(), "a", "waits", "c") == [1.0, 0.0, 0.0]


def test_who_waits_takes_the_free_slots_first(scraped: Callable[..., Scraped]) -> None:
    instance = scraped("a", "first", "second", "third", slots=3)
    instance.use("a")
    instance.source.gate.clear()
    pending = [instance.cache.acquire("first")]
    assert scores(instance.read(), "first", "third") == [0.8, 0.8]  # one more has room
    pending.append(instance.cache.acquire("second"))
    assert scores(instance.read(), "first", "third") == [0.6, 0.0]
    instance.source.gate.set()
    for lease in pending:
        lease.result(timeout_s=WAIT_S).release()
    assert scores(instance.read(), "a", "first", "second", "third") == [1.0, 1.0, 1.0, 0.0]


def test_an_instance_out_of_pages_is_saturated_whatever_slots_it_has(
    scraped: Callable[..., Scraped],
) -> None:
    instance = scraped("a", "b", "c", "d", slots=64, gpu_bytes=3 * PAGE)
    instance.use("a", "b")
    assert instance.cache.stats().slots["free"] == 62
    assert scores(instance.read(), "a", "d") == [1.0, 0.8]
    instance.use("c")
    assert scores(instance.read(), "a", "d") == [1.0, 0.0]


def test_an_instance_out_of_slots_is_saturated_whatever_pages_it_has(
    scraped: Callable[..., Scraped],
) -> None:
    instance = scraped("a", "b", "c", slots=2, gpu_bytes=9 * PAGE)
    instance.use("a")
    assert scores(instance.read(), "a", "c") == [1.0, 0.8]
    instance.use("b")
    assert scores(instance.read(), "a", "c") == [1.0, 0.0]


def test_who_is_being_copied_to_the_gpu_has_its_place_already(
    scraped: Callable[..., Scraped], monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = scraped("comes", "next", "last", slots=2)
    gpu, may_write = instance.cache._gpu, threading.Event()
    write = gpu.write

    def write_later(*args: Any) -> None:
        may_write.wait(WAIT_S)
        write(*args)

    monkeypatch.setattr(gpu, "write", write_later)
    lease = instance.cache.acquire("comes")
    wait_until(lambda: instance.cache.stats().slots["used"] == 1)
    seen = instance.read()
    assert (seen.active, seen.waiting) == (set(), {"comes"})
    assert scores(seen, "next") == [0.8]
    may_write.set()
    lease.result(timeout_s=WAIT_S).release()
    assert scores(instance.read(), "comes", "next") == [1.0, 0.8]


def test_pages_of_the_kv_cache_are_no_room(scraped: Callable[..., Scraped]) -> None:
    kv = KVLayout(block_size=16, kv_heads=2, head_dim=8, dtype="float32")
    ids = [f"a{number}" for number in range(60)]  # a page each
    instance = scraped(*ids, slots=60, kv=kv, gpu_bytes=64 * 4096)
    taken = instance.cache.pages.allocate(instance.cache.pages.num_available)
    assert taken is not None
    left = instance.cache.stats().pages["free"]
    assert 2 < left < 40
    instance.use(*ids[: left - 1])
    assert scores(instance.read(), "a0", "a59") == [1.0, 0.8]
    instance.use(ids[left - 1])
    assert scores(instance.read(), "a0", "a59") == [1.0, 0.0]
    instance.cache.pages.free(taken)
    assert scores(instance.read(), "a0", "a59") == [1.0, 0.8]


def test_ids_of_equal_content_share_a_slot_and_leave_room(
    scraped: Callable[..., Scraped],
) -> None:
    instance = scraped("a", slots=3)
    tensors, config = random_adapter(LAYOUT.base, rank=1, targets=("q_proj",), layers=(0,), seed=9)
    for name in ("x", "y", "z"):
        instance.cache.put(name, tensors, config).result(WAIT_S)
    instance.use("x", "y", "z")
    assert instance.cache.stats().slots == {"used": 1, "free": 2}
    assert scores(instance.read(), "x", "y", "z", "a") == [1.0, 1.0, 1.0, 0.8]


def test_of_an_old_and_a_new_series_the_new_one_is_read(scraped: Callable[..., Scraped]) -> None:
    """A reader that kept series, as Prometheus does, must not go by the old ones."""
    instance = scraped("a", "b", slots=1)
    lines = []
    for adapter_id in ("a", "b"):
        instance.use(adapter_id)
        found = [x for x in instance.text().splitlines() if x.startswith("vllm:lora_requests_info")]
        assert len(found) == 1
        lines += found
        time.sleep(0.01)
    for kept in (lines, lines[::-1]):
        seen = rules.read("# TYPE vllm:lora_requests_info gauge\n" + "\n".join(kept) + "\n")
        assert scores(seen, "a", "b") == [0.0, 1.0]


def test_odd_ids_are_read_back_as_they_are_and_others_take_their_room(
    scraped: Callable[..., Scraped],
) -> None:
    count = len(ODD) + len(TORN) + 1
    instance = scraped(*ODD, *TORN, "later", slots=count)
    instance.use(*ODD)
    seen = instance.read()
    assert seen.active == set(ODD)
    assert set(scores(seen, *ODD)) == {1.0}
    assert scores(seen, "later", "a", "b", "blank", "two", "lines", "sql v3") == [0.8] * 7
    instance.use(*TORN)  # can't be told of, but are there
    seen = instance.read()
    assert seen.active == set(ODD)
    assert scores(seen, ODD[0], "later") == [1.0, 0.8]
    instance.use("later")
    seen = instance.read()
    assert scores(seen, "later", "a", "somebody else") == [1.0, 0.0, 0.0]


def test_prometheus_own_parser_reads_odd_ids(
    scraped: Callable[..., Scraped], promtool: str
) -> None:
    """Gateways are written in Go and parse with it."""
    instance = scraped(*ODD, *TORN, slots=len(ODD) + len(TORN))
    instance.use(*ODD, *TORN)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=instance.text().encode(), capture_output=True
    )
    said = checked.stderr.decode().splitlines()
    assert said  # that names should not contain ':'
    assert all(line.startswith("vllm:") and "should not contain" in line for line in said), said


def test_a_fleet_is_narrowed_to_those_that_have_the_adapter(
    scraped: Callable[..., Scraped],
) -> None:
    has, waits, free, full = (scraped("x", "y", "z", slots=2) for _ in range(4))
    has.use("x")
    full.use("y", "z")
    with waits.cache.acquire("y"), waits.cache.acquire("z"):
        pending = waits.cache.acquire("x")
        made = {"has": has, "waits": waits, "free": free, "full": full}
        fleet = {name: instance.read() for name, instance in made.items()}
        pending.release()
    assert {name: rules.affinity(it, "x") for name, it in fleet.items()} == {
        "has": 1.0,
        "waits": 0.6,
        "free": 0.8,
        "full": 0.0,
    }
    assert rules.kept_by_affinity(fleet, "x") == {"has", "waits"}
    assert rules.kept_by_affinity(fleet, "x", chance=0.9999) == {"free"}
    assert rules.kept_by_affinity(fleet, "y") == {"full", "waits"}
    assert rules.kept_by_affinity(fleet, "nobody's") == {"has", "free"}
    assert rules.kept_by_affinity({"full": fleet["full"]}, "x") == set()
    assert rules.kept_by_residency(fleet, "x") == {"has"}
    assert rules.kept_by_residency(fleet, "nobody's") == set(fleet)


# An adapter a series.


def test_the_tiers_of_the_load_state_scorer(scraped: Callable[..., Scraped]) -> None:
    instance = scraped("a", "b", "c", "d", slots=2)
    seen = instance.read()
    assert (seen.level_of, seen.num_on_gpu, seen.most, seen.base_name) == ({}, 0, 2, "base")
    assert rules.load_state(seen, "a") == "free"
    instance.use("a")
    seen = instance.read()
    assert [rules.load_state(seen, each) for each in "ab"] == ["gpu", "free"]
    assert seen.pinned == set()
    with instance.cache.acquire("b"):
        instance.use("c")  # evicts a, which stays in CPU memory
        seen = instance.read()
        assert seen.level_of == {"a": "cpu", "b": "gpu", "c": "gpu"}
        assert [rules.load_state(seen, each) for each in "abcd"] == [
            *("cpu", "gpu", "gpu"),
            "saturated",
        ]
        assert seen.pinned == {"b"}
        assert seen.num_on_gpu == seen.most == 2
    instance.cache.remove("a")
    assert instance.read().level_of == {"b": "gpu", "c": "gpu"}


def test_adapters_on_the_gpu_have_their_series_before_others(
    scraped: Callable[..., Scraped],
) -> None:
    instance = scraped("a", "b", "c", "d", slots=2, per_adapter=3)
    instance.use(*"abcd")
    assert instance.cache.resident(Tier.HOST) == {"a", "b", "c", "d"}
    assert instance.read().level_of == {"c": "gpu", "d": "gpu", "a": "cpu"}


# The example engine, in a process of its own.


class Engine:
    """`examples/serve.py` over the tiny model."""

    def __init__(self, folder: Path, *options: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        command = [sys.executable, str(ROOT / "examples/serve.py"), "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--device", "cpu", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self._address = self._process.stdout.readline().split()[2].rstrip(",")[len("http://") :]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._address}{path}", timeout=WAIT_S) as response:
            return str(response.read().decode())

    def read(self) -> rules.Instance:
        return rules.read(self.get("/metrics"))

    def complete(self, model: str, count: int) -> int:
        """The status; safe to call from several threads."""
        body = json.dumps({"model": model, "prompt": "Once upon", "max_tokens": count})
        connection = http.client.HTTPConnection(self._address, timeout=WAIT_S)
        try:
            connection.request("POST", "/v1/completions", body)
            with connection.getresponse() as response:
                response.read()
                return response.status
        finally:
            connection.close()

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.wait(30) == 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("serve")
    made = Engine(folder, *("--count", "6", "--gpu-slots", "4", "--name", "llama"))
    try:
        yield made
    finally:
        made.close()


def test_the_example_engine_has_all_that_gateways_read(engine: Engine) -> None:
    fresh = engine.read()
    assert fresh.errors == []
    assert (fresh.queue, fresh.running, fresh.most) == (0, 0, 4)
    assert fresh.kv_usage < 0.05
    assert fresh.block_size == 16
    assert fresh.num_blocks > 500
    assert fresh.base_name == "llama"
    assert scores(fresh, "adapter-00", "adapter-05") == [0.8, 0.8]

    for number in range(3):
        assert engine.complete(f"adapter-0{number}", 2) == 200
    loaded = engine.read()
    assert scores(loaded, "adapter-00", "adapter-02", "adapter-05") == [1.0, 1.0, 0.8]
    assert rules.kept_by_residency({"fresh": fresh, "it": loaded}, "adapter-00") == {"it"}

    clients = [
        threading.Thread(target=engine.complete, args=(f"adapter-0{number % 6}", 200))
        for number in range(12)
    ]
    for client in clients:
        client.start()
    seen: list[rules.Instance] = []

    def is_waited_for() -> bool:
        seen.append(engine.read())
        return bool(seen[-1].waiting) and len(seen[-1].active) == 4

    wait_until(is_waited_for)
    busy = seen[-1]
    assert busy.running > 0
    assert busy.queue >= len(busy.waiting) > 0
    assert fresh.kv_usage < busy.kv_usage <= 1.0
    assert set(scores(busy, *busy.active)) == {1.0}
    assert set(scores(busy, *busy.waiting)) == {0.6}
    assert scores(busy, "adapter-99") == [0.0]
    assert rules.queue_scores([fresh, busy]) == [1.0, 0.0]
    assert rules.kv_score(fresh) > rules.kv_score(busy)
    for client in clients:
        client.join()
    after = engine.read()
    assert (after.queue, after.running) == (0, 0)
    assert after.kv_usage < 0.05


def test_the_example_engine_lists_its_models_as_gateways_filter_by(engine: Engine) -> None:
    """served-model-filter drops instances that don't list a model, and knows adapters by their
    parent."""
    rows = json.loads(engine.get("/v1/models"))["data"]
    assert {row["id"]: row.get("parent") for row in rows} == {
        "llama": None,
        **{f"adapter-0{number}": "llama" for number in range(6)},
    }
