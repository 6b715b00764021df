"""Report of a run as one self-contained HTML page: curves, sample generations, skipped steps, config.

    write_report(run)        # reads metrics.jsonl, evaluations/, samples.jsonl, skipped_steps.jsonl, config.toml; writes report.html

No scripts and no requests: curves are SVG, images are data URLs, and a content security policy forbids the rest. All text is escaped.
The section of a missing file is omitted. A line of samples.jsonl: step, prompt, output, and optionally reference and image (a
data URL).
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from saccade.train.metrics import duration, thousands
from saccade.train.trackers import flat_numbers, read_records

Points = list[tuple[float, float]]
"""(step, value), ordered by step."""

MAX_POINTS = 400
"""Maximum points of a curve; more are averaged."""
MAX_ROWS = 200
"""Maximum number of skipped steps and samples shown, newest last."""
_WIDTH, _HEIGHT = 520, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 508, 12, 184
"""Size of a chart, and the frame of its curves."""
_DATA_URL = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*")


def _number(value: float) -> str:
    return thousands(value) if value >= 1000.0 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value * 100.0:.3g}%"


class Chart(NamedTuple):
    """A chart of the metrics whose names match."""

    title: str
    names: str
    """A regular expression for the full name of a metric."""
    show: Callable[[float], str] = _number


CHARTS = (
    Chart("Loss", r"loss"),
    Chart("Loss by source", r"source_loss/.*"),
    Chart("Validation loss", r"validation/loss"),
    Chart("Validation accuracy and exact match", r"validation/(accuracy|exact_match)", _percent),
    Chart("Gradient norm", r"grad_norm"),
    Chart("Learning rate", r"lr/.*"),
    Chart("Tokens per second", r"(text|image)_tokens_per_s"),
    Chart("Model FLOPs utilisation, with and without the vision tower", r"mfu(_decoder)?", _percent),
    Chart("Fraction of time waiting for data", r"data_wait", _percent),
    Chart("Device memory, GiB", r"memory_gib"),
    Chart("Time of a step, ms", r"ms"),
)
_NOT_DRAWN = r"tokens|samples|eta_s|skipped"
"""Metrics that are not drawn."""


def write_report(run: Path) -> Path:
    """Write `report.html` into the run folder; returns its path."""
    records = list(read_records(run / "metrics.jsonl"))
    sections = (
        _summary(records),
        _curves(records),
        _evaluations(run),
        _samples(list(read_records(run / "samples.jsonl"))),
        _skipped(list(read_records(run / "skipped_steps.jsonl"))),
        _settings(run / "config.toml"),
    )
    title = escape(run.resolve().name)
    fresh = run / ".report.html.new"
    fresh.write_text(f"{_HEAD}<title>{title}</title><h1>{title}</h1>\n" + "\n".join(sections), encoding="utf-8")
    return fresh.replace(run / "report.html")


# ------------------------------------------------------------------ sections


def _summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Final values of the run."""
    last: dict[str, float] = {}
    for record in records:
        last |= flat_numbers(record)
    facts = {
        "steps": f"{max((record['step'] for record in records), default=0):,}",
        "tokens": f"{int(last.get('tokens', 0)):,}",
        "samples": f"{int(last.get('samples', 0)):,}",
        "last loss": _number(last["loss"]) if "loss" in last else "-",
        "time in steps": duration(_seconds(records)),
    }
    return (
        "<dl>"
        + "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
        + "</dl>"
    )


def _seconds(records: Sequence[Mapping[str, Any]]) -> float:
    """Total time of all timed steps."""
    total, before = 0.0, 0
    for record in records:
        if "ms" in record:
            total += (record["step"] - before) * (record["ms"] or 0.0) / 1e3
            before = record["step"]
    return total


