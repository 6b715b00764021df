"""Curate a shard folder, on this machine or on a Ray cluster. Every stage resumes, and only the first reads pixels.

    features (features.py)  ->  rules (rules.py)  ->  evaluation sets, duplicates  ->  index/decisions/

Every dropped sample has exactly one reason: that of the first rule it breaks, in the order of `rules.py`, then: text
shared by many images, in evaluation set, exact duplicate, near-duplicate image, near-duplicate text. Each of these
steps sees only the samples that the earlier steps kept, so the one that is kept of a group has passed all earlier
rules.

The work is done in partitions of the samples (`partitions.py`), by jobs that exchange rows through files in
`index/curation-.../` (`exchange.py`). This process has counts only, and the decisions do not depend on the number of
partitions or workers, nor on what was killed on the way.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from saccade.config import encode
from saccade.data.curate import duplicates
from saccade.data.curate.contamination import EvaluationSet, find_shown
from saccade.data.curate.duplicates import Step
from saccade.data.curate.exchange import Rows, Runner
from saccade.data.curate.features import is_measured, measure_features, read_features
from saccade.data.curate.partitions import Partitions
from saccade.data.curate.rules import SCORE_COLUMNS, apply_rules, in_order, scores_of
from saccade.data.curate.sample_table import first_of_shard, rows_of, shards_of
from saccade.data.curate.settings import CurationSettings
from saccade.data.decisions import finish_decisions, write_decisions
from saccade.data.index import ShardIndex, open_index
from saccade.data.index_files import ShardProgress
from saccade.data.jobs import Workers
from saccade.data.shards import ShardPath, ShardWriter
from saccade.data.storage import is_remote
from saccade.errors import DataError

logger = logging.getLogger(__name__)
_VERSION = 2
"""Raised when a stage finds something else: what an earlier version left is not used then."""


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
    quarantined: dict[str, str]
    """Shards without features, since measuring them ended a worker three times, and how; none of their samples are
    kept."""


def curate(
    path: str | Path,
    settings: CurationSettings,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    num_partitions: int | None = None,
    on_progress: Callable[[ShardProgress], None] | None = None,
    write_to: str | Path | None = None,
) -> CurationReport:
    """Decide which samples of a shard folder are kept; the decisions apply wherever the folder is read.

    Runs on this machine, or on a Ray cluster with `ray_address`, whose machines then write features and decisions of
    remote shards next to these. An interrupted curation resumes. `num_partitions` None is one for each 262,144 samples.
    `on_progress` is called after each measured shard. With `write_to` the kept samples are also copied, byte for byte,
    into new shards in that folder, which must not exist.
    """
    if write_to is not None and (is_remote(str(write_to)) or Path(write_to).exists()):
        raise DataError(f"{write_to}: exists already, or is remote. Choose a new local folder for the kept samples")
    index = open_index(path, num_workers=num_workers, ray_address=ray_address, index_folder=_shared(path, ray_address))
    measured = measure_features(index, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
    report = decide(
        index,
        settings,
        num_workers=num_workers,
        ray_address=ray_address,
        num_partitions=num_partitions,
        quarantined=measured.quarantined,
        num_measured=measured.num_shards,
    )
    if write_to is not None:
        _write_kept(index, Path(write_to))
    return report


def _shared(path: str | Path, ray_address: str | None) -> str | None:
    """The folder of the index, if other machines write it."""
    folder = ShardPath.parse(path).folder
    return f"{folder}/index" if ray_address is not None and is_remote(folder) else None


def decide(
    index: ShardIndex,
    settings: CurationSettings,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    num_partitions: int | None = None,
    quarantined: Mapping[str, str] | None = None,
    num_measured: int = 0,
) -> CurationReport:
    """Decide on the samples of shards that have features, or are quarantined."""
    quarantined = dict(quarantined or {})
    num_samples = len(index)
    num = num_partitions or Partitions.needed(num_samples)
    sets = [_open_evaluation_set(path, num_workers, ray_address) for path in settings.evaluation_sets]
    described = repr(
        (
            _VERSION,
            index.fingerprint,
            encode(settings),
            num,
            sorted(quarantined),
            [each.index.fingerprint for each in sets],
        )
    )
    name = f"curation-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    folder = index.location.written.sub(name)
    partitions = Partitions(index, settings, folder, num)
    workers = Workers(num_workers=1 if num == 1 else num_workers, ray_address=ray_address)
    runner = Runner(folder, workers)
    before: tuple[str, ...] = ()
    for step_name, is_wanted, run in _steps(frozenset(quarantined), sets, settings):
        if is_wanted:
            run(runner, Step(partitions, step_name, before))
            before = (*before, step_name)
    num_shared = duplicates.count_shared_images(runner, Step(partitions, "kept", before))
    results = runner.run("decisions", _write_decisions, Step(partitions, "decisions", before), num)
    report = _report(index, settings, results, num_measured, num_shared, quarantined)
    folder.remove()
    return report


def _steps(
    quarantined: frozenset[str], sets: list[EvaluationSet], settings: CurationSettings
) -> list[tuple[str, bool, Callable[[Runner, Step], None]]]:
    """The steps in order, and whether the settings ask for them."""
    return [
        ("rules", True, lambda runner, step: _run_rules(runner, step, quarantined)),
        ("shared-text", settings.max_images_per_text is not None, duplicates.drop_shared_texts),
        ("evaluation", bool(sets), lambda runner, step: _run_evaluation(runner, step, sets)),
        ("exact", settings.exact_duplicates, duplicates.drop_exact_duplicates),
        ("near-image", settings.near_duplicate_images, duplicates.drop_near_duplicate_images),
        ("near-text", settings.near_duplicate_texts, duplicates.drop_near_duplicate_texts),
    ]


def _open_evaluation_set(path: str, num_workers: int | None, ray_address: str | None) -> EvaluationSet:
    index = open_index(path, num_workers=num_workers, ray_address=ray_address, index_folder=_shared(path, ray_address))
    measure_features(index, num_workers=num_workers, ray_address=ray_address)
    return EvaluationSet(index)


# ------------------------------------------------------------------ jobs


@dataclass(frozen=True)
class _Rules:
    step: Step
    quarantined: frozenset[str]


def _run_rules(runner: Runner, step: Step, quarantined: frozenset[str]) -> None:
    runner.run(step.name, _drop_by_rules, _Rules(step, quarantined), step.partitions.num_partitions)


def _drop_by_rules(rules: _Rules, partition: int) -> dict[str, int]:
    partitions = rules.step.partitions
    dropper = rules.step.dropper(partition)
    for shard in partitions.shards(partition):
        if partitions.index.shards[shard] in rules.quarantined:
            reasons = np.full(int(partitions.index.sizes[shard]), "quarantined shard", object)
        else:
            reasons = apply_rules(partitions.index, shard, partitions.settings)
        for reason in sorted(set(reasons.tolist()) - {None}):
            rows = np.flatnonzero(reasons == reason).astype(np.uint64)
            dropper.drop(first_of_shard(shard) | (rows << np.uint64(16)), reason)
    return dropper.close()


@dataclass(frozen=True)
class _Evaluation:
    step: Step
    sets: list[EvaluationSet]


def _run_evaluation(runner: Runner, step: Step, sets: list[EvaluationSet]) -> None:
    runner.run(step.name, _drop_evaluation_images, _Evaluation(step, sets), step.partitions.num_partitions)


def _drop_evaluation_images(work: _Evaluation, partition: int) -> dict[str, int]:
    dropper = work.step.dropper(partition)
    for samples in work.step.kept(partition):
        is_shown = np.zeros(len(samples), bool)
        for evaluation in work.sets:
            is_shown[find_shown(samples, evaluation.samples())[0]] = True
        dropper.drop(samples.ids[is_shown], "in evaluation set")
    return dropper.close()


def _write_decisions(step: Step, partition: int) -> dict[str, Any]:
    """Write the decisions on the shards of a partition; returns their counts."""
    partitions, index = step.partitions, step.partitions.index
    dropped = partitions.dropped(partition, step.before)
    reasons, absent, kept = Counter[str](), Counter[str](), {}
    for shard in partitions.shards(partition):
        first, last = np.searchsorted(dropped["sample"], [first_of_shard(shard), first_of_shard(shard + 1)])
        table = _decisions(partitions, shard, dropped[first:last])
        kept[index.shards[shard]] = write_decisions(index, shard, table)
        reasons.update(reason for reason in table["reason"].to_pylist() if reason is not None)
        absent.update({name: table[name].null_count for name in partitions.settings.scores})
    return {"reasons": reasons, "absent": absent, "kept": kept}


def _decisions(partitions: Partitions, shard: int, dropped: Rows) -> pa.Table:
    """The decisions on a shard: keep, reason, the scores in use, and the better sample that a duplicate repeats.

    That sample, named by shard and row, may itself repeat another one.
    """
    index, num = partitions.index, int(partitions.index.sizes[shard])
    reasons, names, originals = (np.full(num, None, object) for _ in range(3))
    rows = rows_of(dropped["sample"])
    reasons[rows] = np.array(partitions.reasons, object)[dropped["reason"]]
    repeating = dropped[dropped["repeats"]]
    names[rows_of(repeating["sample"])] = [index.shards[each] for each in shards_of(repeating["original"]).tolist()]
    originals[rows_of(repeating["sample"])] = rows_of(repeating["original"])
    if partitions.settings.scores and is_measured(index, shard):
        features = read_features(index, shard, SCORE_COLUMNS)
        scores = {name: pa.array(scores_of(features, name), from_pandas=True) for name in partitions.settings.scores}
    else:
        scores = {name: pa.nulls(num, pa.float64()) for name in partitions.settings.scores}
    reason = pa.array(reasons, pa.string())
    columns = {"keep": reason.is_null(), "reason": reason, **scores}
    return pa.table(
        columns | {"repeats_shard": pa.array(names, pa.string()), "repeats_row": pa.array(originals, pa.int32())}
    )


def _report(
    index: ShardIndex,
    settings: CurationSettings,
    results: list[dict[str, Any]],
    num_measured: int,
    num_shared: int,
    quarantined: dict[str, str],
) -> CurationReport:
    """Add up what the partitions decided, and make the decisions valid."""
    dropped, absent, kept = Counter[str](), Counter[str](), dict[str, int]()
    for result in results:
        dropped.update(result["reasons"])
        absent.update(result["absent"])
        kept.update(result["kept"])
    by_reason, num_kept = in_order(dropped), sum(kept.values())
    counts = {"samples": len(index), **by_reason, "kept": num_kept}
    finish_decisions(index, settings=encode(settings), counts=counts, kept=kept)
    for name, number in (+absent).items():
        kept_or_dropped = "kept" if settings.scores[name].when_absent == "keep" else "dropped"
        logger.warning("%d samples have no score %s and are %s", number, name, kept_or_dropped)
    return CurationReport(
        num_samples=len(index),
        num_kept=num_kept,
        dropped=by_reason,
        absent_scores=dict(+absent),
        num_measured=num_measured,
        num_shared_images=num_shared,
        damaged=index.damaged,
        quarantined=quarantined,
    )


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
