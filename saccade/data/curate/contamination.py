"""Find images of an evaluation set in a training set: the same bytes, or the same image after an edit.

Found are copies that were resized, encoded again, cropped by a few percent, mirrored, made brighter or grey, or that carry a text
or a logo (`image_match.SHOWN`). Every image of one set is compared with every image of the other: a matrix product of descriptors
(63 numbers each) selects pairs, thumbnails are aligned to verify them. A thousand evaluation images cost 10 microseconds per training
image, and 0.2 ms for each pair that is aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.duplicates import first_of_equals
from saccade.data.curate.features import measure_features
from saccade.data.curate.image_hash import descriptors, split_thumbnails
from saccade.data.curate.image_match import SHOWN, same_picture
from saccade.data.curate.sample_table import Ints, SampleTable, by_shard, load_samples
from saccade.data.index import Progress, open_index

_MIN_COSINE = 0.85  # copies: 99 % are above but for logos (95 %) and crops of 5 % of each side (98 %); other photos: 3 of 10,000 pairs
_CENTRE = 0.92  # share of each side in the cropped views of evaluation images
_MAX_VERIFIED = 8  # evaluation images that a training image is aligned with
_CHUNK = 2**24  # cosines in memory at a time


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
    """Which evaluation images are in the training set."""

    num_training: int
    """Training samples compared."""
    num_evaluation: int
    """Evaluation samples compared."""
    matches: list[Match]
    """One for each training sample that shows an evaluation image, in the order of the training shards."""


def find_contamination(
    training_path: str | Path,
    evaluation_path: str | Path,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ContaminationReport:
    """Compare all images of two shard folders, curated or not. Curation drops the matches by `evaluation_sets`."""
    training, evaluation = (
        load_all_samples(path, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
        for path in (training_path, evaluation_path)
    )
    found, shown, is_exact = find_shown(training, evaluation)
    order = np.lexsort((training.rows[found], training.shards[found]))
    matches = [
        Match(training.name(int(found[n])), evaluation.name(int(shown[n])), bool(is_exact[n])) for n in order.tolist()
    ]
    return ContaminationReport(len(training), len(evaluation), matches)


def load_all_samples(
    path: str | Path,
    *,
    num_workers: int | None,
    ray_address: str | None,
    on_progress: Callable[[Progress], None] | None,
) -> SampleTable:
    """All samples of a folder; those that cannot be decoded have no images to compare."""
    index = open_index(path, num_workers=num_workers)
    measure_features(index, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
    return load_samples(index, [np.ones(size, bool) for size in index.sizes])


def find_shown(training: SampleTable, evaluation: SampleTable) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Training samples that show an evaluation image, a sample that has that image, and whether the bytes are the same."""
    num_evaluation = len(evaluation.images.owners)
    contents = np.concatenate([evaluation.images.contents, training.images.contents])
    first = first_of_equals(contents[:, 0], contents[:, 1])[num_evaluation:]
    exact = np.flatnonzero(first < num_evaluation)
    near, shown = _near_copies(training, evaluation)

    training_images = np.concatenate([exact, near])
    evaluation_images = np.concatenate([first[exact], shown])
    samples, once = np.unique(training.images.owners[training_images], return_index=True)  # exact matches come first
    return samples, evaluation.images.owners[evaluation_images[once]], once < len(exact)


def _near_copies(training: SampleTable, evaluation: SampleTable) -> tuple[Ints, Ints]:
    """Training images, and the evaluation image each of them shows."""
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
    """Pairs of [n, 63] and [views, m, 63] descriptors of a high cosine, at most a few for each of the n, the highest first."""
    cosines = np.maximum.reduce([vectors @ view.T for view in views])
    if cosines.shape[1] > _MAX_VERIFIED:
        best = np.argpartition(cosines, -_MAX_VERIFIED, axis=1)[:, -_MAX_VERIFIED:]
    else:
        best = np.tile(np.arange(cosines.shape[1]), (len(cosines), 1))
    order = np.argsort(-np.take_along_axis(cosines, best, axis=1), axis=1)
    best = np.take_along_axis(best, order, axis=1)
    one, rank = np.nonzero(np.take_along_axis(cosines, best, axis=1) > _MIN_COSINE)
    return one, best[one, rank]
