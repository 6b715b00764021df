"""Find images that are likely copies, among any number: vectors of their views, in clusters of similar vectors.

    thumbnail  ->  vectors of its views  ->  home cluster (whole view), nearest clusters (every view)
    cluster    ->  products of the probing vectors with those at home  ->  pairs above `MIN_SIMILARITY`

A vector is 63 low DCT coefficients, fine ones weighted up, and two of brightness, which compare images that are flat.
The views are the whole image and parts of it as a crop may leave them: of two copies, a view of one is close to the
whole of the other. The coefficients of a view choose one of eight orientations, so mirrored and turned copies need no
views of their own. An image is at home in one cluster and looks for copies in those nearest to each of its views, so a
pair is found from either side. With the number of images grows the number of clusters, not their size: a larger set has
more images that are no copies, and costs no recall until these are closer than the copy is.

Vectors are integers and their products exact, so which pairs are found does not depend on how the work is divided.
`image_match.py` decides on the pairs.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.thumbnails import SIDE, dct_matrix, split_thumbnails
from saccade.data.order import Ints

Vectors = NDArray[np.int8]
Floats = NDArray[np.float32]

DIMS = 65
NUM_VIEWS = 13
CLUSTER_SIZE = 8192
"""Images at home in a cluster, on average."""
MAX_AT_HOME = 16_384
"""Images of a cluster that others are compared with: the best. More are only in clusters of a kind that repeats."""
MIN_SIMILARITY = 0.85
"""Cosine of the vectors of likely copies."""
MAX_CANDIDATES = 8
"""Images that are verified for each one: the most similar of the better ones."""
NUM_PROBES = 4
"""Clusters that each view is looked for in."""
_COARSE_PROBES = 8
_SCALE = 127
_FLAT = 100.0
"""Length of the weighted coefficients of an image with little structure."""
_LOW = 8
_ACROSS, _DOWN = 2, _LOW + 1  # columns of the lowest coefficients along the two axes
_MAX_BRANCHES = 512
_ITERATIONS = 6
_SAMPLES_PER_CLUSTER = 4
_MAX_TRAINED = 2**20
_BLOCK = 2**22  # products in memory at a time
_PART = 2**10  # vectors that are assigned to clusters at a time


def view_vectors(thumbnails: NDArray[np.uint8]) -> Vectors:
    """[n, 13, 65] vectors of the views of [n, 1152] thumbnails; the first is the whole image.

    Each view is in the orientation that its lowest coefficients choose, so the vectors of a mirrored or turned copy are
    the same. The choice can be close, so most views are also there in the second orientation.
    """
    luma, _ = split_thumbnails(thumbnails)
    vectors = np.stack([_vectors(luma, rows, columns) for rows, columns in _views()], 1)
    first, second = _orientations(vectors)
    num = NUM_VIEWS - len(_views())
    return np.concatenate([_turned(vectors, first), _turned(vectors[:, :num], second[:, :num])], 1)


def _orientations(vectors: Vectors) -> tuple[Ints, Ints]:
    """[...]: the orientation in which a view is brighter at the left and at the top, and more so at the left.

    It is a number of three bits: mirrored, upside down, transposed after that. The second orientation differs in the
    bit whose decision is closest.
    """
    across, down = (vectors[..., at].astype(np.int64) for at in (_ACROSS, _DOWN))
    margins = np.stack([np.abs(across), np.abs(down), np.abs(np.abs(across) - np.abs(down))])
    first = (across < 0) + 2 * (down < 0) + 4 * (np.abs(down) > np.abs(across))
    return first, first ^ (1 << margins.argmin(0))


def _turned(vectors: Vectors, orientations: Ints) -> Vectors:
    """Vectors [..., 65] of views in these orientations."""
    columns, signs = _turns()
    return np.take_along_axis(vectors, columns[orientations], -1) * signs[orientations]


@functools.cache
def _turns() -> tuple[Ints, Vectors]:
    """[8, 65]: the columns and signs of a vector in each orientation."""
    row, column = np.divmod(np.arange(1, _LOW * _LOW), _LOW)
    columns, signs = np.tile(np.arange(DIMS), (8, 1)), np.ones((8, DIMS), np.int8)
    for number in range(8):
        is_mirrored, is_upside_down, is_transposed = number & 1, number >> 1 & 1, number >> 2
        of_row, of_column = (column, row) if is_transposed else (row, column)
        columns[number, 2:] = of_row * _LOW + of_column + 1
        signs[number, 2:] = 1 - 2 * ((is_mirrored * of_column + is_upside_down * of_row) % 2)
    return columns, signs


def _vectors(luma: Floats, rows: Floats, columns: Floats) -> Vectors:
    weighted = ((rows @ luma @ columns.T) * _weights()).reshape(len(luma), _LOW * _LOW)
    brightness = weighted[:, 0] * (np.pi / 2 / (255 * SIDE))  # 0 to a right angle: black and white are unlike
    vectors = np.column_stack([_FLAT * np.cos(brightness), _FLAT * np.sin(brightness), weighted[:, 1:]])
    return np.asarray(np.round(vectors * (_SCALE / np.linalg.norm(vectors, axis=1, keepdims=True))), np.int8)


@functools.cache
def _weights() -> Floats:
    return np.asarray(1 + np.add.outer(np.arange(_LOW), np.arange(_LOW)), np.float32)


@functools.cache
def _views() -> list[tuple[Floats, Floats]]:
    """Matrices for rows and columns: whole, the central 95 %, its four corners, the central 90 %."""
    centred = [(0.95, 0.0, 0.0)]
    corners = [(0.95, x, y) for x in (-0.05, 0.05) for y in (-0.05, 0.05)]
    return [(_part(size, y), _part(size, x)) for size, x, y in [(1.0, 0.0, 0.0), *centred, *corners, (0.9, 0.0, 0.0)]]


def _part(size: float, shift: float) -> Floats:
    """[8, 32]: the DCT of a part of a line, by linear interpolation."""
    positions = (((np.arange(SIDE) * 2 + 1) / SIDE - 1) * size + shift) * (SIDE / 2) + (SIDE - 1) / 2
    interpolated = np.maximum(0, 1 - np.abs(np.clip(positions, 0, SIDE - 1)[:, None] - np.arange(SIDE)))
    return np.asarray(dct_matrix(_LOW) @ interpolated.astype(np.float32), np.float32)


# ------------------------------------------------------------------ clusters


@dataclass(frozen=True)
class Clusters:
    """Centres in two levels: coarse ones, and below each as many fine ones as its share of the images asks for."""

    coarse: Vectors
    """[a, 65]."""
    fine: Vectors
    """[b, 65], ordered by coarse centre."""
    begins: Ints
    """[a + 1]: the first fine centre of each coarse one."""

    def __len__(self) -> int:
        return len(self.fine)

    def to_bytes(self) -> bytes:
        """For a file."""
        buffer = io.BytesIO()
        np.savez(buffer, **vars(self))
        return buffer.getvalue()

    @staticmethod
    def from_bytes(content: bytes) -> Clusters:
        """From a file."""
        with np.load(io.BytesIO(content)) as arrays:
            return Clusters(arrays["coarse"], arrays["fine"], arrays["begins"])

    @staticmethod
    def num_trained(num_images: int) -> int:
        """Vectors to train the centres for this many images with."""
        return min(_MAX_TRAINED, _SAMPLES_PER_CLUSTER * _num_clusters(num_images)) if num_images > CLUSTER_SIZE else 0

    @staticmethod
    def train(vectors: Vectors, num_images: int) -> Clusters:
        """Centres for this many images, from vectors of some of them in a fixed order."""
        num = _num_clusters(num_images) if len(vectors) else 1
        if num == 1:
            return Clusters(np.zeros((1, DIMS), np.int8), np.zeros((1, DIMS), np.int8), np.array([0, 1]))
        num_coarse = 1 if num <= _MAX_BRANCHES else int(np.ceil(np.sqrt(num)))
        coarse = _k_means(vectors, num_coarse)
        nearest = _nearest(vectors, coarse, 1)[:, 0]
        fine = []
        for number in range(len(coarse)):
            here = vectors[nearest == number]
            centres = _k_means(here, max(1, round(num * len(here) / len(vectors))))
            fine.append(centres if len(centres) else coarse[number : number + 1])
        return Clusters(coarse, np.concatenate(fine), np.cumsum([0, *map(len, fine)]))

    def nearest(self, vectors: Vectors, num_probes: int) -> NDArray[np.uint32]:
        """[n, up to num_probes] clusters of each vector, the nearest first."""
        if len(self) == 1:
            return np.zeros((len(vectors), 1), np.uint32)
        if len(self.coarse) == 1:
            return _nearest(vectors, self.fine, num_probes).astype(np.uint32)
        parts = [vectors[begin : begin + _PART] for begin in range(0, len(vectors), _PART)]
        empty = np.zeros((0, num_probes), np.uint32)
        return np.concatenate([self._nearest_of_both(part, num_probes) for part in parts] or [empty])

    def _nearest_of_both(self, vectors: Vectors, num_probes: int) -> NDArray[np.uint32]:
        """The nearest of the clusters below the nearest coarse centres."""
        coarse = _nearest(vectors, self.coarse, _COARSE_PROBES)
        most = int(np.diff(self.begins).max())
        products = np.full((len(vectors), coarse.shape[1], most), -2.0 * _SCALE**2, np.float32)
        for number in np.unique(coarse):
            row, rank = np.nonzero(coarse == number)
            here = self.fine[self.begins[number] : self.begins[number + 1]]
            products[row, rank, : len(here)] = _products(vectors[row], here)
        best = _largest(products.reshape(len(vectors), -1), num_probes)
        rank, within = np.divmod(best, most)
        return np.asarray(self.begins[np.take_along_axis(coarse, rank, 1)] + within, np.uint32)


def _num_clusters(num_images: int) -> int:
    return max(1, -(-num_images // CLUSTER_SIZE))


def _k_means(vectors: Vectors, num: int) -> Vectors:
    """At most `num` centres; the first ones are vectors at even distances."""
    if num == 1 or len(vectors) <= num:
        return np.unique(vectors, axis=0)[:num] if len(vectors) else np.zeros((0, DIMS), np.int8)
    centres = np.unique(vectors[np.arange(num) * len(vectors) // num], axis=0)
    for _ in range(_ITERATIONS):
        nearest = _nearest(vectors, centres, 1)[:, 0]
        order = np.argsort(nearest, kind="stable")
        begins = np.searchsorted(nearest[order], np.arange(len(centres)))
        sums = np.add.reduceat(vectors[order].astype(np.int64), np.minimum(begins, len(order) - 1), axis=0)
        lengths = np.maximum(np.sqrt((sums * sums).sum(1, keepdims=True).astype(np.float64)), 1)
        is_used = np.bincount(nearest, minlength=len(centres)) > 0
        centres[is_used] = np.round(sums[is_used] * (_SCALE / lengths[is_used])).astype(np.int8)
    return centres


def _nearest(vectors: Vectors, centres: Vectors, num: int) -> Ints:
    """[n, up to num] the most similar centres, in order."""
    parts = [np.zeros((0, min(num, len(centres))), np.int64)]
    size = max(1, _BLOCK // len(centres))
    for begin in range(0, len(vectors), size):
        parts.append(_largest(_products(vectors[begin : begin + size], centres), num))
    return np.concatenate(parts)


def _largest(products: Floats, num: int) -> Ints:
    """[n, up to num] columns with the largest products, in order; the first of equals."""
    num_columns = products.shape[1]
    ordered = products.astype(np.float64) * num_columns - np.arange(num_columns)  # distinct, so the choice is exact
    num = min(num, num_columns)
    if num == 1:
        return np.asarray(ordered.argmax(1)[:, None])
    found = np.argpartition(-ordered, num - 1, axis=1)[:, :num]
    return np.take_along_axis(found, np.argsort(-np.take_along_axis(ordered, found, 1), axis=1), 1)


def _products(one: Vectors, other: Vectors) -> Floats:
    """[n, m] products, exact: sums of 65 integers below 2^14 are integers that fp32 holds."""
    return one.astype(np.float32) @ other.astype(np.float32).T


# ------------------------------------------------------------------ pairs of a cluster

SEEN = np.dtype([("cluster", "u4"), ("at_home", "?"), ("quality", "u8"), ("item", "u8"), ("vector", "i1", DIMS)])
"""An image in a cluster, at home or looking for copies with one of its views."""
LIKELY = np.dtype([("worse", "u8"), ("better", "u8"), ("quality", "u8"), ("similarity", "i4")])
"""A pair of likely copies, with the quality of the better one."""
Rows = NDArray[np.void]


def best_at_home(rows: Rows) -> Rows:
    """The images at home, by cluster and quality, at most `MAX_AT_HOME` of each cluster."""
    rows = rows[np.lexsort((rows["item"], rows["quality"], rows["cluster"]))]
    begins = np.flatnonzero(np.diff(rows["cluster"].astype(np.int64), prepend=-1))
    rank = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))
    return rows[rank < MAX_AT_HOME]


def likely_pairs(home: Rows, looking: Rows) -> Rows:
    """Pairs of images that look into a cluster with those at home there, the most similar of each worse one.

    `home` is sorted by `best_at_home`.
    """
    looking = looking[np.argsort(looking["cluster"], kind="stable")]
    clusters, begins = np.unique(looking["cluster"], return_index=True)
    ends = [*begins[1:].tolist(), len(looking)]
    found = [np.zeros(0, LIKELY)]
    for cluster, begin, end in zip(clusters, begins.tolist(), ends[: len(clusters)], strict=True):
        first, last = np.searchsorted(home["cluster"], [cluster, cluster + np.uint32(1)])
        found.append(most_similar(_pairs_of(home[first:last], looking[begin:end])))
    return most_similar(np.concatenate(found))


def _pairs_of(home: Rows, looking: Rows) -> Rows:
    """All pairs of one cluster above the limit."""
    found = [np.zeros(0, LIKELY)]
    at_home = home["vector"].astype(np.float32)
    for begin in range(0, len(looking), size := max(1, _BLOCK // max(1, len(home)))):
        part = looking[begin : begin + size]
        products = part["vector"].astype(np.float32) @ at_home.T
        one, other = np.divmod(np.flatnonzero(products > MIN_SIMILARITY * _SCALE**2), max(1, len(home)))
        similarity = products[one, other]
        one, other = part[one], home[other]
        is_first = _is_better(one, other)
        pairs = np.empty(len(one), LIKELY)
        pairs["worse"], pairs["better"] = (
            np.where(is_first, other["item"], one["item"]),
            np.where(is_first, one["item"], other["item"]),
        )
        pairs["quality"], pairs["similarity"] = np.minimum(one["quality"], other["quality"]), similarity
        found.append(pairs[one["item"] != other["item"]])
    return np.concatenate(found)


def _is_better(one: Rows, other: Rows) -> NDArray[np.bool_]:
    is_better: NDArray[np.bool_] = (one["quality"] < other["quality"]) | (
        (one["quality"] == other["quality"]) & (one["item"] < other["item"])
    )
    return is_better


def most_similar(pairs: Rows) -> Rows:
    """Each pair once, and of each worse image the `MAX_CANDIDATES` most similar better ones.

    The result for a set of pairs is that for the results of its parts, so pairs can be cut wherever they are found.
    """
    pairs = pairs[np.lexsort((-pairs["similarity"], pairs["better"], pairs["worse"]))]
    is_first = (np.diff(pairs["worse"], prepend=pairs["worse"][:1] + np.uint64(1)) != 0) | (
        np.diff(pairs["better"], prepend=pairs["better"][:1]) != 0
    )
    pairs = pairs[is_first]
    pairs = pairs[np.lexsort((pairs["better"], pairs["quality"], -pairs["similarity"], pairs["worse"]))]
    begins = np.flatnonzero(np.diff(pairs["worse"], prepend=pairs["worse"][:1] + np.uint64(1)))
    rank = np.arange(len(pairs)) - np.repeat(begins, np.diff(np.append(begins, len(pairs))))
    return pairs[rank < MAX_CANDIDATES]
