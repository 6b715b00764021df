"""Curation from end to end. Every step is restartable, and only the first one reads pixels.

    features (features.py)  ->  rules (rules.py)  ->  evaluation sets, duplicates  ->  index/decisions/

Every dropped sample has exactly one reason: that of the first rule it breaks, in the order of `rules.py`, then: text shared by
many images, in evaluation set, exact duplicate, near-duplicate image, near-duplicate text. Each of these looks only at the
samples still in, so the one that is kept of a group has passed all rules before.
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
from saccade.data.curate.contamination import everyone, shown_in
from saccade.data.curate.features import read_features
from saccade.data.curate.grouping import Numbers, first_of_equals
from saccade.data.curate.measuring import measure_features
from saccade.data.curate.population import Population, by_shard, gather
from saccade.data.curate.rules import SCORE_COLUMNS, Reasons, in_order, judge, scores_of
from saccade.data.curate.settings import CurationSettings
from saccade.data.index import Progress, ShardIndex, finish_decisions, open_index, write_decisions
from saccade.data.shards import ShardWriter
from saccade.data.storage import is_remote
from saccade.errors import DataError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CurationReport:
    """What was decided."""

    num_samples: int
    num_kept: int
    dropped: dict[str, int]
    """Samples by the reason they were dropped for, in the order the rules are asked."""
    absent_scores: dict[str, int]
    """Samples without a number that the settings ask for."""
    num_measured: int
    """Shards whose bytes had to be read; the others were measured before."""


def curate(
    path: str | Path,
    settings: CurationSettings,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    write_to: str | Path | None = None,
) -> CurationReport:
    """Decide on every sample of a shard folder; the decisions take effect wherever the folder is read.

    Runs on this machine, or with `ray_address` on that Ray cluster. `on_progress` hears of each measured shard. With `write_to` the
    kept samples are also copied, byte by byte, into new shards in that folder, which must not exist.
    """
    if write_to is not None and (is_remote(str(write_to)) or Path(write_to).exists()):
        raise DataError(f"{write_to}: exists already, or is remote. Choose a new local folder for the kept samples")
    index = open_index(path, num_workers=num_workers)
    num_measured = measure_features(index, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
    verdicts = _Verdicts(index, settings, num_workers)
    population = gather(index, [reasons == None for reasons in verdicts.reasons])  # noqa: E711 (elementwise)
    _LOG.info("%s: %d of %d samples pass the rules", index.path, len(population), len(index))
    population = _drop_shared_texts(population, verdicts, settings)
    population = _drop_evaluation_images(population, verdicts, settings, num_workers, ray_address)
    population = _drop_duplicates(population, verdicts, settings)
    dropped, absent_scores = verdicts.write()
    if write_to is not None:
        _write_kept(index, Path(write_to))
    return CurationReport(len(index), len(population), dropped, absent_scores, num_measured)


class _Verdicts:
    """Reasons of all samples, shard by shard, and for duplicates the sample each repeats."""

    def __init__(self, index: ShardIndex, settings: CurationSettings, num_workers: int | None) -> None:
        self._index, self._settings = index, settings
        with ThreadPoolExecutor(num_workers) as pool:
            shards = range(len(index.shards))
            self.reasons: list[Reasons] = list(pool.map(lambda shard: judge(index, shard, settings), shards))
        self._repeats: dict[int, list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]]] = {}

    def drop(
        self, samples: Population, is_dropped: NDArray[np.bool_], reason: str, repeated: Numbers | None = None
    ) -> Population:
        """Drop these samples; the others."""
        dropped = np.flatnonzero(is_dropped)
        for shard, places in by_shard(samples.shards[dropped]):
            here = dropped[places]
            self.reasons[shard][samples.rows[here]] = reason
            if repeated is not None:
                original = repeated[here]
                self._repeats.setdefault(shard, []).append(
                    (samples.rows[here], samples.shards[original], samples.rows[original])
                )
        return samples.subset(~is_dropped)

    def write(self) -> tuple[dict[str, int], dict[str, int]]:
        """Write decisions and summary; the numbers of samples by reason, and of those without a score."""
        dropped: Counter[str] = Counter()
        absent: Counter[str] = Counter()
        num_kept = 0
        for shard in range(len(self._index.shards)):
            table = self._table(shard)
            num_kept += write_decisions(self._index, shard, table)
            dropped.update(reason for reason in table["reason"].to_pylist() if reason is not None)
            absent.update({name: table[name].null_count for name in self._settings.scores})
        by_reason = in_order(dropped)
        funnel = {"samples": len(self._index), **by_reason, "kept": num_kept}
        finish_decisions(self._index, settings=encode(self._settings), funnel=funnel)
        absent = +absent
        for name, number in absent.items():
            kept_or_dropped = "kept" if self._settings.scores[name].when_absent == "keep" else "dropped"
            _LOG.warning("%d samples have no %s and are %s for that", number, name, kept_or_dropped)
        return by_reason, dict(absent)

    def _table(self, shard: int) -> pa.Table:
        """Keep, reason, the scores asked for, and where the better sample lies that a duplicate repeats (it may repeat another)."""
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


def _drop_shared_texts(samples: Population, verdicts: _Verdicts, settings: CurationSettings) -> Population:
    if settings.max_images_per_text is None:
        return samples
    first = first_of_equals(samples.text_hashes)
    num_alike = np.bincount(first[~samples.is_conversation], minlength=len(samples))[first]
    is_shared = ~samples.is_conversation & (num_alike > settings.max_images_per_text)
    return verdicts.drop(samples, is_shared, "text shared by many images")


def _drop_evaluation_images(
    samples: Population,
    verdicts: _Verdicts,
    settings: CurationSettings,
    num_workers: int | None,
    ray_address: str | None,
) -> Population:
    for path in settings.evaluation_sets:
        evaluation = everyone(path, num_workers=num_workers, ray_address=ray_address, on_progress=None)
        found, _, _ = shown_in(samples, evaluation, settings.max_hash_distance)
        is_shown = np.zeros(len(samples), bool)
        is_shown[found] = True
        samples = verdicts.drop(samples, is_shown, "in evaluation set")
    return samples


def _drop_duplicates(samples: Population, verdicts: _Verdicts, settings: CurationSettings) -> Population:
    steps = (
        ("exact duplicate", settings.exact_duplicates, duplicates.exact_duplicates),
        ("near-duplicate image", settings.near_duplicate_images, duplicates.near_duplicate_images),
        ("near-duplicate text", settings.near_duplicate_texts, duplicates.near_duplicate_texts),
    )
    for reason, is_wanted, find in steps:
        if is_wanted:
            repeated = find(samples, settings)
            samples = verdicts.drop(samples, repeated != np.arange(len(samples)), reason, repeated)
    return samples


def _write_kept(index: ShardIndex, target: Path) -> None:
    """Copy the kept samples into new shards. The folder appears when it is whole."""
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
