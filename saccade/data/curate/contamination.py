"""Images of an evaluation set among those of a training set: the same bytes, or the same picture resized or encoded anew.

A score on images that were trained on is worth nothing. The check compares every image of both sides, also those of samples with
several; crops and repainted copies are not found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.duplicates import close_pairs
from saccade.data.curate.grouping import Numbers, first_of_equals
from saccade.data.curate.image_hash import thumbnails_agree
from saccade.data.curate.measuring import measure_features
from saccade.data.curate.population import Population, gather
from saccade.data.curate.settings import CurationSettings
from saccade.data.index import Progress, open_index


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
    """What of an evaluation set is in a training set."""

    num_training: int
    """Samples looked at."""
    num_evaluation: int
    matches: list[Match]
    """One for each training sample that shows an image of the evaluation set, in the order of the training shards."""


def find_contamination(
    training_path: str | Path,
    evaluation_path: str | Path,
    *,
    max_hash_distance: int = CurationSettings.max_hash_distance,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ContaminationReport:
    """Compare all images of two shard folders, whatever was decided on them. Curation drops them by `evaluation_sets`."""
    training, evaluation = (
        everyone(path, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
        for path in (training_path, evaluation_path)
    )
    found, shown, is_exact = shown_in(training, evaluation, max_hash_distance)
    order = np.lexsort((training.rows[found], training.shards[found]))
    matches = [
        Match(training.name(int(found[n])), evaluation.name(int(shown[n])), bool(is_exact[n])) for n in order.tolist()
    ]
    return ContaminationReport(len(training), len(evaluation), matches)


def everyone(
    path: str | Path,
    *,
    num_workers: int | None,
    ray_address: str | None,
    on_progress: Callable[[Progress], None] | None,
) -> Population:
    """All samples of a folder; those that cannot be decoded have no images to compare."""
    index = open_index(path, num_workers=num_workers)
    measure_features(index, num_workers=num_workers, ray_address=ray_address, on_progress=on_progress)
    return gather(index, [np.ones(size, bool) for size in index.sizes])


def shown_in(
    training: Population, evaluation: Population, max_hash_distance: int
) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
    """Training samples that show an evaluation image, a sample that has that image, and whether the bytes are the same."""
    num_evaluation = len(evaluation.images.owners)
    contents = np.concatenate([evaluation.images.contents, training.images.contents])
    first = first_of_equals(contents[:, 0], contents[:, 1])[num_evaluation:]
    exact = np.flatnonzero(first < num_evaluation)

    # Evaluation images come first, so in a bucket it is they that all others are compared with.
    better, worse = close_pairs(np.concatenate([evaluation.images.hashes, training.images.hashes]), max_hash_distance)
    across = (better < num_evaluation) & (worse >= num_evaluation)
    shown, near = better[across], worse[across] - num_evaluation
    thumbnails = np.concatenate([evaluation.thumbnails(shown), training.thumbnails(near)])
    pairs = np.arange(len(near))
    agree = thumbnails_agree(thumbnails, pairs, pairs + len(near))

    training_images = np.concatenate([exact, near[agree]])
    evaluation_images = np.concatenate([first[exact], shown[agree]])
    samples, once = np.unique(training.images.owners[training_images], return_index=True)  # exact ones come first
    return samples, evaluation.images.owners[evaluation_images[once]], once < len(exact)
