"""Bars as SVG pictures, drawn by hand: no plotting library is needed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["bars"]

WIDTH, ROW, TOP, LEFT, RIGHT = 900, 15, 52, 250, 80
COLOURS = ("#0b7285", "#e8590c", "#868e96", "#ced4da", "#5f3dc4")


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Lying bars, from 0 on one scale: of each group one a name.

    Args:
        groups: values by name, by group; a group may lack names.
    """
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    most = max((value for values in groups.values() for value in values.values()), default=0) or 1
    height = TOP + sum(ROW * len(values) + 10 for values in groups.values()) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="14">{escape(title)} ({escape(unit)})</text>',
    ]
    x = LEFT
    for index, name in enumerate(names):
        parts.append(f'<rect x="{x}" y="28" width="11" height="11" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{x + 16}" y="38">{escape(name)}</text>')
        x += 32 + 7 * len(name)
    y = TOP
    for group, values in groups.items():
        middle = y + ROW * len(values) / 2 + 4
        parts.append(
            f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(group)}</text>'
        )
        for name, value in values.items():
            length = (WIDTH - LEFT - RIGHT) * value / most
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 3}" '
                f'fill="{_colour(names.index(name))}"/>'
                f'<text x="{LEFT + length + 5:.1f}" y="{y + 10}">{number(value)}</text>'
            )
            y += ROW
        y += 10
    return "\n".join([*parts, "</svg>", ""])


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def number(value: float) -> str:
    """Three digits, or all of what lies before the point."""
    if value != value or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
