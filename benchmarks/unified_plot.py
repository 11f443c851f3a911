"""Groups of bars as an SVG picture, drawn by hand: no plotting library is needed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

WIDTH, HEIGHT, TOP, LEFT, BOTTOM = 900, 360, 56, 54, 46
COLOURS = ("#0b7285", "#ced4da", "#adb5bd", "#868e96")


def bars(groups: Mapping[str, Mapping[str, int]]) -> str:
    """Each group's bars as shares of its highest."""
    names = list(next(iter(groups.values())))
    each = (WIDTH - LEFT - 10) / len(groups)
    bar = each * 0.8 / len(names)
    floor, full = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">Requests served in the same time, '
        "as a share of the most at each point</text>",
    ]
    for index, name in enumerate(names):
        x = LEFT + index * 150
        parts.append(f'<rect x="{x}" y="28" width="11" height="11" fill="{COLOURS[index]}"/>')
        parts.append(f'<text x="{x + 16}" y="38">{escape(name)}</text>')
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = floor - full * tick
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dee2e6"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:.0%}</text>'
        )
    for place, (group, values) in enumerate(groups.items()):
        start, most = LEFT + each * (place + 0.1), max(values.values())
        for index, value in enumerate(values.values()):
            high = full * value / most
            parts.append(
                f'<rect x="{start + index * bar:.1f}" y="{floor - high:.1f}" '
                f'width="{bar - 2:.1f}" height="{high:.1f}" fill="{COLOURS[index]}">'
                f"<title>{value}</title></rect>"
            )
        for line, text in enumerate(group.split(", ")):
            middle, below = start + bar * len(values) / 2, floor + 16 + 14 * line
            parts.append(
                f'<text x="{middle:.0f}" y="{below}" text-anchor="middle">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])
