"""What gateways that choose an instance by adapter read, in the names that vLLM gave it.

Two families of gauges, for the two ways in which gateways score an instance:

- ``lora_requests_info``: one series, whose labels list the adapters on the GPU and those waited
  for. While ``max_lora`` is above the number of both, the instance has room for another.
- ``lora_adapter_loaded``, ``num_gpu_loaded_lora_adapters``, ``max_gpu_lora_adapters``: a series an
  adapter, with the tier it is in. Only where a number of adapters is allowed series of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric

from adaptercache.cache import AdapterCache
from adaptercache.ledger import Ledger
from adaptercache.snapshot import resident_ids
from adaptercache.stats import Tier

__all__ = ["GatewayGauges"]

log = logging.getLogger("adaptercache.metrics")

LEVELS = {Tier.GPU: "gpu", Tier.HOST: "cpu"}  # others are not known to gateways


class _Seen(NamedTuple):
    """What a scrape takes from the ledger."""

    resident: dict[Tier, frozenset[str]]
    waiting: frozenset[str]  # not on the GPU, and waited for
    coming: frozenset[str]  # of these: already have their place on the GPU
    leased: frozenset[str]
    room: int  # adapters of the usual size that still fit, without an eviction


class GatewayGauges:
    """The gauges of one cache. Thread-safe.

    Args:
        cache: the cache to read.
        prefix: what the names begin with: ``"vllm:"``.
        base_name: the model's name without an adapter.
        per_adapter: at most so many adapters get series of their own, those on the GPU first;
            0: the second family isn't there.
    """

    def __init__(self, cache: AdapterCache, prefix: str, base_name: str, per_adapter: int) -> None:
        self._cache = cache
        self._prefix = prefix
        self._base_name = base_name
        self._per_adapter = per_adapter
        self._has_warned = False

    def describe(self) -> Iterator[Metric]:
        """The families without their series."""
        yield self._info()
        if self._per_adapter:
            yield from (self._loaded(), self._num_loaded(), self._most())

    def collect(self) -> Iterator[Metric]:
        """The families as they stand now."""
        with self._cache._deciding.lock:
            seen = _look(self._cache._ledger, tuple(LEVELS) if self._per_adapter else (Tier.GPU,))
        running = self._listable(seen.resident[Tier.GPU])
        waiting = self._listable(seen.waiting)
        # Readers compare it with the number of adapters in both lists. What is coming has its
        # place; the others that wait will take theirs out of the room.
        most = len(running) + len(seen.coming.intersection(waiting)) + seen.room
        info = self._info()
        info.add_metric([str(most), ",".join(running), ",".join(waiting)], time.time())
        yield info
        if self._per_adapter:
            num_loaded, most_gauge = self._num_loaded(), self._most()
            num_loaded.add_metric([self._base_name], len(running))
            most_gauge.add_metric([self._base_name], most)
            yield from (self._filled(seen), num_loaded, most_gauge)

    def _filled(self, seen: _Seen) -> GaugeMetricFamily:
        family = self._loaded()
        level_of = {
            adapter_id: level
            for tier, level in reversed(LEVELS.items())  # the top tier has the last word
            for adapter_id in self._listable(seen.resident[tier])
        }
        top_down = sorted(level_of, key=lambda each: (level_of[each] != "gpu", each))
        for adapter_id in islice(top_down, self._per_adapter):
            pinned = str(adapter_id in seen.leased).lower()
            family.add_metric([adapter_id, level_of[adapter_id], pinned], 1)
        return family

    def _info(self) -> GaugeMetricFamily:
        return self._family(
            "lora_requests_info",
            "Adapters on the GPU, and adapters waited for; the value is the time of the scrape.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )

    def _loaded(self) -> GaugeMetricFamily:
        return self._family(
            "lora_adapter_loaded",
            "1 for each adapter on the GPU, or in CPU memory alone; a capped choice of adapters.",
            ("adapter_name", "level", "pinned"),
        )

    def _num_loaded(self) -> GaugeMetricFamily:
        text = "Adapters on the GPU, each id counted."
        return self._family("num_gpu_loaded_lora_adapters", text, ("model_name",))

    def _most(self) -> GaugeMetricFamily:
        text = "Adapters on the GPU, and how many more would fit now."
        return self._family("max_gpu_lora_adapters", text, ("model_name",))

    def _family(self, name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}{name}", text, labels=labels)

    def _listable(self, adapter_ids: Collection[str]) -> list[str]:
        """Those that readers, who split at commas and trim, read back as they are."""
        listable = sorted(filter(_is_listable, adapter_ids))
        others = [] if self._has_warned else sorted(set(adapter_ids).difference(listable))
        if others:
            self._has_warned = True
            log.warning("gateways can't be told of adapter ids such as %r", others[0])
        return listable


def _look(ledger: Ledger, tiers: tuple[Tier, ...]) -> _Seen:
    """Call with the cache's lock held: some hundred ids, and those in CPU memory if asked for."""
    gpu, known = ledger.gpu, ledger.catalog.get
    resident = {tier: resident_ids(ledger, tier) for tier in tiers}
    waiting = frozenset(ledger.waiting.order()) - resident[Tier.GPU]
    coming = {each for each in waiting if (it := known(each)) and gpu.get(it.digest) is not None}
    leased = (ledger.catalog.ids_of(copy.digest) for copy in gpu if copy.leases)
    # Pages may run out before slots do: what is free is counted in adapters of the mean size.
    mean = -(-gpu.used // len(gpu)) if len(gpu) else 1
    pages = max(0, gpu.adapter_room(ledger.waiting.kv_pages))
    room = min(gpu.slots.num_free, pages // mean)
    return _Seen(resident, waiting, frozenset(coming), frozenset().union(*leased), room)


def _is_listable(adapter_id: str) -> bool:
    is_plain = adapter_id.isprintable() and "," not in adapter_id
    return is_plain and adapter_id == adapter_id.strip() != ""