def _curves(records: Sequence[Mapping[str, Any]]) -> str:
    """The known charts in order, then one for every other family of metrics."""
    series: dict[str, Points] = {}
    for record in records:
        for name, value in flat_numbers(record).items():
            series.setdefault(name, []).append((record["step"], value))
    stages = [(record["step"], record["stage"]) for record in records if isinstance(record.get("stage"), str)]
    marks = [(step, name) for (_, before), (step, name) in pairwise(stages) if name != before]
    known = "|".join([*(chart.names for chart in CHARTS), _NOT_DRAWN])
    others = dict.fromkeys(name.split("/")[0] for name in series if not re.fullmatch(known, name))
    drawn = [*CHARTS, *(Chart(family, rf"{re.escape(family)}(/.*)?") for family in others)]
    figures = []
    for chart in drawn:
        curves = {name: _thinned(points) for name, points in series.items() if re.fullmatch(chart.names, name)}
        if curves:
            figures.append(_figure(chart, curves, marks))
    return f"<section class=charts>{''.join(figures)}</section>"


def _evaluations(run: Path) -> str:
    """Scores of the exported checkpoints: a chart of each task's first metric, and all scores with links to their reports."""
    curves: dict[str, dict[str, Points]] = {}
    rows: list[Sequence[object]] = []
    for path in sorted(run.glob("evaluations/step-*/scores.json")):
        step = int(path.parent.name.removeprefix("step-"))
        link = _Html(f'<a href="evaluations/{escape(path.parent.name)}/report.html">{step:,}</a>')
        for task, scores in json.loads(path.read_text(encoding="utf-8")).get("tasks", {}).items():
            for number, (metric, score) in enumerate(scores["metrics"].items()):
                if number == 0:
                    curves.setdefault(task, {}).setdefault(metric, []).append((step, score["value"]))
                interval = f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
                rows.append((link, task, metric, interval, scores["num_examples"]))
    figures = [
        _figure(Chart(f"Evaluation: {task}, {metric}", ""), {metric: points}, [])
        for task, metrics in curves.items()
        for metric, points in metrics.items()
    ]
    charts = f"<section class=charts>{''.join(figures)}</section>" if figures else ""
    return charts + _table("Evaluations of exported checkpoints", ("step", "task", "metric", "score", "examples"), rows)


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            sample["step"],
            _image(sample.get("image")),
            sample.get("prompt"),
            sample.get("output"),
            sample.get("reference"),
        )
        for sample in samples[-MAX_ROWS:]
    ]
    return _table("Sample generations", ("step", "image", "prompt", "output", "reference"), rows)


def _skipped(steps: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            step["step"],
            step.get("reason"),
            step.get("action"),
            step.get("loss"),
            step.get("grad_norm"),
            ", ".join(str(name) for row in step.get("micro_batches", []) for name in row.get("samples", [])[:4])[:400],
        )
        for step in steps[-MAX_ROWS:]
    ]
    return _table("Skipped steps", ("step", "reason", "action", "loss", "gradient norm", "samples"), rows)


def _settings(path: Path) -> str:
    """The resolved config as dotted keys."""
    if not path.exists():
        return ""

    def flat(tree: object, name: str) -> Iterable[tuple[str, object]]:
        if isinstance(tree, dict):
            for key, value in tree.items():
                yield from flat(value, f"{name}.{key}" if name else key)
        elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
            for number, item in enumerate(tree):
                yield from flat(item, f"{name}[{number}]")
        else:
            yield name, tree

    return _table("Settings", ("key", "value"), list(flat(tomllib.loads(path.read_text(encoding="utf-8")), "")))


