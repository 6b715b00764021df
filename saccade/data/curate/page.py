"""The curation report as one HTML page, with examples of what was kept and dropped.

Captions and names are untrusted and are escaped. Images are decoded with limits and written as small JPEGs; the page
never contains their original bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from saccade.data.curate.features import is_measured, read_features
from saccade.data.curate.report import Distribution, FolderReport, drop_reasons, inspect
from saccade.data.curate.settings import DECODE_LIMITS
from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import Sample, images, texts
from saccade.errors import DataError, ImageError
from saccade.processor.image import load_image
from saccade.report.charts import share_bar, stacked_bars
from saccade.report.html import Html
from saccade.report.page import cards, details, image, paragraph, table, thumbnail
from saccade.report.page import write_page as write_report_page

_SIDE = 240
"""Size of an image on the page, in pixels."""
_MAX_NAMES = 20
"""Sources and licences listed on the page."""
_MAX_TEXT = 600
_MAX_PICTURES = 4


@dataclass(frozen=True)
class ShownSample:
    """One sample on the page."""

    name: str
    pictures: list[str]
    """Data URLs: the images of the sample; or its first image and that of the sample it repeats."""
    text: str
    notes: list[str]


@dataclass(frozen=True)
class ShownGroup:
    """The samples with one decision."""

    title: str
    num_samples: int
    examples: list[ShownSample]


def write_page(path: str | Path, out_html: str | Path, *, num_examples: int = 24) -> FolderReport:
    """Write the page.

    It shows `num_examples` of the kept samples and of those dropped for each reason, spread over the shards.
    """
    report, index = inspect(path), open_index(path)
    sections = _sections(report, _groups(index, report, num_examples))
    write_report_page(Path(out_html), str(report.path), sections)
    return report


def _groups(index: ShardIndex, report: FolderReport, num_examples: int) -> list[ShownGroup]:
    """Kept samples first, then each reason in the order of the rules."""
    counts: dict[str | None, int] = {None: report.num_kept}
    counts |= {step.reason: step.num_dropped for step in report.steps}
    chosen = _choose(index, counts, num_examples)
    return [
        ShownGroup(
            title="Kept" if reason is None else f"Dropped: {reason}",
            num_samples=number,
            examples=[_example(index, shard, row) for shard, row in chosen[reason]],
        )
        for reason, number in counts.items()
    ]


def _choose(
    index: ShardIndex, counts: Mapping[str | None, int], num_examples: int
) -> dict[str | None, list[tuple[int, int]]]:
    """Shard and row of the examples of each reason, evenly spaced over its samples."""
    wanted = {
        reason: np.unique(np.linspace(0, count - 1, min(count, num_examples)).round())
        for reason, count in counts.items()
    }
    chosen: dict[str | None, list[tuple[int, int]]] = {reason: [] for reason in counts}
    seen = dict.fromkeys(counts, 0)
    for shard in range(len(index.shards)):
        reasons = drop_reasons(index, shard)
        for reason in set(reasons.tolist()):
            rows = np.flatnonzero(reasons == reason)
            numbers = np.arange(seen[reason], seen[reason] + len(rows))
            chosen[reason] += [(shard, row) for row in rows[np.isin(numbers, wanted[reason])].tolist()]
            seen[reason] += len(rows)
    return chosen


def _example(index: ShardIndex, shard: int, row: int) -> ShownSample:
    sample = index.read_sample(shard, row)
    pictures, notes = _pictures(sample), _notes(index, shard, row)
    decisions = index.decisions(shard)
    if decisions is not None and (name := _value(decisions, "repeats_shard", row)) is not None:
        original = index.read_sample(index.shards.index(name), decisions["repeats_row"][row].as_py())
        pictures = pictures[:1] + _pictures(original)[:1]
        notes.append(f"repeats {name}/{original.key}")
    return ShownSample(f"{index.shards[shard]}/{sample.key}", pictures, _text(sample), notes)


def _notes(index: ShardIndex, shard: int, row: int) -> list[str]:
    """Size, errors and scores of a sample."""
    known = index.read(shard, ["widths", "heights", "error"]).slice(row, 1).to_pylist()[0]
    notes = [f"{width}x{height}" for width, height in zip(known["widths"], known["heights"], strict=True)][
        :_MAX_PICTURES
    ]
    notes += [known["error"]] if known["error"] else []
    decisions = index.decisions(shard)
    if is_measured(index, shard):
        features = read_features(index, shard, ["image_error", "text_error"]).slice(row, 1).to_pylist()[0]
        notes += [error for error in features.values() if error]
    if decisions is None:
        return notes
    plain = {"keep", "reason", "repeats_shard", "repeats_row"}
    scores = {name: decisions[name][row].as_py() for name in decisions.column_names if name not in plain}
    return notes + [f"{name} {score:.4g}" for name, score in scores.items() if score is not None]


def _value(decisions: pa.Table, column: str, row: int) -> Any:
    """A value of the decisions, None if they have no such column."""
    return decisions[column][row].as_py() if column in decisions.column_names else None


def _pictures(sample: Sample) -> list[str]:
    """The decodable images as small JPEGs in data URLs."""
    urls = []
    for data in images(sample)[:_MAX_PICTURES]:
        try:
            picture = Image.fromarray(load_image(data, DECODE_LIMITS))
        except ImageError:
            continue
        urls.append(thumbnail(picture, _SIDE))
    return urls


def _text(sample: Sample) -> str:
    """The text of the sample, shortened."""
    try:
        text = "\n".join(texts(sample))
    except DataError:
        return ""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"


# ------------------------------------------------------------------ sections


def _sections(report: FolderReport, groups: Sequence[ShownGroup]) -> list[str]:
    state = "kept" if report.is_curated else "readable; not curated yet"
    sections: list[str] = [paragraph(f"{report.num_kept:,} of {report.num_samples:,} samples {state} in {report.size}")]
    if report.damaged:
        rows = [(_isolated(name), damage) for name, damage in report.damaged.items()]
        sections += ["<h2>Damaged shards</h2>", table(("shard", "lost"), rows, wraps=True)]
    sections += ["<h2>Dropped samples</h2>", _dropped(report)]
    for title, counts in (("Sources", report.sources), ("Licences", report.licences)):
        if counts:
            most = list(counts.items())[:_MAX_NAMES]
            lines = [(_isolated(name), f"{kept:,}", f"{total:,}") for name, (kept, total) in most]
            sections += [f"<h2>{title}</h2>", table(("name", "kept", "all"), lines, numbers=(1, 2), wraps=True)]
            if len(counts) > _MAX_NAMES:
                sections.append(paragraph(f"and {len(counts) - _MAX_NAMES} more", "soft"))
    sections += ["<h2>Distributions</h2>", paragraph("Pale: all samples. Strong: those kept.", "soft")]
    sections.append(cards(map(_distribution, report.distributions)))
    sections.append("<h2>Examples</h2>")
    for number, group in enumerate(groups):
        title = Html(f"{escape(group.title)} <span class=soft>({group.num_samples:,})</span>")
        sections.append(details(title, cards(map(_card, group.examples)), is_open=number < 2))
    return sections


def _dropped(report: FolderReport) -> Html:
    """Number of samples that each rule dropped, and how many remain after it."""
    total = max(1, report.num_samples)
    rows: list[tuple[object, ...]] = [("all samples", "", f"{report.num_samples:,}", share_bar([(1.0, "c0")]))]
    for step in report.steps:
        bar = share_bar([(step.num_left / total, "c0"), (step.num_dropped / total, "c1")])
        rows.append((step.reason, f"{step.num_dropped:,}", f"{step.num_left:,}", bar))
    return table(("reason", "dropped", "left", ""), rows, numbers=(1, 2))


def _distribution(each: Distribution) -> str:
    bars = stacked_bars([(each.num_all, "pale"), (each.num_kept, "c0")])
    quantiles = "none kept"
    if each.quantiles:
        _, low, _, median, _, high, *_ = each.quantiles
        quantiles = f"median {median:.4g}; 1 % below {low:.4g}, 1 % above {high:.4g}"
    ends = f"{each.edges[0]:.4g} to {each.edges[-1]:.4g}"
    heading = f"<h3>{escape(each.name)}</h3>"
    return f"<div class=card>{heading}{bars}{paragraph(ends, 'soft')}{paragraph(quantiles, 'soft')}</div>"


def _card(example: ShownSample) -> str:
    shown = "".join(map(image, example.pictures)) or "<span class=soft>no image can be shown</span>"
    kind = ' class="pair"' if len(example.pictures) > 1 else ""
    lines = "".join(paragraph(_isolated(line), "soft") for line in (example.name, *example.notes))
    return f'<div class=card><div{kind}>{shown}</div><p class=text dir="auto">{escape(example.text)}</p>{lines}</div>'


def _isolated(text: str) -> Html:
    """Text whose direction of writing does not change that of its surroundings."""
    return Html(f"<bdi>{escape(text)}</bdi>")
