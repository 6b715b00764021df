"""Charts as SVG: curves over steps, scores with intervals, histograms, bars on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from saccade.report.html import Html

Points = list[tuple[float, float]]
"""(step, value), ordered by step."""

MAX_POINTS = 400
"""Maximum points of a curve; more are averaged."""
_COLOURS = ("#3568d4", "#d9622b", "#2d9d5c", "#a24bc4", "#c8a11c", "#d1446f", "#2aa3b8", "#7a7f87")

CHART_STYLE = "\n".join(
    [
        "svg text { fill: var(--soft, #5d656e); font: 11px sans-serif; } .label { text-anchor: end; }",
        ".tick { text-anchor: middle; } .grid { stroke: var(--line, #8884); }",
        ".mark { stroke: var(--soft); stroke-dasharray: 4 3; } .interval { stroke: currentColor; stroke-width: 3; }",
        "polyline { fill: none; stroke: currentColor; stroke-width: 1.6; } circle, rect { fill: currentColor; }",
        "i { background: currentColor; } .pale { color: var(--line); }",
        *(f".c{number} {{ color: {colour}; }}" for number, colour in enumerate(_COLOURS)),
    ]
)
"""Style sheet of the charts. `.c0` to `.c7` are the colours of curves and bars."""


def colour_class(number: int) -> str:
    """The class of the colour of a curve or bar."""
    return f"c{number % len(_COLOURS)}"


def figure(title: str, svg: str, legend: str = "") -> Html:
    """A chart with its title above it and its legend below it, both HTML."""
    return Html(f"<figure><figcaption>{escape(title)}</figcaption>{svg}{legend}</figure>")


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> Html:
    opening = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return Html(f"{opening}{''.join(parts)}</svg>")


def svg_file(svg: str) -> str:
    """A chart's SVG with its style sheet and name space, as a file of its own."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {svg.removeprefix("<svg ").partition(">")[0]}>'
    return f"{opening}<style>{CHART_STYLE}</style>{svg.partition('>')[2]}"


