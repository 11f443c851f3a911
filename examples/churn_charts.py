"""Line and area charts as inline SVG: no scripts, no files beside the page, colours from CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Mark", "Series", "area_chart", "line_chart"]

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 28
MAX_POINTS = 320


class Series(NamedTuple):
    """A line or a band; ``color`` names a CSS variable. Points are in order of x."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A moment in time at which something changed."""

    x: float
    label: str


class Axis(NamedTuple):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, about five."""
        if self.is_log:
            decades = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**decade for decade in decades]
        rough = (self.high - self.low) / 5 or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def plain(value: float) -> str:
    """A number for an axis."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    x_text: Callable[[float], str] = plain,
    y_text: Callable[[float], str] = plain,
    y_max: float | None = None,
    is_log: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """Lines over one x axis, which is logarithmic with ``is_log``."""
    series = [s._replace(points=_thin(s.points)) for s in series if s.points]
    top = y_max or max((y for s in series for _, y in s.points), default=1.0) * 1.05
    x_axis, y_axis = _axes(series, top, is_log)
    lines = [
        f'<path class="line" style="--c:var(--{s.color})" d="M{_path(s.points, x_axis, y_axis)}">'
        f"<title>{escape(s.label)}</title></path>"
        for s in series
    ]
    body = _frame(x_axis, y_axis, x_text, y_text, marks) + "".join(lines)
    return _figure(title, note, series, body)


def area_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    x_text: Callable[[float], str] = plain,
    y_text: Callable[[float], str] = plain,
    marks: Sequence[Mark] = (),
) -> str:
    """Bands on top of each other, the first at the bottom; all have the same xs."""
    series = [s._replace(points=_thin(s.points)) for s in series]
    xs = [x for x, _ in series[0].points]
    floor = [0.0] * len(xs)
    bands: list[str] = []
    x_axis, y_axis = _axes(series, max(map(sum, zip(*map(_ys, series), strict=True)), default=1.0))
    for s in series:
        ceiling = [low + y for low, (_, y) in zip(floor, s.points, strict=True)]
        outline = [*zip(xs, ceiling, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        bands.append(
            f'<path class="band" style="--c:var(--{s.color})" '
            f'd="M{_path(outline, x_axis, y_axis)}Z"><title>{escape(s.label)}</title></path>'
        )
        floor = ceiling
    body = "".join(bands) + _frame(x_axis, y_axis, x_text, y_text, marks)
    return _figure(title, note, series, body)


def _ys(series: Series) -> list[float]:
    return [y for _, y in series.points]


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = max(1, math.ceil(len(points) / MAX_POINTS))
    return [*points[::step], *points[-1:]]


def _axes(series: Sequence[Series], top: float, is_log: bool = False) -> tuple[Axis, Axis]:
    xs = [x for s in series for x, _ in s.points] or [1.0]
    x_axis = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, is_log)
    return x_axis, Axis(0.0, top or 1.0, HEIGHT - BOTTOM, TOP)


def _path(points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    return "L".join(f"{x_axis(x):.1f} {y_axis(y):.1f}" for x, y in points)


def _frame(
    x_axis: Axis,
    y_axis: Axis,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    marks: Sequence[Mark],
) -> str:
    """Grid, ticks, and the moments that are marked."""
    parts = []
    for value in y_axis.ticks():
        y = f"{y_axis(value):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy=".32em" class="y">{y_text(value)}</text>')
    for value in x_axis.ticks():
        x = f"{x_axis(value):.1f}"
        parts.append(f'<text x="{x}" y="{HEIGHT - 9}" class="x">{x_text(value)}</text>')
    for mark in marks:
        if x_axis.low <= mark.x <= x_axis.high:
            line = f'<path class="mark" d="M{x_axis(mark.x):.1f} {TOP}V{HEIGHT - BOTTOM}">'
            parts.append(f"{line}<title>{escape(mark.label)}</title></path>")
    return "".join(parts)


def _figure(title: str, note: str, series: Sequence[Series], body: str) -> str:
    legend = "".join(
        f'<span><i style="--c:var(--{s.color})"></i>{escape(s.label)}</span>' for s in series
    )
    return (
        f"<figure><figcaption><h2>{escape(title)}</h2><p>{escape(note)}</p>"
        f'<div class="legend">{legend}</div></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
        "</figure>"
    )
