"""Tabulate the scores of one or several results, as Markdown and LaTeX.

The first results are the model's; the others are baselines or other models. A cell of theirs says how much the model
differs, with a star if the difference is significant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saccade.evaluate.comparison import Comparison, MetricComparison
from saccade.evaluate.results import Results

LEGEND = (
    "95 % intervals by bootstrap over images. Differences of the first column to the others are paired; * is "
    "significant (p < 0.05, Holm over a task's metrics)."
)


@dataclass(frozen=True)
class Cell:
    """A score with its interval, and the difference of the model's score."""

    value: float
    low: float
    high: float
    compared: MetricComparison | None = None

    def text(self) -> str:
        """Write the score with its interval: `0.734 [0.712, 0.755]`."""
        return f"{number(self.value)} [{number(self.low)}, {number(self.high)}]"

    def difference(self) -> str:
        """Write the difference, such as `+0.610*`; empty for the model itself."""
        if self.compared is None:
            return ""
        return f"{self.compared.difference:+.3f}" + ("*" if self.compared.is_significant else "")


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one task."""

    task: str
    metric: str
    cells: tuple[Cell | None, ...]
    higher_is_better: bool = True
    group: str = ""

    @property
    def label(self) -> str:
        """The metric, with an arrow if lower is better, and its group if it has one."""
        arrow = "" if self.higher_is_better else " (lower is better)"
        return f"  {self.metric} of {self.group}" if self.group else f"{self.metric}{arrow}"


def score_rows(results: Sequence[Results], comparisons: Mapping[str, Comparison]) -> list[ScoreRow]:
    """Return the rows of all tasks. `comparisons`: the first results against each other one, by its name."""
    rows = []
    first = results[0]
    scores = [one.scores.get("tasks", {}) for one in results]
    for task in first.settings["tasks"]:
        for metric, score in scores[0].get(task, {}).get("metrics", {}).items():
            cells = tuple(
                _cell(found.get(task, {}).get("metrics", {}).get(metric), comparisons.get(one.name), task, metric)
                for one, found in zip(results, scores, strict=True)
            )
            rows.append(ScoreRow(task, metric, cells, score["higher_is_better"]))
        for group, score in scores[0].get(task, {}).get("groups", {}).items():
            cells = tuple(_cell(found.get(task, {}).get("groups", {}).get(group), None, task, "") for found in scores)
            rows.append(ScoreRow(task, score["metric"], cells, score["higher_is_better"], group))
    return rows


def beams_of(results: Results, task: str) -> str:
    """Write `, 3 beams` if answers were found by beam search, else nothing."""
    num_beams = results.settings["tasks"][task]["decoding"].get("num_beams", 1)
    return f", {num_beams} beams" if num_beams > 1 else ""


def _cell(score: Mapping[str, float] | None, comparison: Comparison | None, task: str, metric: str) -> Cell | None:
    if score is None:
        return None
    compared = comparison.of(task, metric) if comparison is not None else None
    return Cell(score["value"], score["low"], score["high"], compared)


def number(value: float) -> str:
    """Write three decimals, or four digits of large values."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def markdown(rows: Sequence[ScoreRow], names: Sequence[str]) -> str:
    """Write a Markdown table."""
    lines = [_markdown_line(["task", "metric", *names]), "|" + "---|" * (len(names) + 2)]
    lines += [_markdown_line([row.task, row.label.strip(), *map(_cell_text, row.cells)]) for row in rows]
    return "\n".join(lines) + "\n\n" + LEGEND.replace("*", "\\*") + "\n"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.text()} ({cell.difference().replace('*', chr(92) + '*')})" if cell.compared else cell.text()


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def latex(rows: Sequence[ScoreRow], names: Sequence[str]) -> str:
    """Write a LaTeX table in the style of booktabs; the best score of a row is bold."""
    lines = [rf"\begin{{tabular}}{{ll{'r' * len(names)}}}", r"\toprule"]
    lines.append(" & ".join(["task", "metric", *map(escape_latex, names)]) + r" \\ \midrule")
    for row in rows:
        best = _best(row)
        cells = [_latex_cell(cell, is_best=number == best) for number, cell in enumerate(row.cells)]
        lines.append(" & ".join([escape_latex(row.task), escape_latex(row.label.strip()), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", f"% {LEGEND}"]) + "\n"


def _best(row: ScoreRow) -> int | None:
    """Return the column of the best score of a row; None if it has one score only."""
    scores = [(cell.value if row.higher_is_better else -cell.value, -n) for n, cell in enumerate(row.cells) if cell]
    return -max(scores)[1] if len(scores) > 1 else None


def _latex_cell(cell: Cell | None, *, is_best: bool) -> str:
    if cell is None:
        return ""
    value = rf"\textbf{{{number(cell.value)}}}" if is_best else number(cell.value)
    star = "$^*$" if cell.compared is not None and cell.compared.is_significant else ""
    return rf"{value}{star} \scriptsize[{number(cell.low)}, {number(cell.high)}]"


def escape_latex(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(_LATEX.get(character, character) for character in text)
