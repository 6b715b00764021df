"""The curation report as one self-contained HTML page, with examples of what was kept and dropped.

Captions and names are untrusted. The template escapes everything, the page has no script, and its Content-Security-Policy forbids
whatever is not in the file. Images are decoded and re-encoded as small JPEGs; the original bytes are not embedded.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from saccade.data.curate.features import is_measured, read_features
from saccade.data.curate.report import FolderReport, drop_reasons, inspect
from saccade.data.curate.settings import DECODE_LIMITS
from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import Sample, images, texts
from saccade.errors import DataError, ImageError
from saccade.files import atomic_write
from saccade.processor.image import load_image

_SIDE = 240  # of an image on the page
_MAX_TEXT = 600
_MAX_PICTURES = 4


@dataclass(frozen=True)
class Example:
    """One sample on the page."""

    name: str
    pictures: list[str]
    """Data URLs: the images of the sample, or one of it and one of the sample it repeats."""
    text: str
    notes: list[str]


@dataclass(frozen=True)
class Group:
    """The samples with one decision."""

    title: str
    num_samples: int
    examples: list[Example]


def write_page(path: str | Path, out_html: str | Path, *, num_examples: int = 24) -> FolderReport:
    """Write the page, with `num_examples` of the kept samples and of those dropped for each reason, spread over the shards."""
    from jinja2 import Environment, StrictUndefined

    report, index = inspect(path), open_index(path)
    style_hash = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; base-uri 'none'; form-action 'none'"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(_PAGE).render(
        report=report, groups=_groups(index, report, num_examples), policy=policy, style=_STYLE
    )
    with atomic_write(Path(out_html)) as hidden:
        hidden.write_text(page, encoding="utf-8", errors="replace")
    return report


def _groups(index: ShardIndex, report: FolderReport, num_examples: int) -> list[Group]:
    """Kept samples first, then each reason in the order of the rules."""
    counts: dict[str | None, int] = {None: report.num_kept}
    counts |= {step.reason: step.num_dropped for step in report.steps}
    chosen = _choose(index, counts, num_examples)
    return [
        Group(
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


def _example(index: ShardIndex, shard: int, row: int) -> Example:
    sample = index.read_sample(shard, row)
    pictures, notes = _pictures(sample), _notes(index, shard, row)
    decisions = index.decisions(shard)
    if decisions is not None and (name := _value(decisions, "repeats_shard", row)) is not None:
        original = index.read_sample(index.shards.index(name), decisions["repeats_row"][row].as_py())
        pictures = pictures[:1] + _pictures(original)[:1]
        notes.append(f"repeats {name}/{original.key}")
    return Example(f"{index.shards[shard]}/{sample.key}", pictures, _text(sample), notes)


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
    """A value of the decisions, None where they have no such column."""
    return decisions[column][row].as_py() if column in decisions.column_names else None


def _pictures(sample: Sample) -> list[str]:
    """The decodable images as small JPEGs in data URLs."""
    urls = []
    for data in images(sample)[:_MAX_PICTURES]:
        try:
            picture = Image.fromarray(load_image(data, DECODE_LIMITS))
        except ImageError:
            continue
        picture.thumbnail((_SIDE, _SIDE))
        encoded = io.BytesIO()
        picture.save(encoded, "JPEG", quality=75)
        urls.append(f"data:image/jpeg;base64,{base64.b64encode(encoded.getvalue()).decode()}")
    return urls


def _text(sample: Sample) -> str:
    """The text of the sample, shortened."""
    try:
        text = "\n".join(texts(sample))
    except DataError:
        return ""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"


# ------------------------------------------------------------------ style sheet and template

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --ink: #1d1d1f; --soft: #6b6b70; --line: #e3e3e1; --card: #ffffff; --kept: #2f6fab; --all: #c9d6e2; --drop: #b4532a; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #17181a; --ink: #ececea; --soft: #a0a1a6; --line: #303236; --card: #1f2124; --kept: #6fa8dc; --all: #3a4652; --drop: #e08a5f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 2.5rem 1.5rem 4rem; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; font-weight: normal; overflow-wrap: anywhere; }
th { color: var(--soft); }
td.number, th.number { text-align: right; white-space: nowrap; }
td.bar { width: 40%; }
svg { display: block; width: 100%; }
.left { fill: var(--kept); } .gone { fill: var(--drop); } .all { fill: var(--all); } .kept { fill: var(--kept); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .75rem; overflow: hidden; }
.card h3 { font-size: .9rem; margin: 0 0 .5rem; }
.card .soft { font-size: .8rem; overflow-wrap: anywhere; }
.ends { display: flex; justify-content: space-between; }
.pictures { display: flex; gap: .5rem; align-items: center; min-height: 4rem; }
.pictures img { max-width: 100%; max-height: 180px; min-width: 0; border-radius: 4px; background: var(--line); }
.pair img { max-width: 48%; }
.text { margin: .5rem 0 .25rem; max-height: 7.5em; overflow: auto; overflow-wrap: anywhere; white-space: pre-line; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; padding: .25rem 0; }
details[open] summary { margin-bottom: .75rem; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.path }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ report.path }}</h1>
<p>{{ "{:,}".format(report.num_kept) }} of {{ "{:,}".format(report.num_samples) }} samples
{{ "kept" if report.is_curated else "readable; not curated yet" }}
<span class="soft">in {{ report.size }}</span></p>

{% if report.damaged %}
<h2>Damaged shards</h2>
<table>
<tr><th>shard</th><th>lost</th></tr>
{% for name, damage in report.damaged.items() %}
<tr><td><bdi>{{ name }}</bdi></td><td>{{ damage }}</td></tr>
{% endfor %}
</table>
{% endif %}

<h2>Dropped samples</h2>
<table>
<tr><th>reason</th><th class="number">dropped</th><th class="number">left</th><th></th></tr>
<tr><td>all samples</td><td></td><td class="number">{{ "{:,}".format(report.num_samples) }}</td>
<td class="bar"><svg viewBox="0 0 1000 16" height="16" preserveAspectRatio="none"><rect class="left" width="1000" height="16"/></svg></td></tr>
{% for step in report.steps %}
<tr><td>{{ step.reason }}</td><td class="number">{{ "{:,}".format(step.num_dropped) }}</td><td class="number">{{ "{:,}".format(step.num_left) }}</td>
<td class="bar"><svg viewBox="0 0 1000 16" height="16" preserveAspectRatio="none">
<rect class="left" width="{{ 1000 * step.num_left / report.num_samples }}" height="16"/>
<rect class="gone" x="{{ 1000 * step.num_left / report.num_samples }}" width="{{ 1000 * step.num_dropped / report.num_samples }}" height="16"/>
</svg></td></tr>
{% endfor %}
</table>

{% for title, counts in (("Sources", report.sources), ("Licences", report.licences)) if counts %}
<h2>{{ title }}</h2>
<table>
<tr><th>name</th><th class="number">kept</th><th class="number">all</th></tr>
{% for name, (kept, total) in (counts.items() | list)[:20] %}
<tr><td><bdi>{{ name }}</bdi></td><td class="number">{{ "{:,}".format(kept) }}</td><td class="number">{{ "{:,}".format(total) }}</td></tr>
{% endfor %}
</table>
{% if counts | length > 20 %}<p class="soft">and {{ counts | length - 20 }} more</p>{% endif %}
{% endfor %}

<h2>Distributions</h2>
<p class="soft">Pale: all samples. Strong: those kept.</p>
<div class="cards">
{% for each in report.distributions %}
{% set top = [each.num_all | max, 1] | max %}
<div class="card"><h3>{{ each.name }}</h3>
<svg viewBox="0 0 {{ 10 * each.num_all | length }} 100" height="110" preserveAspectRatio="none">
{% for count in each.num_all %}<rect class="all" x="{{ 10 * loop.index0 }}" y="{{ 100 - 100 * count / top }}" width="9" height="{{ 100 * count / top }}"/>{% endfor %}
{% for count in each.num_kept %}<rect class="kept" x="{{ 10 * loop.index0 }}" y="{{ 100 - 100 * count / top }}" width="9" height="{{ 100 * count / top }}"/>{% endfor %}
</svg>
<div class="soft ends"><span>{{ "%.4g" | format(each.edges[0]) }}</span><span>{{ "%.4g" | format(each.edges[-1]) }}</span></div>
<p class="soft">{% if each.quantiles %}median {{ "%.4g" | format(each.quantiles[3]) }}; 1 % below {{ "%.4g" | format(each.quantiles[1]) }}, 1 % above {{ "%.4g" | format(each.quantiles[5]) }}{% else %}none kept{% endif %}</p>
</div>
{% endfor %}
</div>

<h2>Examples</h2>
{% for group in groups %}
<details{{ " open" if loop.index <= 2 }}>
<summary>{{ group.title }} <span class="soft">({{ "{:,}".format(group.num_samples) }})</span></summary>
<div class="cards">
{% for example in group.examples %}
<div class="card">
<div class="pictures{{ " pair" if example.pictures | length > 1 }}">
{% for picture in example.pictures %}<img alt="" src="{{ picture }}">{% else %}<span class="soft">no image can be shown</span>{% endfor %}
</div>
<p class="text" dir="auto">{{ example.text }}</p>
<p class="soft"><bdi>{{ example.name }}</bdi></p>
{% for note in example.notes %}<p class="soft"><bdi>{{ note }}</bdi></p>{% endfor %}
</div>
{% endfor %}
</div>
</details>
{% endfor %}
</body>
</html>
"""
