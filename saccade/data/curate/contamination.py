"""Find images of an evaluation set in a training set: the same bytes, or the same image after an edit.

Found are copies that were resized, encoded again, cropped by a few percent, mirrored, made brighter or grey, or that
carry a text or a logo (`image_match.SHOWN`). Every image of one set is compared with every image of the other: a matrix
product of descriptors (63 numbers each) selects pairs, thumbnails are aligned to verify them. Each image is aligned
with its closest ones of the other set. A thousand evaluation images cost 10 microseconds per training image, and 0.2 ms
for each pair that is aligned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.features import measure_features
from saccade.data.curate.image_match import SHOWN, same_picture
from saccade.data.curate.sample_table import (
    Ids,
    SampleTable,
    by_shard,
    load_samples,
    rows_of,
    sample_name,
    shards_of,
)
from saccade.data.curate.thumbnails import descriptors, split_thumbnails
from saccade.data.index import ShardIndex, open_index
from saccade.data.index_files import ShardProgress
from saccade.data.jobs import Workers, run_jobs
from saccade.data.order import Ints
from saccade.errors import DataError

_MIN_COSINE = 0.85
"""99 % of copies are above (95 % with a logo, 98 % of crops of 5 % of each side), and 3 of 10,000 pairs of other
photos."""
_CENTRE = 0.92  # share of each side in the cropped views of evaluation images
_MAX_VERIFIED = 8  # closest images of the other set that an image is aligned with, of evaluation images for each chunk
_CHUNK = 2**24  # cosines in memory at a time
_SMALL = 20_000  # training samples that this process compares itself
_PAIR = np.dtype([("training", "u8"), ("evaluation", "u8"), ("is_exact", "?")])


@dataclass(frozen=True)
class Match:
    """A training sample that shows an image of the evaluation set."""

    training: str
    """Shard and key."""
    evaluation: str
    """Shard and key of the sample whose image it shows."""
    is_exact: bool
    """Whether the bytes are the same."""


@dataclass(frozen=True)
class ContaminationReport:
    """The evaluation images that are in the training set."""

    num_training: int
    """Training samples compared."""
    num_evaluation: int
    """Evaluation samples compared."""
    matches: list[Match]
    """Pairs in the order of the training shards; every sample of either set that has a match is in at least one."""


def find_contamination(
    training_path: str | Path,
    evaluation_path: str | Path,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[ShardProgress], None] | None = None,
) -> ContaminationReport:
    """Compare all images of two shard folders, curated or not. Curation drops the matches by `evaluation_sets`."""
    training, evaluation = (open_index(path, num_workers=num_workers) for path in (training_path, evaluation_path))
    for index in (training, evaluation):
        measure_features(index, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
    workers = Workers(num_workers=1 if len(training) < _SMALL else num_workers, ray_address=ray_address)
    found = [np.zeros(0, _PAIR)] * len(training.shards)
    for outcome in run_jobs(_match, (training, EvaluationSet(evaluation)), range(len(training.shards)), workers):
        if outcome.result is None:
            raise DataError(outcome.error or "")
        found[outcome.job] = outcome.result
    pairs = np.concatenate([np.zeros(0, _PAIR), *found])
    pairs = pairs[np.argsort(~pairs["is_exact"], kind="stable")]
    pairs = pairs[_first_of_each(pairs["training"], pairs["evaluation"])]
    pairs = pairs[np.argsort(pairs["training"], kind="stable")]
    matches = [
        Match(_name(training, pair["training"]), _name(evaluation, pair["evaluation"]), bool(pair["is_exact"]))
        for pair in pairs
    ]
    return ContaminationReport(len(training), len(evaluation), matches)


def _match(sets: tuple[ShardIndex, EvaluationSet], shard: int) -> NDArray[np.void]:
    """The matches of one training shard."""
    training, evaluation = sets[0], sets[1].samples()
    samples = load_samples(training, {shard: np.ones(int(training.sizes[shard]), bool)})
    found, shown, is_exact = find_shown(samples, evaluation)
    pairs = np.empty(len(found), _PAIR)
    pairs["training"], pairs["evaluation"], pairs["is_exact"] = samples.ids[found], evaluation.ids[shown], is_exact
    return pairs


def _name(index: ShardIndex, sample: np.uint64) -> str:
    """Shard and key."""
    return sample_name(index, int(shards_of(np.array([sample]))[0]), int(rows_of(np.array([sample]))[0]))


def _first_of_each(training: Ids | Ints, evaluation: Ids | Ints) -> Ints:
    """The first pair of each sample of either set, in order."""
    return np.unique(np.concatenate([np.unique(ids, return_index=True)[1] for ids in (training, evaluation)]))


@dataclass(frozen=True)
class EvaluationSet:
    """The samples of an evaluation set; those that cannot be decoded have no images to compare. Picklable."""

    index: ShardIndex

    def samples(self) -> SampleTable:
        """All samples; those of the last sets stay in memory."""
        return _load_all(self)


@functools.lru_cache(maxsize=4)
def _load_all(evaluation: EvaluationSet) -> SampleTable:
    index = evaluation.index
    return load_samples(index, {shard: np.ones(size, bool) for shard, size in enumerate(index.sizes.tolist())})


def find_shown(training: SampleTable, evaluation: SampleTable) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Pairs of a training sample and an evaluation sample with the same image, and whether the bytes are the same.

    Every sample that is in a pair at all is in one that is returned; all pairs would be too many if both sets repeat an
    image.
    """
    exact, near = _equal_files(training, evaluation), _near_copies(training, evaluation)
    shows, shown = (np.concatenate(images) for images in zip(exact, near, strict=True))
    samples, evaluation_samples = training.images.owners[shows], evaluation.images.owners[shown]
    kept = _first_of_each(samples, evaluation_samples)  # exact ones before the closest
    return samples[kept], evaluation_samples[kept], kept < len(exact[0])