def _label(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _grid(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>'


def short_number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


# ------------------------------------------------------------------ curves


def line_chart(
    title: str,
    curves: Mapping[str, Points],
    *,
    marks: Sequence[tuple[float, str]] = (),
    show: Callable[[float], str] = short_number,
    show_step: Callable[[float], str] = short_number,
) -> Html:
    """Curves over steps, with the last value of each in the legend. `marks` are steps with a name, drawn as lines."""
    svg = curves_svg(title, curves, marks=marks, show=show, show_step=show_step)
    legend = ""
    for number, (name, points) in enumerate(curves.items()):
        last = escape(show(_thinned(points)[-1][1]))
        legend += f'<span><i class="{colour_class(number)}"></i>{escape(name.split("/", 1)[-1])} {last}</span>'
    return figure(title, svg, f"<p>{legend}</p>")


def curves_svg(
    title: str,
    curves: Mapping[str, Points],
    *,
    marks: Sequence[tuple[float, str]] = (),
    show: Callable[[float], str] = short_number,
    show_step: Callable[[float], str] = short_number,
    has_names: bool = False,
) -> Html:
    """Curves over steps as SVG without a figure. `has_names` writes the name of each curve above them."""
    curves = {name: _thinned(points) for name, points in curves.items()}
    width, height, left, right, top, bottom = 520, 210, 58, 508, 12, 184
    steps = [step for points in curves.values() for step, _ in points]
    values = [value for points in curves.values() for _, value in points]
    x_ticks, y_ticks = ticks(min(steps), max(steps)), ticks(min(values), max(values))
    (x_low, x_high), (y_low, y_high) = _span(x_ticks, steps), _span(y_ticks, values)

    def x(step: float) -> float:
        return round(left + (step - x_low) / (x_high - x_low) * (right - left), 1)

    def y(value: float) -> float:
        return round(bottom - (value - y_low) / (y_high - y_low) * (bottom - top), 1)

    parts = [_grid(left, right, y(tick), y(tick)) for tick in y_ticks]
    parts += [_label("label", left - 6, y(tick) + 4, show(tick)) for tick in y_ticks]
    parts += [_label("tick", x(tick), height - 8, show_step(tick)) for tick in x_ticks]
    for step, name in marks:
        if x_low < step < x_high:
            line = f'<line class="mark" x1="{x(step)}" x2="{x(step)}" y1="{top}" y2="{bottom}">'
            parts.append(f"{line}<title>{escape(name)}</title></line>")
    for number, (name, points) in enumerate(curves.items()):
        kind, last = colour_class(number), points[-1]
        shape, where = "circle", f'cx="{x(last[0])}" cy="{y(last[1])}" r="2.5"'
        if len(points) > 1:
            coordinates = " ".join(f"{x(step)},{y(value)}" for step, value in points)
            shape, where = "polyline", f'points="{coordinates}"'
        parts.append(f'<{shape} class="{kind}" {where}><title>{escape(name)}</title></{shape}>')
    if has_names:
        parts += _names(left, list(curves))
    return _svg(title, width, height, parts)


def _names(left: float, names: Sequence[str]) -> list[str]:
    """A legend in the picture: colours and names in one line."""
    parts = []
    for number, name in enumerate(names):
        parts += [_bar(left + 110 * number, 2, 10, 10, colour_class(number))]
        parts += [_label("", left + 14 + 110 * number, 12, name)]
    return parts


def _thinned(points: Points) -> Points:
    """Average neighbours down to MAX_POINTS."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers within [low, high]; one for an empty range."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _span(marked: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """A range that contains all ticks and values and is never empty."""
    low, high = min(*marked, *values, math.inf), max(*marked, *values, -math.inf)
    margin = (high - low) * 0.04 or max(abs(low) * 0.1, 1e-12)
    return low - margin, high + margin


# ------------------------------------------------------------------ intervals and histograms


def interval_chart(title: str, rows: Sequence[tuple[str, float, float, float]]) -> Html:
    """A dot with its interval for every (label, value, low, high)."""
    width, left, right, row_height = 640, 190, 620, 22
    low, high = min(row[2] for row in rows), max(row[3] for row in rows)
    low, high = min(0.0, low), high if high > low else low + 1.0

    def x(value: float) -> float:
        return round(left + (value - low) / (high - low) * (right - left), 1)

    parts = [_grid(x(low), x(low), 4, row_height * len(rows) + 4)]
    for number, (label, value, start, end) in enumerate(rows):
        y, kind = row_height * number + row_height // 2 + 4, colour_class(number)
        parts.append(_label("label", left - 8, y + 4, label))
        parts.append(f'<line class="interval {kind}" x1="{x(start)}" x2="{x(end)}" y1="{y}" y2="{y}"/>')
        tooltip = f"<title>{value:.4f} [{start:.4f}, {end:.4f}]</title>"
        parts.append(f'<circle class="{kind}" cx="{x(value)}" cy="{y}" r="4">{tooltip}</circle>')
    height = row_height * len(rows) + 24
    parts += [_label("tick", x(tick), height - 4, short_number(tick)) for tick in (low, (low + high) / 2, high)]
    return figure(title, _svg(title, width, height, parts))


def histogram(title: str, values: Sequence[float], num_bins: int = 20) -> Html:
    """How often values occur."""
    counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=num_bins)
    width, height, left, right = 640, 130, 40, 620
    most, bin_width = max(1, int(counts.max())), (right - left) / num_bins
    parts = []
    for number, count in enumerate(counts.tolist()):
        size = round((height - 30) * count / most, 1)
        tooltip = f"<title>{edges[number]:.3g} to {edges[number + 1]:.3g}: {count}</title>"
        parts.append(_bar(left + number * bin_width, height - 20 - size, bin_width - 1, size, "c0", tooltip))
    ends = ((left, edges[0]), ((left + right) / 2, (edges[0] + edges[-1]) / 2), (right, edges[-1]))
    parts += [_label("tick", x, height - 4, short_number(value)) for x, value in ends]
    parts.append(_label("tick", 20, 16, str(most)))
    return figure(title, _svg(title, width, height, parts))


def stacked_bars(layers: Sequence[tuple[Sequence[float], str]], height: int = 100) -> Html:
    """Bars of several series over each other, scaled to the largest value: a picture without axes, as HTML.

    `layers` are (values, class of the colour), the first one drawn first.
    """
    most = max([1.0, *(value for values, _ in layers for value in values)])
    parts = [
        _bar(10 * number, height - height * value / most, 9, height * value / most, kind)
        for values, kind in layers
        for number, value in enumerate(values)
    ]
    return _svg("", 10 * max(len(values) for values, _ in layers), height, parts)


def share_bar(shares: Sequence[tuple[float, str]]) -> Html:
    """A horizontal bar of parts (share of the width, class of the colour)."""
    parts, x = [], 0.0
    for share, kind in shares:
        parts.append(_bar(x, 0, 1000 * share, 40, kind))
        x += 1000 * share
    return _svg("", 1000, 40, parts)


def _bar(x: float, y: float, width: float, height: float, kind: str, content: str = "") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {where}>{content}</rect>'


# ------------------------------------------------------------------ timeline


class Span(NamedTuple):
    """An interval of a lane of a timeline."""

    start: float
    end: float
    tooltip: str


def timeline_chart(
    title: str, lanes: Mapping[str, Sequence[Span]], *, show: Callable[[float], str] = short_number
) -> Html:
    """Lanes over a common axis of time that begins at 0, one colour each."""
    width, left, right, row_height = 1080, 90, 1070, 34
    end = max((span.end for spans in lanes.values() for span in spans), default=1.0)
    height = row_height * len(lanes) + 30

    def x(time: float) -> float:
        return left + time / end * (right - left)

    parts = [
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="0" y2="{height - 22}"/>'
        for tick in ticks(0, end)
    ]
    parts += [_label("tick", x(tick), height - 6, show(tick)) for tick in ticks(0, end)]
    for number, (name, spans) in enumerate(lanes.items()):
        y = row_height * number + 4
        parts.append(_label("label", left - 8, y + row_height / 2, name))
        parts += [
            _bar(x(start), y, max(0.3, x(stop) - x(start) - 0.2), row_height - 8, colour_class(number), content)
            for start, stop, content in ((one.start, one.end, f"<title>{escape(one.tooltip)}</title>") for one in spans)
        ]
    return figure(title, _svg(title, width, height, parts))


# ------------------------------------------------------------------ bars


class LogBar(NamedTuple):
    """A horizontal bar on a logarithmic axis."""

    label: str
    tooltip: str
    value: float
    series: int
    """Index into the legend."""


def log_bar_chart(title: str, bars: Sequence[LogBar], legend: Sequence[str]) -> Html:
    """Bars on a logarithmic axis, as SVG without a figure."""
    left, right, row_height = 300, 770, 14
    positive = [bar.value for bar in bars if bar.value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    low = max(low, high - 8)

    def x(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / max(1, high - low)
        return round(left + share * (right - left), 1)

    height = row_height * len(bars) + 46
    parts = []
    for tick in range(low, high + 1):
        parts += [_grid(x(10.0**tick), x(10.0**tick), 18, height - 22)]
        parts += [_label("tick", x(10.0**tick), height - 8, f"1e{tick}")]
    parts += _names(left, legend)
    for number, bar in enumerate(bars):
        y, tooltip = 20 + row_height * number, f"<title>{escape(bar.tooltip)}</title>"
        parts += [_label("label", left - 6, y + 10, bar.label)]
        width = max(1.0, x(bar.value) - left)
        parts += [_bar(left, y + 2, width, row_height - 4, colour_class(bar.series), tooltip)]
    return _svg(title, right + 20, height, parts)
