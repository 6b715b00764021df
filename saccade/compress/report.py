"""The report of a compression: the original beside the compressed model in one table, errors of layers, sensitivity. HTML, JSON, text.

Written to `compression/` in the compressed folder. The page has no scripts and loads nothing; charts are SVG.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from saccade.compress.mixed_scheme import Choice
from saccade.compress.run import CompressReport
from saccade.compress.scheme import Scheme
from saccade.compress.sensitivity import Sensitivity
from saccade.compress.verify import Fidelity
from saccade.config import write_config
from saccade.files import atomic_write

FOLDER = "compression"


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model of the table."""

    name: str
    """original, or the scheme."""
    disk_bytes: int
    """Of its weight files."""
    memory_bytes: int | None = None
    """Of its weights in memory; None: it was not loaded."""
    perplexity: float | None = None
    """On the held-out samples."""
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
    """The table of the field: scheme, size, memory, perplexity, scores, speed. The first line is the head; columns without values are left out."""
    scores = list(dict.fromkeys(name for row in rows for name in row.scores))
    speeds = list(dict.fromkeys(name for row in rows for name in row.speed))
    lines = [
        ["scheme", "disk", "memory", "perplexity", "KL", "same token", *scores, *(_SPEEDS[name] for name in speeds)]
    ]
    for row in rows:
        cells = [row.name, _size(row.disk_bytes), _size(row.memory_bytes), _number(row.perplexity), _number(row.kl), _percent(row.agreement)]  # fmt: skip
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
    """What was done, in a few lines."""
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
            f"error of a projection's output: {error:.2%} at most ({name}), {mean:.2f} times that of rounding to nearest on average"
        )
    return lines


def write_report(
    out: Path,
    report: CompressReport,
    scheme: Scheme,
    rows: Sequence[ModelRow],
    *,
    choice: Choice | None = None,
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
        _write(folder / "sensitivity.svg", sensitivity_chart(choice.sensitivity, is_alone=True))
    _write(folder / "report.html", _page(report, scheme, rows, choice, verdict))
    return folder / "report.html"


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------ the page


def _page(
    report: CompressReport,
    scheme: Scheme,
    rows: Sequence[ModelRow],
    choice: Choice | None,
    verdict: str | None,
) -> str:
    head, *body = table(rows)
    title = escape(f"Compression: {report.scheme}")
    sections = [f"<h1>{title}</h1>"]
    sections += [f"<p class=warning>{escape(verdict)}</p>"] if verdict else []
    sections += [f"<p>{escape(line)}</p>" for line in summary(report)]
    sections.append(_html_table(head, body))
    if choice is not None:
        trials = [[one.scheme.name, f"{one.ratio:.4f}", _number(one.fidelity.kl)] for one in choice.trials]
        sections += ["<h2>Sensitivity</h2>", sensitivity_chart(choice.sensitivity)]
        sections += ["<h2>Trials on the calibration samples</h2>", _html_table(["scheme", "size", "KL"], trials)]
    if any(layer.error is not None for layer in report.layers):
        sections += ["<h2>Layers</h2>", error_chart(report)]
    layers = [
        [layer.name, layer.form, layer.method, "per output" if layer.group_size is None else str(layer.group_size), _percent_fine(layer.error), _percent_fine(layer.rtn_error), layer.note]
        for layer in report.layers
    ]  # fmt: skip
    columns = ["projection", "form", "method", "group", "error", "to nearest", "note"]
    sections += [f"<details><summary>Projections</summary>{_html_table(columns, layers)}</details>"]
    sections += [
        f"<details><summary>Scheme</summary><pre>{escape(json.dumps(asdict(scheme), indent=2))}</pre></details>"
    ]
    return f"{_HEAD}<title>{title}</title>{''.join(sections)}</html>\n"


def _percent_fine(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _html_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in body)
    return f"<div class=wide><table><tr>{cells}</tr>{lines}</table></div>"


# ------------------------------------------------------------------ charts

_LEFT, _RIGHT, _ROW = 300, 770, 14
_COLOURS = ("#3b82c4", "#d9822b", "#b3261e", "#4f9d69")


def sensitivity_chart(sensitivity: Sensitivity, *, is_alone: bool = False) -> str:
    """KL divergence of every form of every group, on a logarithmic axis."""
    rows, labels = [], []
    for group, options in sensitivity.candidates.items():
        for one in options[1:]:
            label = one.form if one.group_size is None else f"{one.form} g{one.group_size}"
            labels.append(label)
            rows.append((group if one is options[1] else "", label, one.kl))
    order = list(dict.fromkeys(labels))
    bars = [(name, f"{label}: {kl:.3g}", kl, order.index(label)) for name, label, kl in rows]
    return _bars("KL divergence of the output when only this group is compressed", bars, order, is_alone=is_alone)


def error_chart(report: CompressReport) -> str:
    """Relative error of every projection's output, beside rounding to nearest."""
    bars = []
    for layer in report.layers:
        if layer.error is not None and layer.rtn_error is not None:
            bars.append((layer.name, f"{layer.method}: {layer.error:.2%}", layer.error, 0))
            bars.append(("", f"to nearest: {layer.rtn_error:.2%}", layer.rtn_error, 1))
    return _bars("Relative error of a projection's output", bars, ["this scheme", "to nearest"])


def _bars(title: str, bars: Sequence[tuple[str, str, float, int]], legend: Sequence[str], *, is_alone: bool = False) -> str:  # fmt: skip
    """Horizontal bars (label, tooltip, value, colour) on a logarithmic axis."""
    positive = [value for _, _, value, _ in bars if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    low = max(low, high - 8)

    def x(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / max(1, high - low)
        return round(_LEFT + share * (_RIGHT - _LEFT), 1)

    height = _ROW * len(bars) + 46
    parts = [f'<line x1="{x(10.0**tick)}" x2="{x(10.0**tick)}" y1="18" y2="{height - 22}" stroke="#8884"/><text x="{x(10.0**tick)}" y="{height - 8}" text-anchor="middle">1e{tick}</text>' for tick in range(low, high + 1)]  # fmt: skip
    for number, name in enumerate(legend):
        parts.append(f'<rect x="{_LEFT + 150 * number}" y="2" width="10" height="10" fill="{_COLOURS[number % 4]}"/><text x="{_LEFT + 14 + 150 * number}" y="12">{escape(name)}</text>')  # fmt: skip
    for number, (label, tooltip, value, colour) in enumerate(bars):
        y = 20 + _ROW * number
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 10}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 2}" width="{max(1.0, x(value) - _LEFT):.1f}" height="{_ROW - 4}" fill="{_COLOURS[colour % 4]}"><title>{escape(tooltip)}</title></rect>')  # fmt: skip
    style = "<style>text { font: 11px sans-serif; fill: #5d656e }</style>" if is_alone else ""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_RIGHT + 20} {height}" role="img" aria-label="{escape(title)}">'
    drawn = f"{opening}{style}{''.join(parts)}</svg>"
    return drawn if is_alone else f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


_HEAD = """<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1c2126; --soft: #5d656e; --line: #e3e6ea; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e4e7ea; --soft: #9aa2ab; --line: #2d3238; --bad: #f2938c; } }
body { background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } .warning { border-left: 3px solid var(--bad); padding-left: .7rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem 1.2rem .25rem 0; white-space: nowrap; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; } figcaption { font-weight: 600; }
svg { width: 100%; } svg text { fill: var(--soft); font-size: 11px; } summary { margin-top: 1.2rem; cursor: pointer; }
</style>
"""