def _first_of_equals(*keys: NDArray[np.uint64]) -> Ints:
    """[items]: the first item that has the same keys, or the item itself."""
    order = np.lexsort(keys[::-1])
    is_first = np.zeros(len(order), bool)
    for key in keys:
        is_first |= np.diff(key[order], prepend=~key[order[:1]]) != 0
    firsts = order[np.flatnonzero(is_first)]
    found = np.empty(len(order), np.int64)
    found[order] = np.repeat(firsts, np.diff(np.append(np.flatnonzero(is_first), len(order))))
    return found


def _equal_files(training: SampleTable, evaluation: SampleTable) -> tuple[Ints, Ints]:
    """Training images and evaluation images with the same bytes; each image of such a pair comes at least once."""
    num_evaluation = len(evaluation.images.owners)
    contents = np.concatenate([evaluation.images.contents, training.images.contents])
    first = _first_of_equals(contents[:, 0], contents[:, 1])
    of_evaluation, of_training = first[:num_evaluation], first[num_evaluation:]
    found = np.flatnonzero(of_training < num_evaluation)
    copy = np.full(num_evaluation, -1)
    copy[of_training[found]] = found
    shown = np.flatnonzero(copy[of_evaluation] >= 0)
    return np.concatenate([found, copy[of_evaluation[shown]]]), np.concatenate([of_training[found], shown])


def _near_copies(training: SampleTable, evaluation: SampleTable) -> tuple[Ints, Ints]:
    """Training images and the evaluation images that they show; the closest pairs of each image come first."""
    shown = evaluation.thumbnails(np.arange(len(evaluation.images.owners)))
    luma, _ = split_thumbnails(shown)
    views = np.stack([descriptors(luma[:, :, ::step], centre) for step in (1, -1) for centre in (1.0, _CENTRE)])
    found = [np.zeros((2, 0), np.int64)]
    for _, images in by_shard(training.shards[training.images.owners]):
        thumbnails = training.thumbnails(images)
        for begin in range(0, len(images), max(1, _CHUNK // max(1, len(shown)))):
            part = slice(begin, begin + max(1, _CHUNK // max(1, len(shown))))
            one, other = _similar(descriptors(split_thumbnails(thumbnails[part])[0]), views)
            is_same = same_picture(thumbnails[part][one], shown[other], SHOWN)
            found.append(np.stack([images[part][one[is_same]], other[is_same]]))
    near, of = np.concatenate(found, axis=1)
    return near, of


def _similar(vectors: NDArray[np.float32], views: NDArray[np.float32]) -> tuple[Ints, Ints]:
    """Pairs of [n, 63] and [views, m, 63] descriptors with a high cosine: the highest per row and column, in order."""
    cosines = np.maximum.reduce([vectors @ view.T for view in views])
    one, other = np.nonzero(_highest_of_rows(cosines) | _highest_of_rows(cosines.T).T)
    order = np.argsort(-cosines[one, other], kind="stable")
    return one[order], other[order]


def _highest_of_rows(cosines: NDArray[np.float32]) -> NDArray[np.bool_]:
    """The mask of high cosines, at most a few in each row."""
    is_high: NDArray[np.bool_] = cosines > _MIN_COSINE
    crowded = np.flatnonzero(is_high.sum(1) > _MAX_VERIFIED)
    if crowded.size:
        lower = np.argpartition(cosines[crowded], -_MAX_VERIFIED, axis=1)[:, :-_MAX_VERIFIED]
        is_high[crowded[:, None], lower] = False
    return is_high
