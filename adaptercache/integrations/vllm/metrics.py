"""What the disk tier counts, and what vLLM has loaded of it, on vLLM's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adaptercache.integrations.vllm.serving import Serving
from adaptercache.metrics import METRICS
from adaptercache.stats import Tier

__all__ = ["ServingCollector"]

_SERIES: dict[str, list[Any] | None] = {
    "requests": [("disk", "hit"), ("remote", "miss"), ("none", "failed")],
    "loads": [(Tier.REMOTE, Tier.DISK, result) for result in ("ok", "failed")],
    "load_seconds": [(Tier.REMOTE, Tier.DISK)],
    "ready_seconds": ["disk", "remote"],
    "load_bytes": [(Tier.REMOTE, Tier.DISK)],
    "evictions": [(Tier.DISK, "room")],
    "errors": None,
    "resident_adapters": [],
    "resident_bytes": [],
    "capacity_bytes": [],
    "leases": [],
    "in_flight_loads": [],
}
"""The metrics of a cache that are of its disk tier, and the series that are there from the start;
None: those that a cache has."""


class ServingCollector(Collector):
    """For vLLM's registry. A scrape reads two small files. Thread-safe."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def describe(self) -> Iterator[Metric]:
        """The families without their series."""
        for metric in METRICS:
            if metric.field in _SERIES:
                yield metric.empty("adaptercache")
        yield from _of_vllm()

    def collect(self) -> Iterator[Metric]:
        """The families as they stand now."""
        stats = self._serving.files.stats()
        for metric in METRICS:
            if metric.field in _SERIES:
                certain = _SERIES[metric.field]
                chosen = metric if certain is None else metric._replace(certain=certain)
                yield chosen.filled("adaptercache", stats)
        loaded, unloaded = _of_vllm()
        loaded.add_metric([], self._serving.num_loaded)
        for reason, count in self._serving.unloaded.items():
            unloaded.add_metric([reason], count)
        yield from (loaded, unloaded)


def _of_vllm() -> tuple[GaugeMetricFamily, CounterMetricFamily]:
    return (
        GaugeMetricFamily(
            "adaptercache_vllm_loaded_adapters", "Adapters that vLLM knows by name through us."
        ),
        CounterMetricFamily(
            "adaptercache_vllm_unloaded",
            "Adapters unloaded from vLLM, and why.",
            labels=("reason",),
        ),
    )
