"""Draw latency over load as an SVG: TTFT and the gaps between tokens, p50 and p99, on a logarithmic scale."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LINES = (
    ("TTFT p50", "ttft_ms", "p50", "#1f77b4"),
    ("TTFT p99", "ttft_ms", "p99", "#aec7e8"),
    ("gap p50", "gap_ms", "p50", "#d62728"),
    ("gap p99", "gap_ms", "p99", "#ff9896"),
)


def plot(rows: Sequence[Mapping[str, Any]], path: Path, x_axis: str = "arrivals per second") -> None:
    """`rows` have `load`, and `ttft_ms` and `gap_ms` with `p50` and `p99`."""
    most = max(row["load"] for row in rows) * 1.05
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 380" font-family="sans-serif" font-size="12">']
    for ms in (1, 10, 100, 1000, 10000):
        parts.append(
            f'<path d="M60 {_y(ms):.1f}H620" stroke="#ddd"/><text x="52" y="{_y(ms) + 4:.1f}" text-anchor="end">{ms} ms</text>'
        )
    for number, (label, kind, percentile, colour) in enumerate(_LINES):
        points = " ".join(f"{_x(row['load'], most):.1f},{_y(row[kind][percentile]):.1f}" for row in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="630" y="{40 + 20 * number}" fill="{colour}">{label}</text>')
    for row in rows:
        parts.append(f'<text x="{_x(row["load"], most):.1f}" y="358" text-anchor="middle">{row["load"]:.3g}</text>')
    parts.append(f'<text x="340" y="376" text-anchor="middle">{x_axis}</text></svg>')
    path.write_text("\n".join(parts))


def _x(load: float, most: float) -> float:
    return 60 + 560 * load / most


def _y(ms: float) -> float:
    return 340 - 75 * math.log10(max(ms, 1.0))
