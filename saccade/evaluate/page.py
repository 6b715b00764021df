"""The page of results: scores, charts, examples with their images and answers, what changed, settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from saccade.errors import UserError
from saccade.evaluate.comparison import Change, Comparison
from saccade.evaluate.results import Results
from saccade.evaluate.run import examples_of
from saccade.evaluate.tables import LEGEND, Cell, beams_of, number, score_rows
from saccade.report.charts import histogram, interval_chart
from saccade.report.html import Html
from saccade.report.page import cards, details, image, paragraph, table, thumbnail, write_page

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 24
"""Examples shown of each task: half of them the worst, half spread over the data."""
NUM_CHANGES = 8
"""Examples of each comparison that got better, and as many that got worse."""
_THUMBNAIL_SIDE = 160
_Thumbnails = Mapping[str, list[str]]


def write_results_page(path: Path, results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> None:
    """Write the page of the first results, compared with the others."""
    ours = results[0]
    sections = [_warnings(ours), _score_table(results, comparisons)]
    sections += [_task_section(task, results, comparisons) for task in ours.scores.get("tasks", {})]
    sections.append(_settings(results))
    write_page(path, f"Evaluation of {ours.name}", sections)


# ------------------------------------------------------------------ sections


def _warnings(results: Results) -> str:
    """Say what a reader must know before the scores."""
    lines = []
    for task, scores in results.scores.get("tasks", {}).items():
        lines += [f"{task}: {note}" for note in scores.get("notes", [])]
        if scores.get("num_failures"):
            lines.append(
                f"{task}: {scores['num_failures']} of {scores['num_examples']} examples failed and count as wrong"
            )
        if contamination := scores.get("contamination"):
            lines.append(f"{task}: {contamination['text']}")
    return "".join(paragraph(line, "warning") for line in lines)


def _score_table(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> str:
    rows = [(row.task, row.label, *map(_score_cell, row.cells)) for row in score_rows(results, comparisons)]
    scores = table(("task", "metric", *(one.name for one in results)), rows)
    return f"<h2>Scores</h2>{scores}{paragraph(LEGEND, 'soft')}"


def _score_cell(cell: Cell | None) -> Html | None:
    if cell is None:
        return None
    interval = f"<small>[{number(cell.low)}, {number(cell.high)}]</small>"
    if cell.compared is None:
        return Html(f"<span class=own>{number(cell.value)}</span> {interval}")
    kind = ("better" if cell.compared.is_better else "worse") if cell.compared.is_significant else "soft"
    return Html(f"{number(cell.value)} {interval} <span class={kind}>{escape(cell.difference())}</span>")


def _task_section(task: str, results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> str:
    ours = results[0]
    scores, records = ours.scores["tasks"][task], ours.records(task)
    others = {one.name: {record["id"]: record for record in one.records(task)} for one in results[1:]}
    shown = _choose(records, scores["metrics"])
    changes = {name: _choose_changes(found.changes.get(task, ())) for name, found in comparisons.items()}
    ids = {record["id"] for record in shown} | {change.id for some in changes.values() for change in some}
    images = _thumbnails(ours, task, ids)
    size = f"{scores['num_examples']:,} examples about {scores['num_images']:,} images{beams_of(ours, task)}"
    parts = [f"<h2>{escape(task)}</h2>", paragraph(size, "soft"), _charts(task, results, comparisons, records)]
    if shown:
        parts += ["<h3>Examples</h3>", cards(_card(record, images, others) for record in shown)]
    for name, some in changes.items():
        if some:
            total = len(comparisons[name].changes[task])
            parts.append(f"<h3>Changed against {escape(name)}: {total:,} examples</h3>")
            parts.append(cards(_change_card(change, images, name) for change in some))
    return "".join(parts)


def _charts(
    task: str, results: Sequence[Results], comparisons: Mapping[str, Comparison], records: Sequence[Mapping[str, Any]]
) -> str:
    names = [one.name for one in results]
    rows = [row for row in score_rows(results, comparisons) if row.task == task and not row.group]
    figures = []
    for row in rows[:6]:
        cells = [(name, cell) for name, cell in zip(names, row.cells, strict=True) if cell]
        figures.append(interval_chart(row.label, [(name, cell.value, cell.low, cell.high) for name, cell in cells]))
    if rows:
        metric = rows[0].metric
        values = [record["scores"][metric] for record in records if metric in record.get("scores", {})]
        if len(set(values)) > 2:
            figures.append(histogram(f"{metric} of single examples", values))
    return cards(figures, "charts")


def _settings(results: Sequence[Results]) -> str:
    texts = {one.name: json.dumps(one.settings, indent=1, ensure_ascii=False) for one in results}
    return "<h2>Settings</h2>" + "".join(details(name, f"<pre>{escape(text)}</pre>") for name, text in texts.items())


# ------------------------------------------------------------------ examples


def _choose(records: Sequence[dict[str, Any]], metrics: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Choose examples spread over the data, then the worst ones."""

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


def _card(record: Mapping[str, Any], images: _Thumbnails, others: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    answers = [("answer", _answer(record))]
    answers += [(name, _answer(records[record["id"]])) for name, records in others.items() if record["id"] in records]
    return _article(record, images, answers, _scores(record))


def _change_card(change: Change, images: _Thumbnails, other: str) -> str:
    answers = [("answer", _answer(change.ours)), (other, _answer(change.theirs))]
    kind = "better" if change.difference > 0 else "worse"
    return _article(change.ours, images, answers, f"<span class={kind}>{change.difference:+.3f}</span>")


def _article(record: Mapping[str, Any], images: _Thumbnails, answers: Sequence[tuple[str, str]], score: str) -> str:
    shown = "".join(image(url) for url in images.get(record["id"], []))
    asked = record.get("prompt") or record.get("question") or ""
    lines = [("question", asked), *answers, ("expected", " / ".join(record.get("references", [])[:5]))]
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines if text)
    return f"<article class=card>{shown}<dl>{body}</dl><p class=soft>{escape(record['id'])} {score}</p></article>"


def _answer(record: Mapping[str, Any]) -> str:
    return str(record["failure"] if "failure" in record else record.get("answer", ""))


def _scores(record: Mapping[str, Any]) -> str:
    return escape(", ".join(f"{name} {value:.3g}" for name, value in record.get("scores", {}).items()))


def _thumbnails(results: Results, task: str, ids: set[str]) -> dict[str, list[str]]:
    """Return small images of some examples as data URLs, or none if the data are gone."""
    try:
        examples = [example for example in examples_of(results, task) if example.id in ids]
        return {
            example.id: [thumbnail(image.read(), _THUMBNAIL_SIDE) for image in example.images] for example in examples
        }
    except (UserError, OSError) as error:
        logger.warning("the report shows no images of %s: %s", task, error)
        return {}
