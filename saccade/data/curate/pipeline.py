"""Curate a shard folder. Every step is restartable, and only the first one reads pixels.

    features (features.py)  ->  rules (rules.py)  ->  evaluation sets, duplicates  ->  index/decisions/

Every dropped sample has exactly one reason: that of the first rule it breaks, in the order of `rules.py`, then: text
shared by many images, in evaluation set, exact duplicate, near-duplicate image, near-duplicate text. Each of these
steps sees only the samples that the earlier steps kept, so the one that is kept of a group has passed all earlier
rules.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from saccade.config import encode
from saccade.data.curate import duplicates
from saccade.data.curate.contamination import find_shown, load_all_samples
from saccade.data.curate.features import measure_features, read_features
from saccade.data.curate.rules import SCORE_COLUMNS, Reasons, apply_rules, in_order, scores_of
from saccade.data.curate.sample_table import SampleTable, by_shard, load_samples
from saccade.data.curate.settings import CurationSettings
from saccade.data.decisions import finish_decisions, write_decisions
from saccade.data.index import ShardIndex, open_index
from saccade.data.index_files import ShardProgress
from saccade.data.order import Ints
from saccade.data.shards import ShardWriter
from saccade.data.storage import is_remote
from saccade.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CurationReport:
    """Counts of the decisions."""

    num_samples: int
    num_kept: int
    dropped: dict[str, int]
    """Dropped samples by reason, in the order of the rules."""
    absent_scores: dict[str, int]
    """Samples without a score that the settings use."""
    num_measured: int
    """Shards measured by this run; the others had features already."""
    num_shared_images: int
    """Kept samples whose image file another kept sample has as well, with another text: one caption per row, for
    instance."""
    damaged: dict[str, str]
    """Damaged shards, and where."""


def curate(
    path: str | Path,
    settings: CurationSettings,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[ShardProgress], None] | None = None,
    write_to: str | Path | None = None,
) -> CurationReport:
    """Decide which samples of a shard folder are kept; the decisions apply wherever the folder is read.

    Runs on this machine, or on a Ray cluster with `ray_address`. `on_progress` is called after each measured shard.
    With `write_to` the kept samples are also copied, byte for byte, into new shards in that folder, which must not
    exist.
    """
    if write_to is not None and (is_remote(str(write_to)) or Path(write_to).exists()):
        raise DataError(f"{write_to}: exists already, or is remote. Choose a new local folder for the kept samples")
    index = open_index(path, num_workers=num_workers)
    measured = measure_features(index, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
    decisions = _Decisions(index, settings, num_workers)
    samples = load_samples(index, [reasons == None for reasons in decisions.reasons])  # noqa: E711 (elementwise)
    logger.info("%s: %d of %d samples pass the rules", index.path, len(samples), len(index))
    samples = _drop_shared_texts(samples, decisions, settings)
    samples = _drop_evaluation_images(samples, decisions, settings, num_workers, ray_address)
    samples = _drop_duplicates(samples, decisions, settings)
    dropped, absent_scores = decisions.write()
    if write_to is not None:
        _write_kept(index, Path(write_to))
    num_shared = duplicates.num_shared_images(samples)
    return CurationReport(
        len(index), len(samples), dropped, absent_scores, measured.num_shards, num_shared, index.damaged
    )


class _Decisions:
    """The reason of every dropped sample, shard by shard, and for duplicates the sample each repeats."""

    def __init__(self, index: ShardIndex, settings: CurationSettings, num_workers: int | None) -> None:
        self._index, self._settings = index, settings
        with ThreadPoolExecutor(num_workers) as pool:
            shards = range(len(index.shards))
            self.reasons: list[Reasons] = list(pool.map(lambda shard: apply_rules(index, shard, settings), shards))
        self._repeats: dict[int, list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]]] = {}

    def drop(
        self, samples: SampleTable, is_dropped: NDArray[np.bool_], reason: str, repeated: Ints | None = None
    ) -> SampleTable:
        """Drop samples; returns the others."""
        dropped = np.flatnonzero(is_dropped)
        for shard, positions in by_shard(samples.shards[dropped]):
            here = dropped[positions]
            self.reasons[shard][samples.rows[here]] = reason
            if repeated is not None:
                original = repeated[here]
                self._repeats.setdefault(shard, []).append(
                    (samples.rows[here], samples.shards[original], samples.rows[original])
                )
        return samples.subset(~is_dropped)

    def write(self) -> tuple[dict[str, int], dict[str, int]]:
        """Write decisions and summary; returns dropped samples by reason, and samples without a score."""
        dropped: Counter[str] = Counter()
        absent: Counter[str] = Counter()
        num_kept = 0
        for shard in range(len(self._index.shards)):
            table = self._table(shard)
            num_kept += write_decisions(self._index, shard, table)
            dropped.update(reason for reason in table["reason"].to_pylist() if reason is not None)
            absent.update({name: table[name].null_count for name in self._settings.scores})
        by_reason = in_order(dropped)
        counts = {"samples": len(self._index), **by_reason, "kept": num_kept}
        finish_decisions(self._index, settings=encode(self._settings), counts=counts)
        absent = +absent
        for name, number in absent.items():
            kept_or_dropped = "kept" if self._settings.scores[name].when_absent == "keep" else "dropped"
            logger.warning("%d samples have no score %s and are %s", number, name, kept_or_dropped)
        return by_reason, dict(absent)

    def _table(self, shard: int) -> pa.Table:
        """The decisions on a shard: keep, reason, the scores in use, and the better sample that a duplicate repeats.

        That sample, named by shard and row, may itself repeat another one.
        """
        reasons = pa.array(self.reasons[shard], pa.string())
        features = read_features(self._index, shard, SCORE_COLUMNS)
        scores = {name: pa.array(scores_of(features, name), from_pandas=True) for name in self._settings.scores}
        names = np.full(len(reasons), None, object)
        rows = np.full(len(reasons), None, object)
        for repeating, shards, originals in self._repeats.get(shard, []):
            names[repeating] = [self._index.shards[original] for original in shards]
            rows[repeating] = originals
        columns = {"keep": reasons.is_null(), "reason": reasons, **scores}
        return pa.table(
            columns | {"repeats_shard": pa.array(names, pa.string()), "repeats_row": pa.array(rows, pa.int32())}
        )


def _drop_shared_texts(samples: SampleTable, decisions: _Decisions, settings: CurationSettings) -> SampleTable:
    if settings.max_images_per_text is None:
        return samples
    first = duplicates.first_of_equals(samples.text_hashes)
    num_shared = np.bincount(first[~samples.is_conversation], minlength=len(samples))[first]
    is_shared = ~samples.is_conversation & (num_shared > settings.max_images_per_text)
    return decisions.drop(samples, is_shared, "text shared by many images")


def _drop_evaluation_images(
    samples: SampleTable,
    decisions: _Decisions,
    settings: CurationSettings,
    num_workers: int | None,
    ray_address: str | None,
) -> SampleTable:
    for path in settings.evaluation_sets:
        evaluation = load_all_samples(path, num_workers=num_workers, ray_address=ray_address, on_progress=None)
        found, _, _ = find_shown(samples, evaluation)
        is_shown = np.zeros(len(samples), bool)
        is_shown[found] = True
        samples = decisions.drop(samples, is_shown, "in evaluation set")
    return samples


def _drop_duplicates(samples: SampleTable, decisions: _Decisions, settings: CurationSettings) -> SampleTable:
    steps = (
        ("exact duplicate", settings.exact_duplicates, duplicates.exact_duplicates),
        ("near-duplicate image", settings.near_duplicate_images, duplicates.near_duplicate_images),
        ("near-duplicate text", settings.near_duplicate_texts, duplicates.near_duplicate_texts),
    )
    for reason, is_wanted, find in steps:
        if is_wanted:
            repeated = find(samples, settings)
            samples = decisions.drop(samples, repeated != np.arange(len(samples)), reason, repeated)
    return samples


def _write_kept(index: ShardIndex, target: Path) -> None:
    """Copy the kept samples into new shards. The folder appears once it is complete."""
    hidden = target.with_name(f".{target.name}.part")
    shutil.rmtree(hidden, ignore_errors=True)
    keys: set[str] = set()
    with ShardWriter(hidden) as writer:
        for shard in range(len(index.shards)):
            for row in index.kept(shard).tolist():
                sample = index.read_sample(shard, row, verify=True)
                if sample.key in keys:  # two shards may use the same key; one may not
                    writer.close()
                writer.write(sample)
                if writer.num_pending == 1:
                    keys.clear()
                keys.add(sample.key)
    hidden.replace(target)
