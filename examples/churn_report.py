"""The report: one HTML file with everything in it, for light and dark screens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from churn_charts import Mark, Series, area_chart, line_chart
from churn_record import TIERS, Record, table

__all__ = ["write_report"]

WINDOW = 60  # requests that a hit rate is taken over
TIER_NAMES = {"gpu": "GPU", "host": "CPU memory", "disk": "disk", "remote": "source"}

# Label, colour, and the field of a frame.
PAGES = (
    ("adapters", "gpu", "adapter_pages"),
    ("KV, running", "kv", "kv_pages"),
    ("KV, idle", "idle", "idle_kv_pages"),
    ("free", "free", "free_pages"),
)
LINES = (
    (
        "Adapters resident",
        "whole copies in each tier",
        (("GPU", "gpu", "gpu_adapters"), ("CPU memory", "host", "host_adapters")),
    ),
    (
        "Evictions",
        "since the start; pages are taken for other adapters and for KV",
        (("from the GPU", "gpu", "gpu_evictions"), ("from CPU memory", "host", "host_evictions")),
    ),
    (
        "Requests",
        "in the batch, and in the queue after each step",
        (("running", "kv", "running"), ("waiting", "disk", "waiting")),
    ),
)

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #16191d; --soft: #5d6570;
  --line: #dfe3e8; --good: #15803d; --bad: #b91c1c; --gpu: #2563eb; --host: #0d9488;
  --disk: #d97706; --remote: #be3455; --kv: #7c3aed; --idle: #c4b0f5; --free: #e4e7eb;
  --base: #8a929c; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #181c22; --text: #e8eaed;
  --soft: #9aa3ae; --line: #2c323a; --good: #4ade80; --bad: #f87171; --gpu: #5b9bf8;
  --host: #2cb5a5; --disk: #e09a2e; --remote: #ee6b87; --kv: #9d76f0; --idle: #57459a;
  --free: #2a3038; --base: #8a929c; } }
* { box-sizing: border-box; margin: 0; }
body { background: var(--page); color: var(--text); padding: 32px 20px 48px;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: auto; }
h1 { font-size: 26px; letter-spacing: -.01em; }
h2 { font-size: 15px; }
p { color: var(--soft); }
.verdict { font-weight: 600; color: var(--good); }
.verdict.bad { color: var(--bad); }
.tiles, .charts { display: grid; gap: 16px; margin-top: 20px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.tiles div, figure, section { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 14px 16px; }
.tiles b { display: block; font-size: 22px; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tiles span, figure p, .legend, td:first-child { color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 6px 0; min-height: 20px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  background: var(--c); margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.y { text-anchor: end; } .x { text-anchor: middle; }
.grid { stroke: var(--line); stroke-width: 1; opacity: .8; }
.mark { stroke: var(--text); stroke-width: 1.2; stroke-dasharray: 2 4; opacity: .6; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.band { fill: var(--c); stroke: var(--card); stroke-width: .75; }
section { margin-top: 16px; overflow-x: auto; }
table { border-collapse: collapse; margin-top: 6px; width: 100%;
  font-variant-numeric: tabular-nums; }
td { padding: 3px 0; vertical-align: top; border-top: 1px solid var(--line); }
td:first-child { width: 230px; padding-right: 24px; }
"""


def write_report(
    path: Path,
    summary: Mapping[str, Any],
    record: Record,
    changes: Sequence[tuple[float, str]],
) -> None:
    """Write the page.

    Args:
        path: of the file, which is replaced.
        summary, record: of the run.
        changes: when popularity changed, and how.
    """
    complaints = summary["complaints"]
    verdict = "; ".join(complaints) or (
        f"{summary['check']['rows']:,} sampled rows equal those computed from the adapters' own "
        "files, within rounding."
    )
    charts = "".join(_charts(record, [Mark(*change) for change in changes]))
    rows = "".join(
        f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>"
        for label, text in table(summary)
    )
    path.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>adaptercache: adapter churn</title><style>{STYLE}</style></head>
