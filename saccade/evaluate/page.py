"""The report as one self-contained HTML page: scores, plots, examples with their images and answers, what changed, settings.

No scripts and no requests: charts are SVG, images are data URLs, and a content security policy forbids the rest. All text is escaped.
"""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from PIL import Image, ImageOps

from saccade.errors import UserError
from saccade.evaluate.charts import histogram, interval_chart
from saccade.evaluate.comparison import Change, Comparison
from saccade.evaluate.results import Results
from saccade.evaluate.run import examples_of
from saccade.evaluate.tables import LEGEND, Cell, Row, beams_of, number, score_rows

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 24
"""Examples shown of each task: half of them the worst, half spread over the data."""
NUM_CHANGES = 8
"""Examples shown of each comparison that got better, and as many that got worse."""
_THUMBNAIL_SIDE = 160
_Thumbnails = Mapping[str, list[str]]


def make_page(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> str:
    """The page of the first results, with the others beside them."""
    ours = results[0]
    title = escape(f"Evaluation of {ours.name}")
    sections = [f"<h1>{title}</h1>", _warnings(ours), _score_table(results, comparisons)]
    for task in ours.scores.get("tasks", {}):
        sections.append(_task_section(task, results, comparisons))
    sections += [_efficiency(ours), _settings(results)]
    return f"{_HEAD}<title>{title}</title>{''.join(sections)}</html>\n"


# ------------------------------------------------------------------ sections


def _warnings(results: Results) -> str:
    """What a reader must know before the scores."""
    lines = []
    for task, scores in results.scores.get("tasks", {}).items():
        lines += [f"{task}: {note}" for note in scores.get("notes", [])]
        if scores.get("num_failures"):
            lines.append(
                f"{task}: {scores['num_failures']} of {scores['num_examples']} examples failed and count as wrong"
            )
        if contamination := scores.get("contamination"):
            lines.append(f"{task}: {contamination['text']}")
    return "".join(f"<p class=warning>{escape(line)}</p>" for line in lines)


def _score_table(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> str:
    rows, names = score_rows(results, comparisons), [one.name for one in results]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(_score_line(row) for row in rows)
    return f"<h2>Scores</h2><div class=wide><table><tr><th>task</th><th>metric</th>{head}</tr>{body}</table></div><p class=soft>{escape(LEGEND)}</p>"


def _score_line(row: Row) -> str:
    cells = "".join(
        f"<td{'' if number else ' class=own'}>{_score_cell(cell)}</td>" for number, cell in enumerate(row.cells)
    )
    return f"<tr><td>{escape(row.task)}</td><td>{escape(row.label)}</td>{cells}</tr>"


def _score_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    interval = f" <small>[{number(cell.low)}, {number(cell.high)}]</small>"
    if cell.compared is None:
        return f"{number(cell.value)}{interval}"
    kind = ("better" if cell.compared.is_better else "worse") if cell.compared.is_significant else "soft"
    return f"{number(cell.value)}{interval} <span class={kind}>{escape(cell.difference())}</span>"


def _task_section(task: str, results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> str:
    ours = results[0]
    scores, records = ours.scores["tasks"][task], ours.records(task)
    others = {one.name: {record["id"]: record for record in one.records(task)} for one in results[1:]}
    shown = _choose(records, scores["metrics"])
    changes = {name: _choose_changes(found.changes.get(task, ())) for name, found in comparisons.items()}
    ids = {record["id"] for record in shown} | {change.id for some in changes.values() for change in some}
    images = _thumbnails(ours, task, ids)
    parts = [
        f"<h2>{escape(task)}</h2><p class=soft>{scores['num_examples']:,} examples about {scores['num_images']:,} images{beams_of(ours, task)}</p>"
    ]
    parts += [_charts(task, results, comparisons, records)]
    if shown:
        parts.append("<h3>Examples</h3>" + _cards([_card(record, images, others) for record in shown]))
    for name, some in changes.items():
        if some:
            total = len(comparisons[name].changes[task])
            parts.append(f"<h3>Changed against {escape(name)}: {total:,} examples</h3>")
            parts.append(_cards([_change_card(change, images, name) for change in some]))
    return f"<section>{''.join(parts)}</section>"


def _charts(
    task: str, results: Sequence[Results], comparisons: Mapping[str, Comparison], records: Sequence[Mapping[str, Any]]
) -> str:
    names = [one.name for one in results]
    rows = [row for row in score_rows(results, comparisons) if row.task == task and not row.group]
    figures = [
        interval_chart(row.label, [(name, cell.value, cell.low, cell.high) for name, cell in zip(names, row.cells, strict=True) if cell])
        for row in rows[:6]
    ]  # fmt: skip
    for metric, of_metric in groupby(sorted((name, value) for record in records for name, value in record.get("scores", {}).items()), key=lambda pair: pair[0]):  # fmt: skip
        values = [value for _, value in of_metric]
        if len(set(values)) > 2 and metric == rows[0].metric:
            figures.append(histogram(f"{metric} of single examples", values))
    return f"<div class=charts>{''.join(figures)}</div>"


def _efficiency(results: Results) -> str:
    found = results.scores.get("efficiency")
    if not found:
        return ""
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    labels = {"ttft_ms": "time to first token", "tpot_ms": "time per output token", "inter_token_ms": "between tokens", "e2e_ms": "whole request"}  # fmt: skip
    lines = [
        f"<tr><td>{label}, ms</td>{''.join(f'<td>{found[key][name]:.1f}</td>' for name in names)}</tr>"
        for key, label in labels.items()
        if found.get(key)
    ]
    facts = f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:.1f} output tokens/s"
    if found.get("peak_memory_bytes"):
        facts += f", peak memory {found['peak_memory_bytes'] / 2**30:.2f} GiB"
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f"<h2>Efficiency</h2><p class=soft>{escape(found['load']['text'])}</p><p>{escape(facts)}</p>"
        f"<div class=wide><table><tr><th></th>{head}</tr>{''.join(lines)}</table></div>"
    )


def _settings(results: Sequence[Results]) -> str:
    blocks = [
        f"<details><summary>{escape(one.name)}</summary><pre>{escape(json.dumps(one.settings, indent=1, ensure_ascii=False))}</pre></details>"
        for one in results
    ]
    return f"<h2>Settings</h2>{''.join(blocks)}"


# ------------------------------------------------------------------ examples


def _choose(records: Sequence[dict[str, Any]], metrics: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Examples spread over the data, then the worst ones."""

    def goodness(record: Mapping[str, Any]) -> float:
        name, value = next(iter(record.get("scores", {}).items()), ("", 0.0))
        return value if metrics.get(name, {}).get("higher_is_better", True) else -value

    scored = [record for record in records if record.get("scores") or "answer" in record]
    worst = sorted(scored, key=goodness)[: NUM_EXAMPLES // 2]
    rest = [record for record in scored if record not in worst]
    step = max(1, len(rest) // max(1, NUM_EXAMPLES - len(worst)))
    return (rest[::step][: NUM_EXAMPLES - len(worst)]) + worst


def _choose_changes(changes: Sequence[Change]) -> list[Change]:
    gained = [change for change in changes if change.difference > 0]
    lost = [change for change in changes if change.difference < 0]
    return gained[:NUM_CHANGES] + lost[-NUM_CHANGES:]


def _cards(cards: Sequence[str]) -> str:
    return f"<div class=cards>{''.join(cards)}</div>"


def _card(record: Mapping[str, Any], images: _Thumbnails, others: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    answers = [("answer", _answer(record))]
    answers += [(name, _answer(records[record["id"]])) for name, records in others.items() if record["id"] in records]
    return _article(record, images, answers, _scores(record))


def _change_card(change: Change, images: _Thumbnails, other: str) -> str:
    answers = [("answer", _answer(change.ours)), (other, _answer(change.theirs))]
    kind = "better" if change.difference > 0 else "worse"
    return _article(change.ours, images, answers, f"<span class={kind}>{change.difference:+.3f}</span>")


def _article(record: Mapping[str, Any], images: _Thumbnails, answers: Sequence[tuple[str, str]], score: str) -> str:
    shown = "".join(f'<img alt="" src="{url}">' for url in images.get(record["id"], []))
    asked = record.get("prompt") or record.get("question") or ""
    lines = [("question", asked), *answers, ("expected", " / ".join(record.get("references", [])[:5]))]
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines if text)
    return f"<article>{shown}<dl>{body}</dl><p class=soft>{escape(record['id'])} {score}</p></article>"


def _answer(record: Mapping[str, Any]) -> str:
    return str(record["failure"] if "failure" in record else record.get("answer", ""))


def _scores(record: Mapping[str, Any]) -> str:
    return escape(", ".join(f"{name} {value:.3g}" for name, value in record.get("scores", {}).items()))


def _thumbnails(results: Results, task: str, ids: set[str]) -> dict[str, list[str]]:
    """Small images of some examples as data URLs, read from the data; none where it is gone."""
    try:
        examples = [example for example in examples_of(results, task) if example.id in ids]
        return {example.id: [_thumbnail(image.read()) for image in example.images] for example in examples}
    except (UserError, OSError) as error:
        logger.warning("the report shows no images of %s: %s", task, error)
        return {}


def _thumbnail(data: bytes) -> str:
    with Image.open(io.BytesIO(data)) as opened:
        opened.draft("RGB", (2 * _THUMBNAIL_SIDE, 2 * _THUMBNAIL_SIDE))
        image = ImageOps.exif_transpose(opened).convert("RGB")
    image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


_COLOURS = ("#3568d4", "#d9622b", "#2d9d5c", "#a24bc4")
_HEAD = """<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1c2126; --soft: #5d656e; --line: #e3e6ea; --good: #1d7a43; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e4e7ea; --soft: #9aa2ab; --line: #2d3238; --good: #5fc98a; --bad: #f2938c; } }
body { background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-top: 1.4rem; }
.soft, small { color: var(--soft); font-weight: 400; } .own { font-weight: 600; } .better { color: var(--good); } .worse { color: var(--bad); }
.warning { border-left: 3px solid var(--bad); padding-left: .7rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem 1.2rem .25rem 0; vertical-align: top; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; } figcaption { font-weight: 600; }
svg { width: 100%; } svg text { fill: var(--soft); font-size: 12px; } .label { text-anchor: end; } .tick { text-anchor: middle; }
.axis { stroke: var(--line); } .bar { stroke-width: 3; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(240px, 100%), 1fr)); gap: 1rem; }
article { border: 1px solid var(--line); border-radius: 6px; padding: .7rem; overflow-wrap: anywhere; } article img { max-width: 100%; border-radius: 4px; }
dl { margin: .4rem 0 0; } dt { color: var(--soft); font-size: .85em; } dd { margin: 0 0 .35rem; } article p { margin: 0; font-size: .85em; }
pre { overflow-x: auto; }
COLOURS
</style>
""".replace(
    "COLOURS",
    "\n".join(f".bar.c{i} {{ stroke: {c} }} .dot.c{i}, rect.c{i} {{ fill: {c} }}" for i, c in enumerate(_COLOURS)),
)
