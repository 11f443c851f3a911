"""How gateways read an instance's ``/metrics`` and score it for a request's adapter: the rules of
Kubernetes' Gateway API Inference Extension and of llm-d's router, written anew from what they
document and do (August and September 2026), as an oracle for our gauges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

__all__ = [
    "Instance",
    "affinity",
    "affinity_by_union",
    "kept_by_affinity",
    "kept_by_residency",
    "kv_score",
    "load_state",
    "queue_scores",
    "read",
]


@dataclass
class Instance:
    """What a gateway keeps of an instance."""

    active: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    most: int = 0
    queue: int = 0
    running: int = 0
    kv_usage: float = 0.0
    block_size: int = 0
    num_blocks: int = 0
    level_of: dict[str, str] | None = None
    """Adapters by where they are; None: residency isn't told."""
    pinned: set[str] = field(default_factory=set)
    num_on_gpu: int = 0
    base_name: str = ""
    errors: list[str] = field(default_factory=list)
    """Gauges that every engine must have, and this one has not."""


def read(text: str) -> Instance:
    """Read an exposition as they do."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = Instance()
    for name, put in (
        ("vllm:num_requests_waiting", lambda value: setattr(found, "queue", int(value))),
        ("vllm:num_requests_running", lambda value: setattr(found, "running", int(value))),
        ("vllm:kv_cache_usage_perc", lambda value: setattr(found, "kv_usage", value)),
    ):
        if families.get(name) and families[name].samples:
            put(families[name].samples[0].value)
        else:
            found.errors.append(name)
    _read_lists(found, families)
    config = families.get("vllm:cache_config_info")
    if config and config.samples:
        labels = config.samples[0].labels
        found.block_size, found.num_blocks = (
            int(labels["block_size"]),
            int(labels["num_gpu_blocks"]),
        )
    else:
        found.errors.append("vllm:cache_config_info")
    _read_residency(found, families)
    return found


def _read_lists(found: Instance, families: Mapping[str, Metric]) -> None:
    """Of several series the newest counts: the one with the greatest value."""
    family = families.get("vllm:lora_requests_info")
    newest, labels = -1.0, None
    for sample in family.samples if family else ():
        if sample.value > newest:
            newest, labels = sample.value, sample.labels
    if labels is None:
        return
    found.active = _split(labels.get("running_lora_adapters", ""))
    found.waiting = _split(labels.get("waiting_lora_adapters", ""))
    found.most = int(labels["max_lora"])


def _split(text: str) -> set[str]:
    return {part.strip() for part in text.split(",")} - {""}


def _read_residency(found: Instance, families: Mapping[str, Metric]) -> None:
    """Either gauge says that residency is told. A series at 0 is no series, and of an adapter's
    several the GPU's counts. The number of slots, where told, goes before the label's."""
    loaded = families.get("vllm:lora_adapter_loaded")
    counts = families.get("vllm:num_gpu_loaded_lora_adapters")
    if loaded or counts:
        found.level_of = {}
    for sample in loaded.samples if loaded else ():
        name, level = sample.labels.get("adapter_name", ""), sample.labels["level"]
        assert level in ("gpu", "cpu"), f"{level} is not in the protocol"
        if sample.value and name:
            assert found.level_of is not None
            if level == "gpu" or name not in found.level_of:
                found.level_of[name] = level
            if sample.labels["pinned"] == "true":
                found.pinned.add(name)
    for sample in counts.samples if counts else ():
        found.num_on_gpu = max(found.num_on_gpu, int(sample.value))
        found.base_name = sample.labels["model_name"]
    slots = families.get("vllm:max_gpu_lora_adapters")
    if slots and slots.samples:
        found.most = max(int(sample.value) for sample in slots.samples)


# lora-affinity-scorer.


def affinity(instance: Instance, adapter: str) -> float:
    """GIE to 1.5, llm-d to August 2026: what is in both lists counts twice."""
    return _affinity(instance, adapter, len(instance.active) + len(instance.waiting))


def affinity_by_union(instance: Instance, adapter: str) -> float:
    """llm-d since."""
    return _affinity(instance, adapter, len(instance.active | instance.waiting))


def _affinity(instance: Instance, adapter: str, count: int) -> float:
    if adapter in instance.active:
        return 1.0
    if count < instance.most:
        return 0.8
    return 0.6 if adapter in instance.waiting else 0.0


def kept_by_affinity(fleet: Mapping[str, Instance], adapter: str, chance: float = 0.0) -> set[str]:
    """GIE 0.5's lora-affinity-filter: instances that have the adapter or wait for it, and one time
    in a thousand (``chance`` 0.999 and more) those with room instead. None of both: nobody."""
    near, roomy = set(), set()
    for name, instance in fleet.items():
        if adapter in instance.active | instance.waiting:
            near.add(name)
        elif len(instance.active) + len(instance.waiting) < instance.most:
            roomy.add(name)
    if near and roomy:
        return near if chance < 0.999 else roomy
    return near or roomy


# The residency gauges' readers (proposed for llm-d, September 2026).


def load_state(instance: Instance, adapter: str) -> str:
    """lora-load-state-scorer's tier, best first: gpu, cpu, free, evictable, saturated."""
    level = (instance.level_of or {}).get(adapter)
    if level is not None:
        return level
    if instance.num_on_gpu < instance.most:
        return "free"
    for other, level in (instance.level_of or {}).items():
        if level == "gpu" and other not in instance.pinned and other not in instance.active:
            return "evictable"
    return "saturated"


def kept_by_residency(fleet: Mapping[str, Instance], adapter: str) -> set[str]:
    """lora-residency-filter: homes while one of them has room, else a new home."""
    homes = {n for n, i in fleet.items() if (i.level_of or {}).get(adapter) == "gpu"}
    if not homes:
        return set(fleet)
    roomy = {n for n, i in fleet.items() if i.queue <= 8 and i.kv_usage <= 0.8}
    if homes & roomy:
        return homes
    warm = {n for n in roomy if (fleet[n].level_of or {}).get(adapter) == "cpu"}
    return warm or roomy or homes


# What they weigh affinity against.


def queue_scores(fleet: Sequence[Instance]) -> list[float]:
    """queue-scorer: 1 for the shortest queue, 0 for the longest."""
    low = min((instance.queue for instance in fleet), default=inf)
    high = max((instance.queue for instance in fleet), default=-inf)
    if low == high:
        return [1.0] * len(fleet)
    return [(high - instance.queue) / (high - low) for instance in fleet]


def kv_score(instance: Instance) -> float:
    """kv-cache-utilization-scorer."""
    return 1 - instance.kv_usage
