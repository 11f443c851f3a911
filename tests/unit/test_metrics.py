from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from adaptercache import AdapterCache, AdapterCacheError, LoraLayout, Request, Tier
from adaptercache.metrics import PrometheusCollector
from adaptercache.testing import FakeSource, FaultySource, any_device, random_adapter

CONFIG = Path(__file__).parents[1] / "conformance" / "configs" / "tiny-llama.tf5.24.json"
LAYOUT = LoraLayout.from_config(CONFIG, max_rank=8, dtype="float32")
BLOCK = 4096
PAGE = 64 << 10
WAIT_S = 30.0

TIERS = ("gpu", "host", "disk")
HOPS = (("remote", "disk"), ("disk", "host"), ("host", "gpu"))
CERTAIN = {
    "adaptercache_requests_total": {
        *(("gpu", "hit"), ("host", "miss"), ("disk", "miss"), ("remote", "miss")),
        ("none", "failed"),
    },
    "adaptercache_loads_total": {(*hop, result) for hop in HOPS for result in ("ok", "failed")},
    "adaptercache_load_seconds_sum": set(HOPS),
    "adaptercache_load_seconds_count": set(HOPS),
    "adaptercache_ready_seconds_sum": {("gpu",), ("host",), ("disk",), ("remote",)},
    "adaptercache_ready_seconds_count": {("gpu",), ("host",), ("disk",), ("remote",)},
    "adaptercache_load_bytes_total": set(HOPS),
    "adaptercache_evictions_total": {
        *(("gpu", "room"), ("gpu", "kv"), ("gpu", "superseded"), ("gpu", "dropped")),
        ("gpu", "broken"),
        *(("host", "room"), ("host", "superseded")),
        *(("disk", "room"), ("disk", "superseded"), ("disk", "broken"), ("disk", "gone")),
    },
    "adaptercache_prefetch_wasted_total": {()},
    "adaptercache_errors_total": {
        *(("AdapterNotFound",), ("AdapterInvalid",), ("AdapterUnsupported",)),
        *(("LoadFailed",), ("CapacityError",), ("CacheClosed",)),
    },
    "adaptercache_deferred_total": {
        *(("loading",), ("room",), ("kv_pages",), ("max_adapters",)),
        *(("max_rank_sum",), ("max_pages",), ("max_tokens",)),
    },
    "adaptercache_resident_adapters": {(tier,) for tier in TIERS},
    "adaptercache_resident_bytes": {(tier,) for tier in TIERS},
    "adaptercache_capacity_bytes": {(tier,) for tier in TIERS},
    "adaptercache_pages": {("adapter",), ("kv",), ("free",)},
    "adaptercache_slots": {("used",), ("free",)},
    "adaptercache_leases": {()},
    "adaptercache_in_flight_loads": {()},
    "adaptercache_queue_depth": {("->".join(hop),) for hop in HOPS},
}
LABELS = {
    "adaptercache_requests_total": ("tier", "result"),
    "adaptercache_loads_total": ("from", "to", "result"),
    "adaptercache_load_seconds_sum": ("from", "to"),
    "adaptercache_load_seconds_count": ("from", "to"),
    "adaptercache_ready_seconds_sum": ("from",),
    "adaptercache_ready_seconds_count": ("from",),
    "adaptercache_load_bytes_total": ("from", "to"),
    "adaptercache_evictions_total": ("tier", "reason"),
    "adaptercache_errors_total": ("type",),
    "adaptercache_deferred_total": ("reason",),
    "adaptercache_resident_adapters": ("tier",),
    "adaptercache_resident_bytes": ("tier",),
    "adaptercache_capacity_bytes": ("tier",),
    "adaptercache_pages": ("state",),
    "adaptercache_slots": ("state",),
    "adaptercache_queue_depth": ("hop",),
}


