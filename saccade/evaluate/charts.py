"""Charts as SVG text for the report page: scores with their intervals, histograms. Colours are CSS classes of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

_WIDTH, _LEFT, _RIGHT, _ROW = 640, 190, 620, 22


def interval_chart(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """A dot with its interval for every (label, value, low, high)."""
    low, high = min(row[2] for row in rows), max(row[3] for row in rows)
    low, high = min(0.0, low), high if high > low else low + 1.0

    def x(value: float) -> float:
        return round(_LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT), 1)

    parts = [f'<line class=axis x1="{x(low)}" x2="{x(low)}" y1="4" y2="{_ROW * len(rows) + 4}"/>']
    for number, (label, value, start, end) in enumerate(rows):
        y = _ROW * number + _ROW // 2 + 4
        parts.append(f'<text class=label x="{_LEFT - 8}" y="{y + 4}">{escape(label)}</text>')
        parts.append(f'<line class="bar c{number % 4}" x1="{x(start)}" x2="{x(end)}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot c{number % 4}" cx="{x(value)}" cy="{y}" r="4"><title>{value:.4f} [{start:.4f}, {end:.4f}]</title></circle>')  # fmt: skip
    height = _ROW * len(rows) + 24
    parts += [
        f'<text class=tick x="{x(tick)}" y="{height - 4}">{tick:.3g}</text>' for tick in (low, (low + high) / 2, high)
    ]
    return _figure(title, height, parts)


def histogram(title: str, values: Sequence[float], num_bins: int = 20) -> str:
    """How often values occur."""
    counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=num_bins)
    most, height = max(1, int(counts.max())), 130
    width = (_RIGHT - 40) / num_bins
    parts = []
    for number, count in enumerate(counts.tolist()):
        size = round((height - 30) * count / most, 1)
        where = f'x="{40 + number * width:.1f}" y="{height - 20 - size}" width="{width - 1:.1f}" height="{size}"'
        parts.append(
            f"<rect class=c0 {where}><title>{edges[number]:.3g} to {edges[number + 1]:.3g}: {count}</title></rect>"
        )
    ticks = ((40, edges[0]), (40 + (_RIGHT - 40) / 2, (edges[0] + edges[-1]) / 2), (_RIGHT, edges[-1]))
    parts += [f'<text class=tick x="{x:.1f}" y="{height - 4}">{value:.3g}</text>' for x, value in ticks]
    parts.append(f'<text class=tick x="20" y="16">{most}</text>')
    return _figure(title, height, parts)


def _figure(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role=img aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )
