"""A shard folder as one HTML page that stands alone: funnel, distributions, examples of what was kept and dropped.

Captions and names come from strangers. The template escapes everything, the page carries no script, and its Content-Security-Policy
forbids whatever is not in the file. Pictures are decoded here and written anew as small JPEGs; the originals' bytes stay out.
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
from saccade.data.curate.funnel import Funnel, inspect, verdicts
from saccade.data.curate.page_template import PAGE, STYLE
from saccade.data.curate.settings import DECODE_LIMITS
from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import Sample, images, texts
from saccade.errors import DataError, ImageError
from saccade.files import atomic_write
from saccade.processor.image import load_image

_SIDE = 240  # of a picture on the page
_MAX_TEXT = 600
_MAX_PICTURES = 4


@dataclass(frozen=True)
class Example:
    """One sample on the page."""

    name: str
    pictures: list[str]
    """Data URLs: of the sample, and of the one it repeats."""
    text: str
    notes: list[str]


@dataclass(frozen=True)
class Group:
    """The samples of one verdict."""

    title: str
    num_samples: int
    examples: list[Example]


def write_page(path: str | Path, out_html: str | Path, *, num_examples: int = 24) -> Funnel:
    """Write the page; `num_examples` of the kept samples, and of those dropped for each reason, evenly over the shards."""
    from jinja2 import Environment, StrictUndefined

    funnel, index = inspect(path), open_index(path)
    style_hash = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; base-uri 'none'; form-action 'none'"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(PAGE).render(
        funnel=funnel, groups=_groups(index, funnel, num_examples), policy=policy, style=STYLE
    )
    with atomic_write(Path(out_html)) as hidden:
        hidden.write_text(page, encoding="utf-8", errors="replace")
    return funnel


def _groups(index: ShardIndex, funnel: Funnel, num_examples: int) -> list[Group]:
    """Kept samples first, then each reason in the order of the rules."""
    counts: dict[str | None, int] = {None: funnel.num_kept}
    counts |= {step.reason: step.num_dropped for step in funnel.steps}
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
    """Shard and row of examples for each verdict, evenly spaced over all samples that have it."""
    wanted = {
        reason: np.unique(np.linspace(0, count - 1, min(count, num_examples)).round())
        for reason, count in counts.items()
    }
    chosen: dict[str | None, list[tuple[int, int]]] = {reason: [] for reason in counts}
    seen = dict.fromkeys(counts, 0)
    for shard in range(len(index.shards)):
        verdict = verdicts(index, shard)
        for reason in set(verdict.tolist()):
            rows = np.flatnonzero(verdict == reason)
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
    """Size, what is wrong with the sample, and its scores."""
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
    """None where whoever decided wrote no such column."""
    return decisions[column][row].as_py() if column in decisions.column_names else None


def _pictures(sample: Sample) -> list[str]:
    """Small JPEGs as data URLs, of the images that can be decoded."""
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
    """What is said in the sample, shortened."""
    try:
        text = "\n".join(texts(sample))
    except DataError:
        return ""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"
