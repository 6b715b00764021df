"""The report of a compression: original and compressed model in one table, errors of layers, sensitivity.

It is written to `compression/` in the compressed folder, as HTML, JSON and text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from saccade.compress.layer_report import CompressReport
from saccade.compress.mixed_scheme import PickedScheme
from saccade.compress.scheme import Scheme
from saccade.compress.sensitivity import Sensitivity
from saccade.compress.verify import Fidelity
from saccade.config import write_config
from saccade.files import atomic_write
from saccade.report.charts import LogBar, figure, log_bar_chart, svg_file
from saccade.report.html import Html
from saccade.report.page import details, paragraph, write_page
from saccade.report.page import table as html_table

FOLDER = "compression"


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model of the table."""

    name: str
    """original, or the scheme."""
    disk_bytes: int
    """Bytes of its weight files."""
    memory_bytes: int | None = None
    """Bytes of its weights in memory; None: it was not loaded."""
    perplexity: float | None = None
    """Perplexity on the held-out samples."""
    kl: float | None = None
    """KL divergence of the original from it."""
    agreement: float | None = None
    """Share of tokens with the same most probable next token."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """Scores of tasks with their intervals: value, low, high."""
    speed: dict[str, float] = field(default_factory=dict)
    """ttft_ms, tpot_ms (medians), output_tokens_per_s."""


def fidelity_rows(report: CompressReport, fidelity: Fidelity | None, memory: tuple[int, int] | None) -> list[ModelRow]:
    """The rows of the original and of the compressed model."""
    before, after = memory or (None, None)
    if fidelity is None:
        return [
            ModelRow(name="original", disk_bytes=report.bytes_before, memory_bytes=before),
            ModelRow(name=report.scheme, disk_bytes=report.bytes_after, memory_bytes=after),
        ]
    original = ModelRow(
        name="original", disk_bytes=report.bytes_before, memory_bytes=before,
        perplexity=fidelity.original_perplexity, kl=0.0, agreement=1.0,
    )  # fmt: skip
    ours = ModelRow(
        name=report.scheme, disk_bytes=report.bytes_after, memory_bytes=after,
        perplexity=fidelity.perplexity, kl=fidelity.kl, agreement=fidelity.agreement,
    )  # fmt: skip
    return [original, ours]


def table(rows: Sequence[ModelRow]) -> list[list[str]]:
    """The table of the field: scheme, size, memory, perplexity, scores, speed.

    The first line is the head; columns without values are left out."""
    scores = list(dict.fromkeys(name for row in rows for name in row.scores))
    speeds = list(dict.fromkeys(name for row in rows for name in row.speed))
    lines = [
        ["scheme", "disk", "memory", "perplexity", "KL", "same token", *scores, *(_SPEEDS[name] for name in speeds)]
    ]
    for row in rows:
        cells = [row.name, _size(row.disk_bytes), _size(row.memory_bytes)]
        cells += [_number(row.perplexity), _number(row.kl), _percent(row.agreement)]
        cells += [_score(row.scores.get(name)) for name in scores]
        lines.append(cells + [_number(row.speed.get(name)) for name in speeds])
    used = [column for column in range(len(lines[0])) if any(line[column] for line in lines[1:])]
    return [[line[column] for column in used] for line in lines]


_SPEEDS = {"ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "output_tokens_per_s": "tokens/s"}


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _score(score: Mapping[str, float] | None) -> str:
    return "" if score is None else f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def text_table(rows: Sequence[ModelRow]) -> list[str]:
    """The table for a terminal."""
    lines = table(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def summary(report: CompressReport) -> list[str]:
    """Summarize the result in a few lines."""
    before, after = _size(report.bytes_before), _size(report.bytes_after)
    lines = [f"{report.scheme}: {before} to {after} ({report.ratio:.1%}), {len(report.layers)} projections compressed"]
    lines += [f"kept: {', '.join(report.kept)}"] if report.kept else []
    lines += [f"KV cache: {report.kv_cache}, scales of keys and values per layer"] if report.kv_cache else []
    notes: dict[str, int] = {}
    for layer in report.layers:
        if layer.note:
            notes[layer.note] = notes.get(layer.note, 0) + 1
    lines += [f"{count} projections: {note}" for note, count in notes.items()]
    measured = [(layer.error, layer.rtn_error, layer.name) for layer in report.layers if layer.error is not None]
    if measured:
        error, _, name = max(measured)
        mean = sum(own / rtn for own, rtn, _ in measured if rtn) / len(measured)
        lines.append(
            f"error of a projection's output: {error:.2%} at most ({name}), "
            f"{mean:.2f} times that of rounding to nearest on average"
        )
    return lines


def write_report(
    out: Path,
    report: CompressReport,
    scheme: Scheme,
    rows: Sequence[ModelRow],
    *,
    choice: PickedScheme | None = None,
    verdict: str | None = None,
) -> Path:
    """Write the report into a compressed folder; returns the page."""
    folder = out / FOLDER
    folder.mkdir(exist_ok=True)
    content: dict[str, Any] = report.to_json() | {"models": [asdict(row) for row in rows], "verdict": verdict}
    _write(folder / "report.json", json.dumps(content, indent=2) + "\n")
    write_config(scheme, folder / "scheme.toml")
    if choice is not None:
        _write(folder / "sensitivity.json", json.dumps(choice.to_json(), indent=2) + "\n")
        _write(folder / "sensitivity.svg", svg_file(sensitivity_chart(choice.sensitivity)))
    page = folder / "report.html"
    write_page(page, f"Compression: {report.scheme}", _sections(report, scheme, rows, choice, verdict))
    return page


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------ the page


def _sections(
    report: CompressReport,
    scheme: Scheme,
    rows: Sequence[ModelRow],
    choice: PickedScheme | None,
    verdict: str | None,
) -> list[str]:
    head, *body = table(rows)
    sections: list[str] = [paragraph(verdict, "warning")] if verdict else []
    sections += [paragraph(line) for line in summary(report)]
    sections.append(html_table(head, body))
    if choice is not None:
        trials = [(one.scheme.name, f"{one.ratio:.4f}", _number(one.fidelity.kl)) for one in choice.trials]
        sections += ["<h2>Sensitivity</h2>", figure(_SENSITIVITY, sensitivity_chart(choice.sensitivity))]
        sections += ["<h2>Trials on the calibration samples</h2>", html_table(("scheme", "size", "KL"), trials)]
    if any(layer.error is not None for layer in report.layers):
        sections += ["<h2>Layers</h2>", figure(_ERRORS, _error_chart(report))]
    layers = [
        (
            layer.name,
            layer.form,
            layer.method,
            "per output" if layer.group_size is None else layer.group_size,
            _percent_fine(layer.error),
            _percent_fine(layer.rtn_error),
            layer.note,
        )
        for layer in report.layers
    ]
    columns = ("projection", "form", "method", "group", "error", "to nearest", "note")
    sections.append(details("Projections", html_table(columns, layers)))
    sections.append(details("Scheme", f"<pre>{escape(json.dumps(asdict(scheme), indent=2))}</pre>"))
    return sections


def _percent_fine(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


_SENSITIVITY = "KL divergence of the output when only this group is compressed"
_ERRORS = "Relative error of a projection's output"


def sensitivity_chart(sensitivity: Sensitivity) -> Html:
    """KL divergence of every form of every group, on a logarithmic axis."""
    bars: list[LogBar] = []
    forms: list[str] = []
    for group, options in sensitivity.candidates.items():
        for number, one in enumerate(options[1:]):
            form = one.form if one.group_size is None else f"{one.form} g{one.group_size}"
            forms += [] if form in forms else [form]
            bars.append(LogBar("" if number else group, f"{form}: {one.kl:.3g}", one.kl, forms.index(form)))
    return log_bar_chart(_SENSITIVITY, bars, forms)


def _error_chart(report: CompressReport) -> Html:
    """Relative error of every projection's output, compared with rounding to nearest."""
    bars = []
    for layer in report.layers:
        if layer.error is not None and layer.rtn_error is not None:
            bars.append(LogBar(layer.name, f"{layer.method}: {layer.error:.2%}", layer.error, 0))
            bars.append(LogBar("", f"to nearest: {layer.rtn_error:.2%}", layer.rtn_error, 1))
    return log_bar_chart(_ERRORS, bars, ("this scheme", "to nearest"))
