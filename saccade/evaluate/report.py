"""Reports of results: files in the results folder, and a table for the terminal.

report.html     images, answers, plots
report.md       the score table in Markdown
report.tex      the score table in LaTeX
comparison.json what changed against each of the others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saccade.evaluate.comparison import Comparison, compare
from saccade.evaluate.page import write_results_page
from saccade.evaluate.results import Results, write_json
from saccade.evaluate.tables import LEGEND, Cell, beams_of, latex, markdown, score_rows
from saccade.files import atomic_write

if TYPE_CHECKING:
    from rich.console import Group


def compare_all(results: Sequence[Results], *, seed: int = 0) -> dict[str, Comparison]:
    """Compare the first results with each of the others; return the comparisons by name."""
    return {other.name: compare(results[0], other, seed=seed) for other in results[1:]}


def write_reports(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> None:
    """Write all reports into the folder of the first results."""
    rows, names, folder = score_rows(results, comparisons), [one.name for one in results], results[0].folder
    write_results_page(folder / "report.html", results, comparisons)
    for name, text in {"report.md": markdown(rows, names), "report.tex": latex(rows, names)}.items():
        with atomic_write(folder / name) as path:
            path.write_text(text, encoding="utf-8")
    if comparisons:
        content = {name: found.to_json() for name, found in comparisons.items()}
        write_json(folder / "comparison.json", content)


def to_json(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """Return all scores and comparisons as one object."""
    return {
        "results": {one.name: {"folder": str(one.folder), **one.scores} for one in results},
        "comparisons": {name: found.to_json() for name, found in comparisons.items()},
    }


def terminal_report(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> Group:
    """Return the score table, changed examples and notes, for rich."""
    from rich.console import Group
    from rich.table import Table

    names = [one.name for one in results]
    table = Table(box=None, pad_edge=False)
    for name in ("task", "metric", *names):
        table.add_column(name, overflow="fold")  # a narrow terminal folds text instead of cutting it off
    before = ""
    for row in score_rows(results, comparisons):
        table.add_row(row.task if row.task != before else "", row.label, *map(_cell_text, row.cells))
        before = row.task
    return Group(table, *_notes(results, comparisons))


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.text()}  {cell.difference()}".rstrip()


def _notes(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> list[str]:
    ours = results[0]
    lines = []
    for task, scores in ours.scores.get("tasks", {}).items():
        failed = f", {scores['num_failures']} failed" if scores["num_failures"] else ""
        lines.append(
            f"{task}: {scores['num_examples']:,} examples, {scores['num_images']:,} images"
            f"{beams_of(ours, task)}{failed}"
        )
        lines += [f"  {note}" for note in scores.get("notes", [])]
        if contamination := scores.get("contamination"):
            lines.append(f"  {contamination['text']}")
        for name, found in comparisons.items():
            changes = found.changes.get(task, ())
            num_better = sum(change.difference > 0 for change in changes)
            lines.append(f"  against {name}: {num_better:,} examples better, {len(changes) - num_better:,} worse")
    return [*lines, LEGEND] if comparisons else lines
