"""The curation report of a shard folder: its contents, what was kept, and why the rest was dropped, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from saccade.data.curate.features import flat, is_measured, read_features
from saccade.data.curate.rules import SCORE_COLUMNS, in_order, scores_of
from saccade.data.index import ShardIndex, open_index
from saccade.data.lengths import Lengths

QUANTILES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)
_NUM_BINS = 32
_NOT_SCORES = frozenset({"width", "height", "original_width", "original_height", "key", "id", "image_id", "seed"})
"""Numbers in the json that are not scores."""
_MAX_SCORES = 8
_UNKNOWN = "unknown"
_UNUSABLE = "unreadable sample"


@dataclass(frozen=True)
class DroppedBy:
    """The samples dropped for one reason, and those that remain."""

    reason: str
    num_dropped: int
    num_left: int


@dataclass(frozen=True)
class Distribution:
    """A quantity over all samples and over the kept ones."""

    name: str
    quantiles: tuple[float, ...]
    """Quantiles of the kept samples, at `QUANTILES`; empty if none are kept."""
    edges: list[float]
    """Edges of the bins: evenly spaced, or in equal ratios if the values span decades."""
    num_all: list[int]
    """Values in each bin."""
    num_kept: list[int]


@dataclass(frozen=True)
class FolderReport:
    """Contents of a shard folder and the decisions on them."""

    path: str
    num_shards: int
    num_bytes: int
    num_samples: int
    num_kept: int
    is_curated: bool
    """Without decisions, every readable sample counts as kept."""
    damaged: dict[str, str]
    """Damaged shards, and where."""
    steps: list[DroppedBy]
    sources: dict[str, tuple[int, int]]
    """Kept and all samples of each source, the largest first."""
    licences: dict[str, tuple[int, int]]
    distributions: list[Distribution]

    @property
    def size(self) -> str:
        """Number of shards and bytes, as text."""
        unit, name = (2**30, "GiB") if self.num_bytes >= 2**30 else (2**20, "MiB")
        return f"{self.num_shards} shard{'s' * (self.num_shards != 1)}, {self.num_bytes / unit:.1f} {name}"

    def lines(self) -> list[str]:
        """The report as lines for a terminal."""
        share = self.num_kept / self.num_samples if self.num_samples else 0.0
        state = "kept" if self.is_curated else "readable, not curated yet"
        lines = [
            f"{self.path}: {self.size}",
            f"{self.num_kept:,} of {self.num_samples:,} samples {state} ({share:.1%})",
        ]
        lines += [f"  damaged shard {name}: {damage}" for name, damage in self.damaged.items()]
        width = max([len(step.reason) for step in self.steps], default=0)
        lines += [
            f"  {step.reason:<{width}}  -{step.num_dropped:<11,} {step.num_left:>12,} left" for step in self.steps
        ]
        for title, counts in (("source", self.sources), ("licence", self.licences)):
            lines += [f"  {title} {name}: {kept:,} of {total:,}" for name, (kept, total) in list(counts.items())[:10]]
        lines += [f"  {each.name}: " + _quantile_line(each.quantiles) for each in self.distributions]
        return lines


def _quantile_line(quantiles: Sequence[float]) -> str:
    if not quantiles:
        return "none kept"
    names = ("min", "1%", "25%", "median", "75%", "99%", "max")
    return "  ".join(f"{name} {value:.4g}" for name, value in zip(names, quantiles, strict=True))


def inspect(path: str | Path) -> FolderReport:
    """Count kept and dropped samples by reason, source and licence; with distributions of sizes, texts and scores."""
    index = open_index(path)
    reasons: Counter[str] = Counter()
    sources: Counter[tuple[str, bool]] = Counter()
    licences: Counter[tuple[str, bool]] = Counter()
    gathered: dict[str, list[tuple[NDArray[np.float64], NDArray[np.bool_]]]] = {}
    for shard in range(len(index.shards)):
        dropped = drop_reasons(index, shard)
        is_kept = dropped == None  # noqa: E711 (elementwise)
        reasons.update(dropped[~is_kept].tolist())
        for column, counter in (("source", sources), ("licence", licences)):
            names = index.read(shard, [column])[column].fill_null(_UNKNOWN).to_pylist()
            counter.update(zip(names, is_kept.tolist(), strict=True))
        for name, values, rows in _quantities(index, shard):
            gathered.setdefault(name, []).append((values.astype(np.float64), is_kept[rows]))
    parts = {name: tuple(map(np.concatenate, zip(*found, strict=True))) for name, found in gathered.items()}
    return FolderReport(
        path=str(path),
        num_shards=len(index.shards),
        num_bytes=sum(entry.num_bytes for entry in index.entries),
        num_samples=len(index),
        num_kept=len(index) - reasons.total(),
        is_curated=index.summary() is not None,
        damaged=index.damaged,
        steps=_steps(len(index), reasons),
        sources=_kept_and_all(sources),
        licences=_kept_and_all(licences) if {name for name, _ in licences} != {_UNKNOWN} else {},
        distributions=[distribution(name, *values) for name, values in parts.items() if len(values[0])],
    )


def drop_reasons(index: ShardIndex, shard: int) -> NDArray[np.object_]:
    """Why each sample of a shard is dropped, None if it is kept. Without decisions the index alone counts."""
    reasons = np.full(int(index.sizes[shard]), None, object)
    reasons[index.read(shard, ["error"])["error"].is_valid().to_numpy()] = _UNUSABLE
    decisions = index.decisions(shard)
    if decisions is not None:
        is_dropped = ~decisions["keep"].to_numpy()
        reasons[is_dropped] = decisions["reason"].fill_null("no reason given").to_numpy()[is_dropped]
    return reasons


def _steps(num_samples: int, reasons: Counter[str]) -> list[DroppedBy]:
    steps = []
    for reason, num_dropped in in_order(reasons).items():
        num_samples -= num_dropped
        steps.append(DroppedBy(reason, num_dropped, num_samples))
    return steps


def _kept_and_all(counts: Counter[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    names = {name for name, _ in counts}
    found = {name: (counts[name, True], counts[name, True] + counts[name, False]) for name in names}
    return dict(sorted(found.items(), key=lambda item: (-item[1][1], item[0])))


def _quantities(index: ShardIndex, shard: int) -> Iterator[tuple[str, NDArray[np.generic], NDArray[np.int64]]]:
    """Every quantity with a distribution: its name, its values, and the row of each."""
    known = index.read(shard, ["widths", "heights"])
    (widths, rows), (heights, _) = flat(known["widths"]), flat(known["heights"])
    has_size = widths.is_valid().to_numpy(zero_copy_only=False)
    width, height = (side.fill_null(1).to_numpy()[has_size] for side in (widths, heights))
    yield "image width", width, rows[has_size]
    yield "image height", height, rows[has_size]
    yield "aspect ratio (width / height)", width / height, rows[has_size]
    for lengths in _finished_lengths(index):
        tokens, patches = lengths.of_shard(shard)
        every = np.arange(len(tokens))
        is_measured_row = tokens.counts(every) > 0
        yield "tokens of the first text", tokens.select(every, 0)[is_measured_row], every[is_measured_row]
        yield "image patches", patches[is_measured_row], every[is_measured_row]
    if is_measured(index, shard):
        features = read_features(index, shard, ["texts", "num_words", *SCORE_COLUMNS])
        texts, rows = flat(features["texts"])
        yield "text length in characters", pc.utf8_length(texts).to_numpy(), rows
        yield "text length in words", flat(features["num_words"])[0].to_numpy(), rows
        names = Counter(flat(features["score_names"])[0].to_pylist()).most_common()
        for name in [name for name, _ in names if name not in _NOT_SCORES][:_MAX_SCORES]:
            scores = scores_of(features, name)
            rows = np.flatnonzero(~np.isnan(scores))
            yield f"score {name}", scores[rows], rows


def _finished_lengths(index: ShardIndex) -> list[Lengths]:
    """The lengths of one processor that measured every shard; empty if none did."""
    folders = sorted(path.name for path in index.folder.glob("lengths-*"))
    found = [Lengths(index, name.removeprefix("lengths-")) for name in folders]
    return [lengths for lengths in found if not lengths.missing()][:1]


def distribution(name: str, values: NDArray[np.float64], is_kept: NDArray[np.bool_]) -> Distribution:
    """Quantiles and histogram of at least one value."""
    low, high = float(values.min()), float(values.max())
    if low > 0 and high > 50 * low:
        edges = np.geomspace(low, high, _NUM_BINS + 1)
    else:
        edges = np.linspace(low, high if high > low else low + 1, _NUM_BINS + 1)
    edges[-1] = max(edges[-1], high)
    kept = values[is_kept]
    return Distribution(
        name=name,
        quantiles=tuple(np.quantile(kept, QUANTILES).tolist()) if len(kept) else (),
        edges=edges.tolist(),
        num_all=np.histogram(values, edges)[0].tolist(),
        num_kept=np.histogram(kept, edges)[0].tolist(),
    )
