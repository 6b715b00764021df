"""Step three of curation: samples that are there already.

    exact              the same image bytes, in the same order
    near, by image     the same images resized or encoded anew: hashes share a band, are close, and thumbnails agree
    near, by text      texts of a Jaccard similarity above the threshold

Each finds for every sample the better one it repeats. What counts as the same sample is the image alone where it carries captions
(or image and text, by `keep_one_per`), and image and text where it carries questions or a conversation: two questions about
one chart are two samples. Samples without images repeat each other when their texts are equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.grouping import (
    Numbers,
    Pairs,
    candidate_pairs,
    first_of_equals,
    leaders,
    settle,
    verified_pairs,
)
from saccade.data.curate.image_hash import NUM_BANDS, band_keys, hash_distances, thumbnails_agree
from saccade.data.curate.population import Population
from saccade.data.curate.settings import CurationSettings
from saccade.data.curate.text_hash import similarity


def exact_duplicates(samples: Population, settings: CurationSettings) -> Numbers:
    """[n]: the first sample with the same image bytes, itself where it is the first."""
    contents = samples.images.contents
    keys = [_sequence_keys(contents[:, half], samples) for half in (0, 1)]
    return first_of_equals(*keys, _text_keys(samples, settings))


def near_duplicate_images(samples: Population, settings: CurationSettings) -> Numbers:
    """[n]: the best sample whose images are near-copies of this one's, itself where it is the best."""
    images = samples.images
    first = first_of_equals(images.contents[:, 0], images.contents[:, 1])
    distinct = np.flatnonzero(first == np.arange(len(first)))

    def image_leaders(places: Numbers) -> Numbers:
        numbers = distinct[places]
        close = close_pairs(images.hashes[numbers], settings.max_hash_distance)
        return leaders(len(numbers), _agreeing(close, samples, numbers))

    leader = settle(len(distinct), image_leaders)
    shown = distinct[leader[np.searchsorted(distinct, first)]]
    return first_of_equals(_sequence_keys(shown.astype(np.uint64), samples), _text_keys(samples, settings))


def near_duplicate_texts(samples: Population, settings: CurationSettings) -> Numbers:
    """[n]: the best sample with nearly the same text, itself where it is the best."""
    bands = samples.text_bands()

    def text_leaders(numbers: Numbers) -> Numbers:
        pairs = verified_pairs(len(numbers), candidate_pairs(bands[numbers].T), lambda one, _: np.ones(len(one), bool))
        needed = np.unique(np.concatenate(pairs))
        texts = dict(zip(needed.tolist(), samples.texts(numbers[needed]), strict=True))
        return leaders(
            len(numbers), pairs, lambda one, other: similarity(texts[one], texts[other]) >= settings.min_text_similarity
        )

    return settle(len(samples), text_leaders)


def close_pairs(hashes: NDArray[np.uint8], max_distance: int) -> Pairs:
    """Pairs of [m, 32] hashes that share a band and differ in few bits."""
    candidates = candidate_pairs(band_keys(hashes, band) for band in range(NUM_BANDS))
    return verified_pairs(
        len(hashes), candidates, lambda one, other: hash_distances(hashes[one], hashes[other]) <= max_distance
    )


def _agreeing(pairs: Pairs, samples: Population, images: Numbers) -> Pairs:
    """The pairs (of places in `images`) whose thumbnails agree."""
    needed = np.unique(np.concatenate(pairs))
    thumbnails = samples.thumbnails(images[needed])
    better, worse = (np.searchsorted(needed, side) for side in pairs)
    agree = thumbnails_agree(thumbnails, better, worse)
    return pairs[0][agree], pairs[1][agree]


def _sequence_keys(values: NDArray[np.uint64], samples: Population) -> NDArray[np.uint64]:
    """[n]: one number for the values of a sample's images in their order."""
    images = samples.images
    mixed = (values ^ (images.places.astype(np.uint64) << np.uint64(40))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = np.zeros(len(samples), np.uint64)
    np.add.at(keys, images.owners, mixed ^ (mixed >> np.uint64(32)))
    return keys


def _text_keys(samples: Population, settings: CurationSettings) -> NDArray[np.uint64]:
    """[n]: the text's hash where the text counts, else 0."""
    has_image = np.bincount(samples.images.owners, minlength=len(samples)) > 0
    counts = samples.is_conversation | ~has_image | (settings.keep_one_per == "image and text")
    return np.where(counts, samples.text_hashes, np.uint64(0))
