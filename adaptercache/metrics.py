"""What a cache counts, for Prometheus: read from `AdapterCache.stats` at each scrape.

Every series that is certain is there from the start, at 0, so that `rate()` sees the first
event. Their number doesn't depend on how many adapters there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, cast

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from adaptercache import errors
from adaptercache.cache import AdapterCache
from adaptercache.caps import CAP_REASONS
from adaptercache.gateways import GatewayGauges
from adaptercache.movers import Hop
from adaptercache.stats import Histogram, HistogramData, Stats, Tier

__all__ = ["PrometheusCollector"]

LOCAL_TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)
HOPS = tuple(hop.value for hop in Hop)
EVICTIONS = {
    Tier.GPU: ("room", "kv", "superseded", "dropped", "broken"),
    Tier.HOST: ("room", "superseded"),
    Tier.DISK: ("room", "superseded", "broken", "gone"),
}
ERRORS = (
    *(errors.AdapterNotFound, errors.AdapterInvalid, errors.AdapterUnsupported),
    *(errors.LoadFailed, errors.CapacityError, errors.CacheClosed),
)


class _Metric(NamedTuple):
    """A metric: the `Stats` field that it shows and is named after. ``certain`` are the keys of
    the series that are there even before `Stats` has them."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
    field: str
    labels: tuple[str, ...]
    text: str
    certain: Iterable[Any] = ()

    def empty(self, namespace: str) -> Metric:
        return self.kind(f"{namespace}_{self.field}", self.text, labels=self.labels)

    def filled(self, namespace: str, stats: Stats) -> Metric:
        family: Any = self.empty(namespace)
        found = getattr(stats, self.field)
        nothing = Histogram().snapshot() if self.kind is HistogramMetricFamily else 0
        series = dict.fromkeys(self.certain, nothing)
        series.update(found if isinstance(found, Mapping) else {(): found})
        for key, value in series.items():
            family.add_metric(_label_values(key), *_sample(value))
        return cast(Metric, family)


def _label_values(key: Any) -> list[str]:
    """The label values in a key of `Stats`: a tier or a string, or a tuple of them."""
    parts = key if isinstance(key, tuple) else (key,)
    return [part.value if isinstance(part, Tier) else part for part in parts]


def _sample(value: int | HistogramData) -> tuple[Any, ...]:
    """What ``add_metric`` takes: a number, or cumulative buckets and their sum."""
    if not isinstance(value, HistogramData):
        return (value,)
    bounds = (*map(floatToGoString, value.bounds), "+Inf")
    return list(zip(bounds, accumulate(value.counts), strict=True)), value.sum


COUNTERS = (
    _Metric(
        CounterMetricFamily,
        "requests",
        ("tier", "result"),
        "Requests admitted, leases served, and those that failed, by the tier where the adapter "
        "was when it was first asked for.",
        (
            *(("gpu", "hit"), ("host", "miss"), ("disk", "miss"), ("remote", "miss")),
            ("none", "failed"),
        ),
    ),
    _Metric(
        CounterMetricFamily,
        "loads",
        ("from", "to", "result"),
        "Loads from one tier to the next that have ended.",
        [(*hop, result) for hop in HOPS for result in ("ok", "failed")],
    ),
    _Metric(
        HistogramMetricFamily,
        "load_seconds",
        ("from", "to"),
        "Time that loads took on their thread, without the wait for one; failed ones left out.",
        HOPS,
    ),
    _Metric(
        HistogramMetricFamily,
        "ready_seconds",
        ("from",),
        "Time from the first wait for an adapter until it was leased, by the tier where it was.",
        [tier.value for tier in Tier],
    ),
    _Metric(
        CounterMetricFamily,
        "load_bytes",
        ("from", "to"),
        "Bytes that loads moved from one tier to the next.",
        HOPS,
    ),
    _Metric(
        CounterMetricFamily,
        "evictions",
        ("tier", "reason"),
        "Copies of adapters that a tier forgot, and why.",
        [(tier, reason) for tier, reasons in EVICTIONS.items() for reason in reasons],
    ),
    _Metric(
        CounterMetricFamily,
        "prefetch_wasted",
        (),
        "Prefetched copies that were evicted before anybody used them.",
    ),
    _Metric(
        CounterMetricFamily,
        "errors",
        ("type",),
        "Failed loads, by the exception that their requests get.",
        [error.__name__ for error in ERRORS],
    ),
    _Metric(
        CounterMetricFamily,
        "deferred",
        ("reason",),
        "Times that a request was told to wait: one for each request and call of admit.",
        ("loading", "room", "kv_pages", *sorted(CAP_REASONS), "max_tokens"),
    ),
)