class _Html(str):
    """Text that is already HTML."""


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a heading; empty without rows. Cells are escaped unless they are HTML."""
    if not rows:
        return ""

    def cell(value: object) -> str:
        return value if isinstance(value, _Html) else escape("" if value is None else str(value))

    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<h2>{title}</h2><div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _image(url: object) -> _Html | None:
    """An image, if the value is a data URL."""
    if isinstance(url, str) and _DATA_URL.fullmatch(url):
        return _Html(f'<img alt="" src="{url}">')
    return None


# ------------------------------------------------------------------ drawing


def _thinned(points: Points) -> Points:
    """Average neighbours down to MAX_POINTS."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _figure(chart: Chart, curves: Mapping[str, Points], marks: Sequence[tuple[float, str]]) -> str:
    """One chart with its legend. `marks`: steps at which a stage starts."""
    steps = [x for points in curves.values() for x, _ in points]
    values = [y for points in curves.values() for _, y in points]
    x_ticks, y_ticks = ticks(min(steps), max(steps)), ticks(min(values), max(values))
    (x_low, x_high), (y_low, y_high) = _span(x_ticks, steps), _span(y_ticks, values)

    def x(step: float) -> float:
        return round(_LEFT + (step - x_low) / (x_high - x_low) * (_RIGHT - _LEFT), 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (value - y_low) / (y_high - y_low) * (_BOTTOM - _TOP), 1)

    parts = []
    for tick in y_ticks:
        parts.append(f'<line class=grid x1="{_LEFT}" x2="{_RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text class=y x="{_LEFT - 6}" y="{y(tick) + 4}">{escape(chart.show(tick))}</text>')
    parts += [f'<text class=x x="{x(tick)}" y="{_HEIGHT - 8}">{escape(_number(tick))}</text>' for tick in x_ticks]
    for step, name in marks:
        if x_low < step < x_high:
            parts.append(f'<line class=mark x1="{x(step)}" x2="{x(step)}" y1="{_TOP}" y2="{_BOTTOM}"><title>{escape(name)}</title></line>')  # fmt: skip
    for number, (name, points) in enumerate(curves.items()):
        points_text = " ".join(f"{x(step)},{y(value)}" for step, value in points)
        shape = "polyline" if len(points) > 1 else "circle"
        where = (
            f'points="{points_text}"' if len(points) > 1 else f'cx="{x(points[0][0])}" cy="{y(points[0][1])}" r="2.5"'
        )
        parts.append(f'<{shape} class="c{number % 8}" {where}><title>{escape(name)}</title></{shape}>')
    legend = "".join(
        f'<span><i class="c{number % 8}"></i>{escape(name.split("/", 1)[-1])} {escape(chart.show(points[-1][1]))}</span>'
        for number, (name, points) in enumerate(curves.items())
    )
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg><p>{legend}</p></figure>'
    )


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
    """A range that contains everything; never empty."""
    low, high = min(*marked, *values, math.inf), max(*marked, *values, -math.inf)
    margin = (high - low) * 0.04 or max(abs(low) * 0.1, 1e-12)
    return low - margin, high + margin


_COLOURS = ("#3568d4", "#d9622b", "#2d9d5c", "#a24bc4", "#c8a11c", "#d1446f", "#2aa3b8", "#7a7f87")
_HEAD = """<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1c2126; --soft: #6a727b; --line: #e3e6ea; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e4e7ea; --soft: #969ea7; --line: #2d3238; } }
body { background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
dl { display: flex; flex-wrap: wrap; gap: 2rem; } dt { color: var(--soft); } dd { margin: 0; font-size: 1.2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; } figcaption { font-weight: 600; }
figure p { margin: 0; color: var(--soft); } figure span { margin-right: 1rem; } i { display: inline-block; width: .7em; height: .7em; margin-right: .3em; border-radius: 2px; }
svg { width: 100%; } svg text { fill: var(--soft); font-size: 11px; } .y { text-anchor: end; } .x { text-anchor: middle; }
.grid { stroke: var(--line); } .mark { stroke: var(--soft); stroke-dasharray: 4 3; } polyline { fill: none; stroke-width: 1.6; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } th { text-align: left; color: var(--soft); }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; } img { max-width: 160px; }
COLOURS
</style>
""".replace(
    "COLOURS",
    "\n".join(
        f"polyline.c{i} {{ stroke: {c} }} circle.c{i} {{ fill: {c} }} i.c{i} {{ background: {c} }}"
        for i, c in enumerate(_COLOURS)
    ),
)