class Clock:
    """Stands still, so that hints and failures lapse when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scrape:
    """What a Prometheus server reads from a collector, through its text format."""

    def __init__(self, collector: PrometheusCollector) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        self.text = generate_latest(registry).decode()
        self.families = {f.name: f for f in text_string_to_metric_families(self.text)}
        self.samples = [sample for f in self.families.values() for sample in f.samples]

    def value(self, name: str, **labels: str) -> float:
        """``from_`` stands for the label ``from``."""
        wanted = {key.rstrip("_"): value for key, value in labels.items()}
        found = [s.value for s in self.samples if s.name == name and s.labels == wanted]
        assert len(found) == 1, f"{name}{wanted} is there {len(found)} times"
        return found[0]

    def nonzero(self, name: str) -> dict[tuple[str, ...], float]:
        labels = LABELS.get(name, ())
        return {
            tuple(s.labels[label] for label in labels): s.value
            for s in self.samples
            if s.name == name and s.value
        }

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {(s.name, tuple(sorted(s.labels.items()))) for s in self.samples}


def source_of(ids: Iterable[str]) -> FakeSource:
    source = FakeSource()
    for seed, adapter_id in enumerate(ids):
        adapter = random_adapter(LAYOUT.base, rank=1, targets=("q_proj",), layers=(0,), seed=seed)
        source.put(adapter_id, *adapter)
    return source


def cache_of(ids: Iterable[str] = (), *, slots: int = 2, **options: Any) -> AdapterCache:
    options = {"source": source_of(ids), "host_bytes": 3 * BLOCK} | options
    return AdapterCache(
        LAYOUT,
        gpu_bytes=slots * PAGE,
        gpu_slots=slots,
        host_block_bytes=BLOCK,
        device=any_device(),
        **options,
    )


def use(cache: AdapterCache, *adapter_ids: str) -> None:
    for adapter_id in adapter_ids:
        with cache.acquire(adapter_id):
            pass


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


# What is there from the start.


def test_every_certain_series_is_there_before_anything_happens() -> None:
    scrape = Scrape(PrometheusCollector(cache_of()))
    found: dict[str, set[tuple[str, ...]]] = {}
    for sample in scrape.samples:
        if not sample.name.endswith("_bucket"):
            labels = LABELS.get(sample.name, ())
            assert set(sample.labels) == set(labels), sample
            found.setdefault(sample.name, set()).add(tuple(sample.labels[x] for x in labels))
    assert found == CERTAIN


def test_all_but_capacity_and_what_is_free_begins_at_zero() -> None:
    scrape = Scrape(PrometheusCollector(cache_of(slots=2, disk_bytes=1 << 20)))
    assert {(s.name, *s.labels.values()): s.value for s in scrape.samples if s.value} == {
        ("adaptercache_capacity_bytes", "gpu"): 2 * PAGE,
        ("adaptercache_capacity_bytes", "host"): 3 * BLOCK,
        ("adaptercache_capacity_bytes", "disk"): 1 << 20,
        ("adaptercache_pages", "free"): 2,
        ("adaptercache_slots", "free"): 2,
    }


def test_histograms_have_cumulative_buckets_up_to_infinity() -> None:
    cache = cache_of(["a", "b"])
    use(cache, "a", "b")
    scrape = Scrape(PrometheusCollector(cache))
    for name, labels in (
        ("adaptercache_load_seconds", {"from": "remote", "to": "disk"}),
        ("adaptercache_ready_seconds", {"from": "remote"}),
    ):
        buckets = [
            (float(s.labels["le"]), s.value)
            for s in scrape.samples
            if s.name == name + "_bucket" and labels.items() <= s.labels.items()
        ]
        bounds, counts = zip(*buckets, strict=True)
        assert list(bounds) == sorted(bounds)
        assert bounds[-1] == float("inf")
        assert list(counts) == sorted(counts)
        assert counts[-1] == scrape.value(name + "_count", **labels) == 2


def test_the_exposition_is_openmetrics_too() -> None:
    cache = cache_of(["a"])
    use(cache, "a")
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(cache, per_adapter=3, gateway_prefix="vllm:"))
    text = generate_openmetrics(registry).decode()
    families = {family.name for family in parse_openmetrics(text)}
    assert {"adaptercache_requests", "adaptercache_load_seconds"} <= families


# What was done is what is counted.


def test_hits_misses_loads_and_evictions_are_those_that_happened() -> None:
    cache = cache_of("abcd", slots=2)  # 2 on the GPU, 3 in CPU memory
    collector = PrometheusCollector(cache)
    use(cache, "a", "a", "b")  # a, b from the source; a hit
    use(cache, "c")  # evicts a from the GPU
    use(cache, "a")  # from CPU memory; evicts b from the GPU
    use(cache, "d")  # evicts c from the GPU, and b from CPU memory
    use(cache, "b")  # from disk; evicts a from the GPU, and c from CPU memory
    scrape = Scrape(collector)
    assert scrape.nonzero("adaptercache_requests_total") == {
        ("gpu", "hit"): 1,
        ("remote", "miss"): 4,
        ("host", "miss"): 1,
        ("disk", "miss"): 1,
    }
    assert scrape.nonzero("adaptercache_loads_total") == {
        ("remote", "disk", "ok"): 4,
        ("disk", "host", "ok"): 5,
        ("host", "gpu", "ok"): 6,
    }
    assert scrape.nonzero("adaptercache_load_seconds_count") == {
        ("remote", "disk"): 4,
        ("disk", "host"): 5,
        ("host", "gpu"): 6,
    }
    assert scrape.nonzero("adaptercache_ready_seconds_count") == {
        ("remote",): 4,
        ("host",): 1,
        ("disk",): 1,
    }
    assert scrape.nonzero("adaptercache_evictions_total") == {
        ("gpu", "room"): 4,
        ("host", "room"): 2,
    }
    assert scrape.nonzero("adaptercache_errors_total") == {}


def test_bytes_and_residency_are_those_of_the_adapters() -> None:
    cache = cache_of("abc", slots=2)
    use(cache, "a", "b", "c")
    scrape = Scrape(PrometheusCollector(cache))
    vector_bytes = 1024 * 4  # A [1, 32] and B [32, 1], each on 512 float32 of its own
    assert scrape.value("adaptercache_load_bytes_total", from_="disk", to="host") == (
        3 * vector_bytes
    )
    assert scrape.value("adaptercache_load_bytes_total", from_="host", to="gpu") == 3 * vector_bytes
    assert scrape.nonzero("adaptercache_resident_adapters") == {
        ("gpu",): 2,
        ("host",): 3,
        ("disk",): 3,
    }
    assert scrape.value("adaptercache_resident_bytes", tier="gpu") == 2 * PAGE
    assert scrape.value("adaptercache_resident_bytes", tier="host") == 3 * vector_bytes
    assert scrape.nonzero("adaptercache_pages") == {("adapter",): 2}
    assert scrape.nonzero("adaptercache_slots") == {("used",): 2}


def test_failures_are_counted_once_a_load_and_once_a_request() -> None:
    cache = cache_of("a", clock=Clock())
    collector = PrometheusCollector(cache)
    for _ in range(3):  # the second and third are answered from memory
        with pytest.raises(AdapterCacheError):
            use(cache, "nobody's")
    scrape = Scrape(collector)
    assert scrape.nonzero("adaptercache_requests_total") == {("none", "failed"): 3}
    assert scrape.nonzero("adaptercache_loads_total") == {("remote", "disk", "failed"): 1}
    assert scrape.nonzero("adaptercache_errors_total") == {("AdapterNotFound",): 1}
    assert scrape.nonzero("adaptercache_load_seconds_count") == {}


def test_a_prefetch_that_nobody_used_is_counted_when_it_is_evicted() -> None:
    clock = Clock()
    cache = cache_of("abc", slots=2, clock=clock)
    collector = PrometheusCollector(cache)
    cache.prefetch(["a"])
    wait_until(lambda: "a" in cache.resident(Tier.GPU))
    clock.now += 60  # the hint has lapsed
    use(cache, "b")
    assert Scrape(collector).value("adaptercache_prefetch_wasted_total") == 0
    use(cache, "c")
    scrape = Scrape(collector)
    assert scrape.value("adaptercache_prefetch_wasted_total") == 1
    assert scrape.nonzero("adaptercache_evictions_total") == {("gpu", "room"): 1}


def test_deferrals_are_counted_by_reason_and_leases_while_they_are_held() -> None:
    cache = cache_of("ab")
    collector = PrometheusCollector(cache)
    use(cache, "a", "b")
    waiting = [Request("1", "a"), Request("2", "b")]
    admission = cache.admit(waiting, max_adapters=1)
    scrape = Scrape(collector)
    assert scrape.nonzero("adaptercache_deferred_total") == {("max_adapters",): 1}
    assert scrape.value("adaptercache_leases") == 1
    for _, lease in admission.admitted:
        lease.release()
    assert Scrape(collector).value("adaptercache_leases") == 0


def test_loads_under_way_and_queued_are_seen() -> None:
    ids = [f"a{number}" for number in range(20)]
    source = FaultySource(source_of(ids))
    cache = cache_of(source=source, slots=2)
    source.gate.clear()
    try:
        leases = [cache.acquire(adapter_id) for adapter_id in ids]
        collector = PrometheusCollector(cache)
        wait_until(lambda: Scrape(collector).value("adaptercache_in_flight_loads") > 0)
        scrape = Scrape(collector)
        queued = scrape.value("adaptercache_queue_depth", hop="remote->disk")
        assert queued + scrape.value("adaptercache_in_flight_loads") == len(ids)
    finally:
        source.gate.set()
    for lease in leases:
        lease.release()


def test_a_closed_cache_can_still_be_scraped() -> None:
    cache = cache_of("a")
    collector = PrometheusCollector(cache, per_adapter=3, gateway_prefix="")
    use(cache, "a")
    cache.close()
    assert Scrape(collector).value("adaptercache_loads_total", from_="host", to="gpu", result="ok")


# How many series there are.


@pytest.mark.parametrize("option", [{}, {"gateway_prefix": "vllm:"}])
def test_there_are_as_many_series_with_500_adapters_as_with_5(option: dict[str, Any]) -> None:
    numbers = []
    for count in (5, 500):
        ids = [f"acme/adapter-{number}" for number in range(count)]
        with cache_of(ids, slots=count, host_bytes=2 * count * BLOCK) as cache:
            leases = [cache.acquire(adapter_id) for adapter_id in ids]
            for lease in leases:
                lease.result(timeout_s=WAIT_S).release()
            scrape = Scrape(PrometheusCollector(cache, **option))
            assert scrape.value("adaptercache_resident_adapters", tier="gpu") == count
            numbers.append(len(scrape.samples))
    assert numbers[0] == numbers[1]


def test_adapters_have_no_series_unless_asked_for() -> None:
    cache = cache_of("a")
    use(cache, "a")
    assert "adapter_resident" not in Scrape(PrometheusCollector(cache)).text


def test_adapters_have_series_in_each_tier_where_they_are_whole() -> None:
    cache = cache_of("abc", slots=2)
    use(cache, "a", "b", "c")
    scrape = Scrape(PrometheusCollector(cache, per_adapter=10))
    family = scrape.families["adaptercache_adapter_resident"]
    assert {(s.labels["adapter"], s.labels["tier"], s.value) for s in family.samples} == {
        *(("a", "host", 1), ("a", "disk", 1)),
        *(("b", "gpu", 1), ("b", "host", 1), ("b", "disk", 1)),
        *(("c", "gpu", 1), ("c", "host", 1), ("c", "disk", 1)),
    }


def test_the_cap_takes_adapters_on_the_gpu_first_and_those_that_leave_disappear() -> None:
    cache = cache_of("abc", slots=2)
    collector = PrometheusCollector(cache, per_adapter=2)

    def shown() -> set[str]:
        family = Scrape(collector).families["adaptercache_adapter_resident"]
        return {sample.labels["adapter"] for sample in family.samples}

    use(cache, "a", "b", "c")
    assert shown() == {"b", "c"}
    use(cache, "a")
    assert shown() == {"a", "c"}
    cache.remove("c")
    assert shown() == {"a", "b"}


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="per_adapter=-1"):
        PrometheusCollector(cache_of(), per_adapter=-1)


def test_ids_that_are_not_printable_text_break_no_scrape() -> None:
    ids = ["fine", "half a pair \ud800", "two\nlines"]
    cache = cache_of(ids, slots=3)
    use(cache, *ids)
    scrape = Scrape(PrometheusCollector(cache, per_adapter=10, gateway_prefix="vllm:"))
    family = scrape.families["adaptercache_adapter_resident"]
    assert {sample.labels["adapter"] for sample in family.samples} == {"fine"}
    assert 'running_lora_adapters="fine"' in scrape.text


# Registries.


def test_registering_scrapes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    monkeypatch.setattr(AdapterCache, "stats", lambda self: pytest.fail("it was scraped"))
    CollectorRegistry().register(PrometheusCollector(cache, per_adapter=1, gateway_prefix="vllm:"))


def test_what_is_described_is_what_is_collected() -> None:
    collector = PrometheusCollector(cache_of(), per_adapter=1, gateway_prefix="vllm:")
    described = [(f.name, f.type, f.documentation) for f in collector.describe()]
    assert described == [(f.name, f.type, f.documentation) for f in collector.collect()]
    assert not any(family.samples for family in collector.describe())


def test_two_caches_share_a_registry_under_two_namespaces() -> None:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(cache_of()))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(PrometheusCollector(cache_of()))
    registry.register(PrometheusCollector(cache_of(), namespace="draft_model"))
    text = generate_latest(registry).decode()
    assert "\nadaptercache_leases 0.0\n" in text
    assert "\ndraft_model_leases 0.0\n" in text


def test_a_scrape_reads_the_stats_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    reads = []
    stats = AdapterCache.stats
    monkeypatch.setattr(AdapterCache, "stats", lambda self: (reads.append(1), stats(self))[1])
    list(PrometheusCollector(cache, per_adapter=5, gateway_prefix="vllm:").collect())
    assert len(reads) == 1


# The gauge for gateways.


def gateway(collector: PrometheusCollector) -> tuple[str, str, str, float]:
    """Its one series: max_lora, running, waiting, value."""
    (sample,) = Scrape(collector).families["vllm:lora_requests_info"].samples
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    assert set(sample.labels) == set(names)
    max_lora, running, waiting = (sample.labels[name] for name in names)
    return max_lora, running, waiting, sample.value


def test_the_gauge_tells_the_adapters_on_the_gpu_and_only_one_series_at_a_time() -> None:
    cache = cache_of(["b", "a", "c"], slots=2)
    collector = PrometheusCollector(cache, gateway_prefix="vllm:")
    assert gateway(collector)[:3] == ("2", "", "")
    use(cache, "b", "a")
    assert gateway(collector)[:3] == ("2", "a,b", "")
    use(cache, "c")
    assert gateway(collector)[:3] == ("2", "a,c", "")


def test_the_gauge_tells_who_is_waited_for_but_not_who_is_there_already() -> None:
    source = FaultySource(source_of(["here", "asked", "z-queued", "a-queued", "hinted"]))
    cache = cache_of(source=source, slots=2)
    collector = PrometheusCollector(cache, gateway_prefix="vllm:")
    use(cache, "here")
    source.gate.clear()
    try:
        lease = cache.acquire("asked")
        waiting = [Request("1", "z-queued"), Request("2", "a-queued"), Request("3", "z-queued")]
        running = [(Request("0", None), cache.acquire(None))]
        cache.admit([*waiting, Request("4", "here")], running=running, max_adapters=0)
        cache.prefetch(["hinted"])
        assert gateway(collector)[:3] == ("2", "here", "a-queued,asked,z-queued")
        lease.release()
        cache.admit([])
        assert gateway(collector)[:3] == ("2", "here", "")
    finally:
        source.gate.set()


def test_the_gauge_has_the_time_of_the_scrape_for_its_value() -> None:
    before = time.time()
    value = gateway(PrometheusCollector(cache_of(), gateway_prefix="vllm:"))[3]
    assert before - 1 <= value <= time.time() + 1


def test_ids_that_a_reader_would_tear_apart_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = ["a,b", " blank", "sql v3"]
    cache = cache_of(ids, slots=3)
    use(cache, *ids)
    collector = PrometheusCollector(cache, gateway_prefix="vllm:")
    for _ in range(2):  # there is no room beside the one that can be listed
        assert gateway(collector)[:3] == ("1", "sql v3", "")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "gateways can't be told of adapter ids such as ' blank'"
    ]


def test_a_long_line_of_ids_keeps_the_gauge_short() -> None:
    source = FaultySource(source_of([]))
    cache = cache_of(source=source)
    collector = PrometheusCollector(cache, gateway_prefix="vllm:")
    source.gate.clear()
    try:
        cache.admit([Request(str(number), f"id-{number}") for number in range(5000)])
        waiting = gateway(collector)[2].split(",")
    finally:
        source.gate.set()
    assert "id-0" in waiting
    assert len(waiting) <= 256


# Beside traffic.


def test_scrapes_beside_loads_are_each_consistent_and_counters_only_rise() -> None:
    ids = [f"a{number}" for number in range(8)]
    cache = cache_of(ids, slots=3, host_bytes=5 * BLOCK)
    collector = PrometheusCollector(cache, per_adapter=4, gateway_prefix="vllm:")
    done = threading.Event()

    def traffic(offset: int) -> None:
        number = offset
        while not done.is_set():
            use(cache, ids[number % len(ids)])
            number += 3

    threads = [threading.Thread(target=traffic, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    try:
        before: dict[Any, float] = {}
        deadline = time.monotonic() + WAIT_S
        scrapes = 0
        loads = 0.0
        while scrapes < 40 or loads < 50:
            assert time.monotonic() < deadline, f"{loads} loads only"
            scrape = Scrape(collector)
            scrapes += 1
            assert len(scrape.series()) == len(scrape.samples), "a series stands there twice"
            pages = [s.value for s in scrape.samples if s.name == "adaptercache_pages"]
            assert sum(pages) == 3
            assert scrape.value("adaptercache_resident_adapters", tier="gpu") <= 3
            now = {
                (s.name, *sorted(s.labels.items())): s.value
                for family in scrape.families.values()
                if family.type in ("counter", "histogram")
                for s in family.samples
            }
            assert all(now[series] >= value for series, value in before.items())
            before = now
            loads = scrape.value("adaptercache_loads_total", from_="host", to="gpu", result="ok")
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_the_documentation_has_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    collector = PrometheusCollector(cache_of(), per_adapter=1, gateway_prefix="vllm:")
    for family in collector.describe():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name in text, f"{name} is not in docs/metrics.md"
