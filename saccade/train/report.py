"""Report of a run as one HTML page: curves, scores of checkpoints, sample generations, skipped steps, config.

`write_report(run)` reads metrics.jsonl, evaluations/, samples.jsonl, skipped_steps.jsonl and config.toml of the run
folder and writes report.html. The section of a missing file is omitted. A line of samples.jsonl has step, prompt and
output, and optionally reference and image (a data URL).
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from saccade.report.charts import Points, line_chart
from saccade.report.html import Html
from saccade.report.page import cards, image, table, write_page
from saccade.train.log_line import duration, thousands
from saccade.train.trackers import flat_numbers, read_records

MAX_ROWS = 200
"""Maximum number of skipped steps and samples shown, newest last."""
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
    write_page(run / "report.html", run.resolve().name, sections)
    return run / "report.html"


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
    shown = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl class=facts>{shown}</dl>"


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
        curves = {name: points for name, points in series.items() if re.fullmatch(chart.names, name)}
        if curves:
            figures.append(line_chart(chart.title, curves, marks=marks, show=chart.show, show_step=_number))
    return cards(figures, "charts")


def _evaluations(run: Path) -> str:
    """Show scores of exported checkpoints: a chart of each task's first metric, all scores with links to their reports.

    Scores of different versions of the results format are not comparable: each version has a curve of its own.
    """
    found = [
        (int(path.parent.name.removeprefix("step-")), json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(run.glob("evaluations/step-*/scores.json"))
    ]
    newest = max((content.get("version", 0) for _, content in found), default=0)
    curves: dict[str, dict[str, Points]] = {}
    rows: list[Sequence[object]] = []
    for step, content in found:
        version = content.get("version", 0)
        older = "" if version == newest else f" (version {version} of results)"
        link = Html(f'<a href="evaluations/step-{step:08d}/report.html">{step:,}</a>')
        for task, scores in content.get("tasks", {}).items():
            for number, (metric, score) in enumerate(scores["metrics"].items()):
                if number == 0:
                    title = f"Evaluation: {task}, {metric}"
                    curves.setdefault(title, {}).setdefault(metric + older, []).append((step, score["value"]))
                interval = f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
                rows.append((link, task, metric + older, interval, scores["num_examples"]))
    charts = [line_chart(title, versions, show=_number, show_step=_number) for title, versions in curves.items()]
    names = ("step", "task", "metric", "score", "examples")
    return cards(charts, "charts") + _section("Evaluations of exported checkpoints", names, rows)


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
    return _section("Sample generations", ("step", "image", "prompt", "output", "reference"), rows)


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
    return _section("Skipped steps", ("step", "reason", "action", "loss", "gradient norm", "samples"), rows)


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

    return _section("Settings", ("key", "value"), list(flat(tomllib.loads(path.read_text(encoding="utf-8")), "")))


def _section(title: str, names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a heading; empty without rows."""
    return f"<h2>{title}</h2>{table(names, rows, wraps=True)}" if rows else ""


def _image(url: object) -> Html | None:
    """An image, if the value is a data URL."""
    return image(url) if isinstance(url, str) and _DATA_URL.fullmatch(url) else None
