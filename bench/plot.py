"""Plots as SVG, written as text: bars with their spread, and lines over a logarithmic axis."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 760
SUBJECT = "#2b6cb0"
PEERS = ("#a0aec0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#b7791f", "#4a5568")


class Bar(NamedTuple):
    """One bar: the median, from the lowest to the highest."""

    group: str
    label: str
    middle: float
    low: float
    high: float


def bars(title: str, drawn: Sequence[Bar]) -> str:
    """Draw horizontal bars, grouped; what is written in bold is the subject, and has a colour of its own."""
    left, right, step = 300, 90, 20
    largest = max(bar.high for bar in drawn) or 1.0
    parts, y, group, peers = [_text(8, 20, title, size=14)], 34, "", dict[str, str]()

    def x(value: float) -> float:
        return left + value / largest * (WIDTH - left - right)

    for bar in drawn:
        if bar.group != group:
            group = bar.group
            parts.append(_text(8, y + 20, group, weight="bold"))
            y += 8 if len(group) < 28 else 8 + step
        label, subject = re.sub(r"[*`\\]", "", bar.label), "**" in bar.label
        colour = SUBJECT if subject else peers.setdefault(bar.label, PEERS[len(peers) % len(PEERS)])
        parts.append(_text(left - 6, y + 12, label, anchor="end", weight="bold" if subject else "normal"))
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{x(bar.middle) - left:.1f}" height="13" fill="{colour}"/>')
        parts.append(_line(x(bar.low), y + 8, x(bar.high), y + 8, "#1a202c"))
        parts.append(_text(x(bar.high) + 5, y + 12, short(bar.middle)))
        y += step
    return _svg(y + 12, parts)


def lines(title: str, across: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw values over a logarithmic axis, from 0."""
    left, right, top, height = 60, 150, 40, 320
    xs = [point[0] for points in series.values() for point in points]
    largest = 1.1 * max(point[1] for points in series.values() for point in points) or 1.0
    low, high = math.log10(max(min(xs), 0.5)), math.log10(max(xs))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        share = (math.log10(max(point[0], 0.5)) - low) / ((high - low) or 1)
        return left + share * (WIDTH - left - right), top + (1 - point[1] / largest) * (height - top - 40)

    bottom = at((1, 0))[1]
    parts = [_text(8, 20, title, size=14), _line(left, bottom, WIDTH - right, bottom, "#718096")]
    for value in sorted(set(xs)):
        parts.append(_text(at((value, 0))[0], bottom + 16, short(value), anchor="middle"))
    parts.append(_text((left + WIDTH - right) / 2, bottom + 34, across, anchor="middle"))
    for share in (0.25, 0.5, 0.75, 1.0):
        y = at((1, share * largest))[1]
        parts += [_line(left, y, WIDTH - right, y, "#e2e8f0"), _text(left - 6, y + 4, short(share * largest), "end")]
    ends: list[float] = []
    for i, (name, points) in enumerate(series.items()):
        colour, placed = (SUBJECT, *PEERS[1:])[i % len(PEERS)], [at(point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        y = placed[-1][1] + 4
        while any(abs(y - other) < 14 for other in ends):
            y += 14
        ends.append(y)
        parts.append(_text(WIDTH - right + 8, y, name, fill=colour))
    return _svg(height, parts)


def short(value: float) -> str:
    """Return a figure with three digits and a unit of thousands."""
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    for size, sign in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{sign}"
    return f"{value:.3g}"


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 12, weight: str = "normal", fill: str = "#1a202c"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}">{escape(text)}</text>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" stroke-width="1.5"/>'


def _svg(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>', *parts, "</svg>\n"])