GAUGES = tuple(
    _Metric(GaugeMetricFamily, field, labels, text)
    for field, labels, text in (
        ("resident_adapters", ("tier",), "Adapters whole in a tier, equal content counted once."),
        ("resident_bytes", ("tier",), "Bytes that adapters take in a tier, loading ones included."),
        (
            "capacity_bytes",
            ("tier",),
            "Budget of a tier; on the GPU the arena, which KV may share.",
        ),
        ("pages", ("state",), "Pages of the GPU's arena, by who has them."),
        ("slots", ("state",), "Slots for adapters on the GPU."),
        ("leases", (), "Holds on adapters on the GPU: leases, and batches being computed."),
        ("in_flight_loads", (), "Loads that a mover thread is on now."),
        ("queue_depth", ("hop",), "Loads that wait for a mover thread."),
    )
)

METRICS = COUNTERS + GAUGES


class PrometheusCollector(Collector):
    """Add it to a registry: ``REGISTRY.register(PrometheusCollector(cache))``.

    A scrape takes the cache's lock once for the counters, and once a tier or list that the
    options below ask for; it never waits for I/O. Thread-safe. Keeps the cache alive while it is
    in a registry, and may be scraped after the cache was closed.

    Args:
        cache: the cache to read.
        namespace: what the names begin with. Two caches of one process need two namespaces.
        per_adapter: at most so many adapters get series of their own,
            ``<namespace>_adapter_resident{adapter, tier}``: those on the GPU first, then those
            in the tiers below, by id. One that was evicted is gone from the next scrape. With
            ``gateway_prefix`` gateways are told of as many, one by one.
        gateway_prefix: also give the gauges that LoRA-aware gateways read, for example
            ``"vllm:"``; None: not. They are described in `gateways`.
        base_name: what requests call the model without an adapter, for these gauges.

    Ids that aren't printable text (`str.isprintable`) never become label values.

    Raises:
        ValueError: ``per_adapter`` is negative.
    """

    def __init__(
        self,
        cache: AdapterCache,
        *,
        namespace: str = "adaptercache",
        per_adapter: int = 0,
        gateway_prefix: str | None = None,
        base_name: str = "",
    ) -> None:
        if per_adapter < 0:
            raise ValueError(f"{per_adapter=} adapters can't have series of their own")
        self._cache = cache
        self._namespace = namespace
        self._per_adapter = per_adapter
        self._gateway: GatewayGauges | None = None
        if gateway_prefix is not None:
            self._gateway = GatewayGauges(cache, gateway_prefix, base_name, per_adapter)

    def describe(self) -> Iterator[Metric]:
        """The families without their series, so that registries know the names."""
        for metric in METRICS:
            yield metric.empty(self._namespace)
        if self._per_adapter:
            yield self._adapter_family()
        if self._gateway is not None:
            yield from self._gateway.describe()

    def collect(self) -> Iterator[Metric]:
        """The families as they stand now."""
        stats = self._cache.stats()
        for metric in METRICS:
            yield metric.filled(self._namespace, stats)
        if self._per_adapter:
            yield self._adapters()
        if self._gateway is not None:
            yield from self._gateway.collect()

    def _adapter_family(self) -> GaugeMetricFamily:
        name = f"{self._namespace}_adapter_resident"
        text = "1 for each tier where an adapter is whole; a capped choice of adapters."
        return GaugeMetricFamily(name, text, labels=("adapter", "tier"))

    def _adapters(self) -> GaugeMetricFamily:
        family = self._adapter_family()
        resident = {tier: self._cache.resident(tier) for tier in LOCAL_TIERS}
        top_down = chain.from_iterable(
            sorted(filter(str.isprintable, adapter_ids)) for adapter_ids in resident.values()
        )
        for adapter_id in islice(dict.fromkeys(top_down), self._per_adapter):
            for tier, adapter_ids in resident.items():
                if adapter_id in adapter_ids:
                    family.add_metric([adapter_id, tier.value], 1)
        return family
