"""What a run has seen: a frame a step, how long requests waited, and the summary of it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adaptercache import Stats, Tier
from churn_check import Checker

__all__ = ["TIERS", "Frame", "Record", "Seen", "summarise", "table"]

TIERS = ("gpu", "host", "disk", "remote")


class Seen(NamedTuple):
    """A request that asked for an adapter, at its arrival: when, and the tier that had it."""

    at_s: float
    tier: str


class Frame(NamedTuple):
    """The cache after a step."""

    at_s: float
    gpu_adapters: int
    host_adapters: int
    adapter_pages: int
    kv_pages: int
    idle_kv_pages: int
    free_pages: int
    gpu_evictions: int
    host_evictions: int
    running: int
    waiting: int

    @classmethod
    def of(cls, at_s: float, stats: Stats, idle_kv: int, running: int, waiting: int) -> Frame:
        return cls(
            at_s,
            stats.resident_adapters[Tier.GPU],
            stats.resident_adapters[Tier.HOST],
            stats.pages["adapter"],
            stats.pages["kv"] - idle_kv,
            idle_kv,
            stats.pages["free"],
            evictions(stats, Tier.GPU),
            evictions(stats, Tier.HOST),
            running,
            waiting,
        )


@dataclass
class Record:
    """Everything that the summary and the report are made of."""

    seen: list[Seen] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    ready_s: dict[str, list[float]] = field(default_factory=dict)  # by the tier found in
    step_s: list[float] = field(default_factory=list)
    admit_s: list[float] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # adapter id or request → error
    requests_failed: int = 0
    served: int = 0
    tokens: int = 0
    kv_pages_returned: int = 0
    kv_blocks_damaged: int = 0
    wall_s: float = 0.0


def evictions(stats: Stats, tier: Tier) -> int:
    """All evictions from a tier, whatever the reason."""
    return sum(count for (where, _), count in stats.evictions.items() if where is tier)


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that a share ``q`` of them is not above; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def quantiles_ms(values: Sequence[float]) -> dict[str, float]:
    return {f"p{round(q * 100)}": round(1e3 * quantile(values, q), 3) for q in (0.5, 0.99)}


def summarise(record: Record, stats: Stats, checker: Checker) -> dict[str, Any]:
    """The run in numbers, ready for JSON."""
    found = Counter(seen.tier for seen in record.seen)
    evicted: dict[str, dict[str, int]] = {}
    for (tier, reason), count in sorted(stats.evictions.items(), key=str):
        evicted.setdefault(tier.value, {})[reason] = count
    every_ready = [s for values in record.ready_s.values() for s in values]
    return {
        "requests": {"served": record.served, "failed": record.requests_failed},
        "found_in": {tier: found[tier] for tier in TIERS},
        "hit_rate": {tier: found[tier] / max(1, len(record.seen)) for tier in TIERS},
        "loads": _loads(stats),
        "evictions": evicted,
        "deferrals": dict(stats.deferred),
        "prefetch_wasted": stats.prefetch_wasted,
        "ready_ms": {
            "all": quantiles_ms(every_ready),
            **{
                tier: quantiles_ms(record.ready_s[tier]) for tier in TIERS if tier in record.ready_s
            },
        },
        "pages_at_peak": _pages_at_peak(record.frames),
        "kv": {"returned": record.kv_pages_returned, "damaged": record.kv_blocks_damaged},
        "throughput": {
            "wall_s": round(record.wall_s, 2),
            "steps": len(record.step_s),
            "requests_per_s": round(record.served / max(record.wall_s, 1e-9), 1),
            "tokens_per_s": round(record.tokens / max(record.wall_s, 1e-9), 1),
            "step_ms": quantiles_ms(record.step_s),
            "admit_ms": quantiles_ms(record.admit_s),
        },
        "check": {
            "rows": checker.rows,
            "rms": checker.rms,
            "largest": checker.largest,
            "limits": checker.limits,
            "unchecked": sorted(checker.unchecked),
        },
        "failed_adapters": record.failed,
    }


def _pages_at_peak(frames: Sequence[Frame]) -> dict[str, int]:
    """When the fewest pages were free, and of these moments the one with most KV."""
    peak = min(frames, key=lambda f: (f.free_pages, -f.kv_pages), default=None)
    fields = ("adapter_pages", "kv_pages", "idle_kv_pages", "free_pages")
    return {name.removesuffix("_pages"): getattr(peak, name, 0) for name in fields}


def _loads(stats: Stats) -> dict[str, dict[str, int]]:
    hops: dict[str, dict[str, int]] = {}
    for source, to in zip(("remote", "disk", "host"), ("disk", "host", "gpu"), strict=True):
        hop = (Tier(source), Tier(to))
        hops[f"{source} -> {to}"] = {
            "loads": stats.loads.get((*hop, "ok"), 0),
            "failed": stats.loads.get((*hop, "failed"), 0),
            "bytes": stats.load_bytes.get(hop, 0),
        }
    return hops


def table(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as rows of a label and a text."""
    served, kv, rate = summary["requests"], summary["kv"], summary["throughput"]
    speed = f"{rate['requests_per_s']:.1f} requests/s, {rate['tokens_per_s']:.0f} tokens/s"
    admit_ms, step_ms = rate["admit_ms"]["p50"], rate["step_ms"]["p50"]
    return [
        ("requests", f"{served['served']} served, {served['failed']} failed"),
        ("adapter found in", _shares(summary["hit_rate"])),
        *_moved(summary),
        ("deferrals", _counts(summary["deferrals"]) or "none"),
        *(
            (f"time to ready, {tier}", f"p50 {ms['p50']:.1f} ms, p99 {ms['p99']:.1f} ms")
            for tier, ms in summary["ready_ms"].items()
        ),
        ("pages at peak", _counts(summary["pages_at_peak"])),
        ("KV pages", f"{kv['returned']} idle ones given back, {kv['damaged']} damaged"),
        ("throughput", f"{speed}, {rate['steps']} steps in {rate['wall_s']:.1f} s"),
        ("step, admit in it", f"p50 {step_ms:.1f} ms, {admit_ms:.2f} ms"),
        *_checked(summary["check"]),
        ("requests drawn", summary["workload"]),
        ("decisions", summary["decisions"] or "not repeatable in real time"),
        *(
            (f"refused {name}", error if len(error) <= 120 else f"{error[:119]}…")
            for name, error in sorted(summary["failed_adapters"].items())
        ),
    ]


def _moved(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for hop, load in summary["loads"].items():
        failures = f", {load['failed']} failed" if load["failed"] else ""
        yield f"loads {hop}", f"{load['loads']}, {load['bytes'] / 2**20:.1f} MiB{failures}"
    for tier in TIERS[:3]:
        by_reason = summary["evictions"].get(tier, {})
        why = f" ({_counts(by_reason)})" if by_reason else ""
        yield f"evictions from {tier}", f"{sum(by_reason.values())}{why}"


def _checked(check: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "rows checked", str(check["rows"])
    for name, limit in zip(("rms", "largest"), check["limits"], strict=True):
        yield f"error, {name}", f"{check[name]:.2e} of {limit:.0e} allowed"
    if check["unchecked"]:
        yield "not checked", f"{', '.join(check['unchecked'])}: names other than PEFT's plain ones"


def _shares(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items())


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())
