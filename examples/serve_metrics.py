"""The engine's own numbers for ``/metrics``, beside the cache's.

Those that begin with ``vllm:`` are for gateways (Kubernetes' Gateway API Inference Extension,
llm-d), which know an engine by these names. With the cache's ``vllm:lora_requests_info`` they have
all that they choose an instance by.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adaptercache.metrics import PrometheusCollector
from serve_engine import Engine

__all__ = ["registry_of"]


def registry_of(engine: Engine, base_name: str) -> CollectorRegistry:
    """All that ``/metrics`` shows. Call it before there are requests."""
    cache = engine.cache
    slots = sum(cache.stats().slots.values())
    registry = CollectorRegistry()
    # Gateways hear of all that is on the GPU, and of some that are in CPU memory.
    collector = PrometheusCollector(
        cache, gateway_prefix="vllm:", base_name=base_name, per_adapter=2 * slots
    )
    registry.register(collector)
    registry.register(EngineCollector(engine))
    registry.register(GatewayCollector(engine))
    return registry


class EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily("serve_running", "Requests in a step.", engine.num_running)
        yield GaugeMetricFamily("serve_waiting", "Requests that wait.", engine.num_waiting)
        yield GaugeMetricFamily("serve_idle_blocks", "Cached prefixes.", engine.blocks.num_idle)
        for name, text in (
            ("steps", "Steps computed."),
            ("generated_tokens", "Tokens sent."),
            ("prefix_hit_tokens", "Tokens that the prefix cache had."),
            ("preempted", "Requests put back for lack of KV pages."),
            ("aborted", "Requests whose client went away."),
        ):
            yield CounterMetricFamily(f"serve_{name}", text, engine.counts[name])


class GatewayCollector(Collector):
    """What gateways ask of every engine, with or without adapters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        pages = engine.cache.pages
        self._num_blocks = pages.num_used + pages.num_available  # nobody has any yet
        self._block_size = engine.cache.kv_view(0).shape[2]

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        waiting, running = engine.num_waiting, engine.num_running
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", waiting)
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests in a step.", running)
        yield GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Share of the KV blocks that new requests can't have, 0 to 1.",
            self._kv_usage(),
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "How the KV cache is cut, in labels.",
            labels=("block_size", "num_gpu_blocks"),
        )
        config.add_metric([str(self._block_size), str(self._num_blocks)], 1)
        yield config

    def _kv_usage(self) -> float:
        """Blocks in use, and what leased adapters take of their room. Cold adapters and prefixes
        that nobody uses count as free: they make way."""
        free = self._engine.cache.pages.num_available + self._engine.blocks.num_idle
        return min(1.0, max(0.0, 1 - free / self._num_blocks))
