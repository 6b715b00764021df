"""Find samples that repeat a better one.

    exact           the same image bytes, in the same order
    near, by image  the same images resized, encoded again, cropped, mirrored, brighter or grey (`image_match.COPY`)
    near, by text   a Jaccard similarity of the texts above the threshold

Each returns for every sample the better one it repeats. What repeats a captioned image is a setting (`keep_one_per`);
samples with questions or a conversation are compared by image and text, since two questions about one chart are two
samples. Samples without images repeat each other when their texts are equal.

The search is locality-sensitive hashing: items, best first -> pairs that share a band key -> pairs that pass a check ->
the leader of each group. Items are numbered by quality, so in every pair the smaller number is the one to keep. An item
joins the best leader it was compared with: groups are stars, not chains, and every dropped item was itself compared
with the one that is kept.

Cost: one sort of the keys per band and round. A bucket of `size` items makes at most `size * MAX_COMPARED` pairs, since
each item is compared with the best `MAX_COMPARED` of its bucket only: a million blank pages cost a million times 32,
not a million squared. Items that found no leader enter another round with the others that found none. A pair is missed
when its better half ranks below 32 others, not copies of each other, in every bucket the two share. Of the pairs an
image is in, the `_MAX_VERIFIED` closest by hash are aligned (0.1-0.3 ms each).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.image_hash import NUM_BANDS, band_keys, hash_distances
from saccade.data.curate.image_match import COPY, same_picture
from saccade.data.curate.sample_table import SampleTable
from saccade.data.curate.settings import CurationSettings
from saccade.data.curate.text_features import similarity
from saccade.data.order import Ints

Pairs = tuple[Ints, Ints]
"""The better and the worse item of each pair."""

MAX_COMPARED = 32
"""Items of a bucket that every other one is compared with."""
_MAX_HASH_DISTANCE = 80  # bits of 255; crops of 5 % reach 70
_MAX_VERIFIED = 8
_MAX_ROUNDS = 8
_CHUNK = 2**20


def exact_duplicates(samples: SampleTable, settings: CurationSettings) -> Ints:
    """[n]: the first sample with the same image bytes, or the sample itself."""
    return first_of_equals(*_file_keys(samples), _text_keys(samples, settings.keep_one_per != "image"))


def near_duplicate_images(samples: SampleTable, settings: CurationSettings) -> Ints:
    """[n]: the best sample whose images are near-copies of this one's, or the sample itself.

    Samples with the same image bytes are left to `exact_duplicates`.
    """
    images = samples.images
    first = first_of_equals(images.contents[:, 0], images.contents[:, 1])
    distinct = np.flatnonzero(first == np.arange(len(first)))

    def image_leaders(selected: Ints) -> Ints:
        numbers = distinct[selected]
        return leaders(len(numbers), _verified(close_pairs(images.hashes[numbers]), samples, numbers))

    leader = settle(len(distinct), image_leaders)
    pictures = distinct[leader[np.searchsorted(distinct, first)]]
    picture_keys = _sequence_keys(pictures.astype(np.uint64), samples)
    text_keys = _text_keys(samples, settings.keep_one_per == "image and text")
    same_picture, same_file = first_of_equals(picture_keys, text_keys), first_of_equals(*_file_keys(samples), text_keys)
    is_same_file = same_file == same_file[same_picture]
    return np.where(is_same_file, np.arange(len(samples)), same_picture)


def near_duplicate_texts(samples: SampleTable, settings: CurationSettings) -> Ints:
    """[n]: the best sample with nearly the same text, or the sample itself."""
    bands = samples.text_bands()

    def text_leaders(numbers: Ints) -> Ints:
        pairs = unique_pairs(len(numbers), candidate_pairs(bands[numbers].T))
        needed = np.unique(np.concatenate(pairs))
        texts = dict(zip(needed.tolist(), samples.texts(numbers[needed]), strict=True))
        return leaders(
            len(numbers), pairs, lambda one, other: similarity(texts[one], texts[other]) >= settings.min_text_similarity
        )

    return settle(len(samples), text_leaders)


def num_shared_images(samples: SampleTable) -> int:
    """Samples whose image bytes another sample has as well."""
    first = first_of_equals(*_file_keys(samples))
    has_image = np.bincount(samples.images.owners, minlength=len(samples)) > 0
    return int((has_image & (np.bincount(first, minlength=len(samples))[first] > 1)).sum())


def close_pairs(hashes: NDArray[np.uint8]) -> Pairs:
    """Pairs of images with views that share a band and differ in few bits, at most `_MAX_VERIFIED` per worse image."""
    num = len(hashes)
    views = np.ascontiguousarray(hashes.transpose(1, 0, 2)).reshape(-1, hashes.shape[2])  # whole images first
    kept, found, num_found = np.zeros((3, 0), np.int64), list[Ints](), 0
    for one, other in candidate_pairs(band_keys(views, band) for band in range(NUM_BANDS)):
        distances = hash_distances(views[one], views[other])
        is_close = (distances <= _MAX_HASH_DISTANCE) & (one % num != other % num)
        one, other = one[is_close] % num, other[is_close] % num
        found.append(np.stack([np.maximum(one, other), distances[is_close], np.minimum(one, other)]))
        num_found += len(one)
        if num_found > 4 * _MAX_VERIFIED * num + 16 * _CHUNK:  # bounds the memory, whatever the buckets
            kept, found, num_found = _closest(np.concatenate([kept, *found], axis=1)), [], 0
    worse, _, better = pairs = _closest(np.concatenate([kept, *found], axis=1))
    order = np.lexsort(pairs[[0, 2]])
    return better[order], worse[order]


def _closest(found: Ints) -> Ints:
    """The nearest better items of each worse item; the rows are worse items, distances and better items."""
    found = found[:, np.lexsort(found[[1, 2, 0]])]  # by pair, the closest first
    found = found[:, (np.diff(found[[0, 2]], prepend=-1) != 0).any(0)]
    found = found[:, np.lexsort(found[[2, 1, 0]])]
    begins = np.flatnonzero(np.diff(found[0], prepend=-1))
    rank = np.arange(found.shape[1]) - np.repeat(begins, np.diff(np.append(begins, found.shape[1])))
    return found[:, rank < _MAX_VERIFIED]


def _verified(pairs: Pairs, samples: SampleTable, images: Ints) -> Pairs:
    """The pairs (positions in `images`) whose thumbnails show the same image."""
    needed = np.unique(np.concatenate(pairs))
    thumbnails = samples.thumbnails(images[needed])
    better, worse = (np.searchsorted(needed, side) for side in pairs)
    is_same = np.zeros(len(better), bool)
    for begin in range(0, len(better), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        is_same[part] = same_picture(thumbnails[better[part]], thumbnails[worse[part]], COPY)
    return pairs[0][is_same], pairs[1][is_same]


def _file_keys(samples: SampleTable) -> list[NDArray[np.uint64]]:
    """Two keys [n] for the image bytes of a sample."""
    return [_sequence_keys(samples.images.contents[:, half], samples) for half in (0, 1)]


def _sequence_keys(values: NDArray[np.uint64], samples: SampleTable) -> NDArray[np.uint64]:
    """[n]: one key for the values of a sample's images in their order."""
    images = samples.images
    mixed = (values ^ (images.positions.astype(np.uint64) << np.uint64(40))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = np.zeros(len(samples), np.uint64)
    np.add.at(keys, images.owners, mixed ^ (mixed >> np.uint64(32)))
    return keys


def _text_keys(samples: SampleTable, for_captions: bool) -> NDArray[np.uint64]:
    """[n]: the hash of the text if texts are compared, else 0."""
    has_image = np.bincount(samples.images.owners, minlength=len(samples)) > 0
    is_compared = samples.is_conversation | ~has_image | for_captions
    return np.where(is_compared, samples.text_hashes, np.uint64(0))


# ------------------------------------------------------------------ locality-sensitive hashing


def candidate_pairs(bands: Iterable[NDArray[np.uint32]]) -> Iterator[Pairs]:
    """Pairs that share a key in a band (an array of one key per item), a bounded number at a time, with repeats."""
    for keys in bands:
        order = np.argsort(keys, kind="stable")  # stable: within a bucket the best comes first
        is_first = np.diff(keys[order], prepend=~keys[order[:1]]) != 0
        begins = np.flatnonzero(is_first)
        rank = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
        rest = np.arange(len(order))
        for number in range(MAX_COMPARED):
            rest = rest[rank[rest] > number]
            for begin in range(0, len(rest), _CHUNK):
                worse = rest[begin : begin + _CHUNK]
                yield order[worse - rank[worse] + number], order[worse]


def unique_pairs(num_items: int, candidates: Iterable[Pairs]) -> Pairs:
    """Each pair once, ordered by the better item."""
    found = [np.zeros(0, np.int64), *(better * num_items + worse for better, worse in candidates)]
    return np.divmod(np.unique(np.concatenate(found)), max(1, num_items))


def leaders(num_items: int, pairs: Pairs, is_copy: Callable[[int, int], bool] | None = None) -> Ints:
    """[items]: the leader of each item, which may be itself. `pairs` are ordered by the better item.

    `is_copy` is called with the better and the worse item of a pair, only if the answer matters.
    """
    leader = list(range(num_items))
    for better, worse in zip(*(side.tolist() for side in pairs), strict=True):
        if leader[better] == better and leader[worse] == worse and (is_copy is None or is_copy(better, worse)):
            leader[worse] = better
    return np.array(leader, np.int64)


def settle(num_items: int, find_leaders: Callable[[Ints], Ints]) -> Ints:
    """[items]: the leader of each, in rounds among those that still lead, until a round changes nothing.

    `find_leaders` takes the items of a round and returns for each the position of its leader among them.
    """
    leader = np.arange(num_items)
    for _ in range(_MAX_ROUNDS):
        leading = np.flatnonzero(leader == np.arange(num_items))
        found = find_leaders(leading)
        if (found == np.arange(len(leading))).all():
            break
        leader[leading] = leading[found]
        leader = leader[leader]  # followers of an item that now follows another one
    return leader


def first_of_equals(*keys: NDArray[np.uint64]) -> Ints:
    """[items]: the first item that has the same keys, or the item itself."""
    order = np.lexsort(keys[::-1])
    is_first = np.zeros(len(order), bool)
    for key in keys:
        is_first |= np.diff(key[order], prepend=~key[order[:1]]) != 0
    firsts = order[np.flatnonzero(is_first)]
    found = np.empty(len(order), np.int64)
    found[order] = np.repeat(firsts, np.diff(np.append(np.flatnonzero(is_first), len(order))))
    return found