<body><main>
<h1>Adapter churn</h1>
<p>{escape(summary["setting"])}</p>
<p class="verdict{" bad" if complaints else ""}">{escape(verdict)}</p>
<div class="tiles">{_tiles(summary)}</div>
<div class="charts">{charts}</div>
<section><h2>Summary</h2><table>{rows}</table></section>
{_failed(summary["failed_adapters"])}
</main></body></html>
""",
        encoding="utf-8",
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    ready, evicted = summary["ready_ms"]["all"], summary["evictions"]
    moved = summary["loads"]["host -> gpu"]["bytes"]
    tiles = [
        (f"{summary['requests']['served']:,}", "requests served"),
        (f"{summary['hit_rate']['gpu']:.0%}", "found on the GPU at arrival"),
        (f"{ready['p50']:.0f} / {ready['p99']:.0f} ms", "time to ready, p50 / p99"),
        (f"{moved / 2**20:,.0f} MiB", "copied to the GPU"),
        (
            " / ".join(f"{sum(evicted.get(tier, {}).values()):,}" for tier in ("gpu", "host")),
            "evictions, GPU / CPU memory",
        ),
        (f"{summary['check']['largest']:.1e}", "largest error"),
    ]
    return "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in tiles)


def _charts(record: Record, marks: Sequence[Mark]) -> list[str]:
    if not record.frames or not record.seen:
        return []
    hit_rates = area_chart(
        "Where adapters were when their requests came",
        _hit_rates(record),
        note=f"share of the last {WINDOW} requests; seconds of the workload; "
        "dotted: popularity changes",
        y_text=lambda share: f"{share:.0%}",
        marks=marks,
    )
    ready = line_chart(
        "Time to ready",
        _ready(record),
        note="share of requests admitted within a time, by where the adapter was at arrival",
        x_text=_duration,
        y_text=lambda share: f"{share:.0%}",
        y_max=1.0,
        is_log=True,
    )
    pages = area_chart(
        "Pages of the GPU arena",
        [_over_time(record, *band) for band in PAGES],
        note="adapters and KV share them",
        marks=marks,
    )
    lines = [
        line_chart(title, [_over_time(record, *line) for line in lines], note=note, marks=marks)
        for title, note, lines in LINES
    ]
    return [hit_rates, ready, pages, *lines]


def _over_time(record: Record, label: str, color: str, field: str) -> Series:
    return Series(label, color, [(f.at_s, float(getattr(f, field))) for f in record.frames])


def _hit_rates(record: Record) -> list[Series]:
    seen = record.seen
    ends = range(min(len(seen), WINDOW), len(seen) + 1, max(1, len(seen) // 400))
    windows = [
        (seen[end - 1].at_s, [s.tier for s in seen[max(0, end - WINDOW) : end]]) for end in ends
    ]
    return [
        Series(TIER_NAMES[tier], tier, [(at, w.count(tier) / len(w)) for at, w in windows])
        for tier in TIERS
    ]


def _ready(record: Record) -> list[Series]:
    """Cumulative distributions, in seconds from 10 µs up."""
    series = []
    for tier in (*TIERS, "base model"):
        waits = sorted(max(1e-5, wait) for wait in record.ready_s.get(tier, ()))
        points = [(wait, (n + 1) / len(waits)) for n, wait in enumerate(waits)]
        series.append(Series(TIER_NAMES.get(tier, tier), tier.split()[0], points))
    return series


def _duration(seconds: float) -> str:
    if seconds < 0.9e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9 else f"{seconds:.0f} s"


def _failed(failed: Mapping[str, str]) -> str:
    if not failed:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(error)}</td></tr>"
        for name, error in sorted(failed.items())
    )
    return f"<section><h2>Adapters that were refused</h2><table>{rows}</table></section>"
