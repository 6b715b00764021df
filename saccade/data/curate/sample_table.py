"""Samples and what curation compares of them, as arrays in the order of the folder.

Better is larger (pixels of all images), then longer (bytes of text), then earlier in the folder. In memory are 33 bytes
per sample and 28 per image; thumbnails and texts stay on disk until they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from saccade.data.curate.features import as_bytes, flat, read_features
from saccade.data.curate.text_features import NUM_BANDS
from saccade.data.curate.thumbnails import THUMBNAIL_BYTES
from saccade.data.index import ShardIndex
from saccade.data.order import Ints

Ids = NDArray[np.uint64]
_SHARD_SHIFT, _ROW_SHIFT = np.uint64(40), np.uint64(16)
_MAX_PIXELS, _MAX_TEXT = 2**40 - 1, 2**24 - 1


@dataclass(frozen=True)
class ImageTable:
    """The images of all samples: m images, in the order of their samples."""

    owners: Ints
    """[m] number of the sample, ascending."""
    positions: NDArray[np.int32]
    """[m] position among the images of the sample."""
    contents: NDArray[np.uint64]
    """[m, 2] hash of the bytes."""


@dataclass(frozen=True)
class SampleTable:
    """n samples."""

    index: ShardIndex
    shards: NDArray[np.int32]
    rows: NDArray[np.int32]
    qualities: NDArray[np.uint64]
    """The smaller, the better."""
    text_hashes: NDArray[np.uint64]
    is_conversation: NDArray[np.bool_]
    images: ImageTable

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> Ids:
        """[n]: one number for shard and row; in the order of the folder."""
        return (self.shards.astype(np.uint64) << _SHARD_SHIFT) | (self.rows.astype(np.uint64) << _ROW_SHIFT)

    @property
    def image_ids(self) -> Ids:
        """[m]: the number of the sample plus the position."""
        return self.ids[self.images.owners] | self.images.positions.astype(np.uint64)

    @property
    def has_image(self) -> NDArray[np.bool_]:
        """[n]."""
        return np.bincount(self.images.owners, minlength=len(self)) > 0

    def name(self, sample: int) -> str:
        """Shard and key."""
        return sample_name(self.index, int(self.shards[sample]), int(self.rows[sample]))

    def thumbnails(self, images: Ints) -> NDArray[np.uint8]:
        """[k, 1152] thumbnails of these images, read from the features."""
        return read_thumbnails(self.index, self.image_ids[images])

    def texts(self) -> list[str]:
        """The whole text of each sample, read from the features."""
        return read_texts(self.index, self.ids)

    def text_bands(self) -> NDArray[np.uint32]:
        """[n, 20] MinHash keys, read from the features."""
        found = np.empty((len(self), NUM_BANDS), np.uint32)
        for shard, here in by_shard(self.shards):
            column = read_features(self.index, shard, ["text_bands"])["text_bands"].combine_chunks()
            found[here] = as_bytes(column.take(pa.array(self.rows[here]))).view(np.uint32)
        return found


def sample_name(index: ShardIndex, shard: int, row: int) -> str:
    """Shard and key."""
    return f"{index.shards[shard]}/{index.read(shard, ['key'])['key'][row].as_py()}"


def shards_of(ids: Ids) -> Ints:
    """The shards of samples or images."""
    return (ids >> _SHARD_SHIFT).astype(np.int64)


def rows_of(ids: Ids) -> Ints:
    """Their rows within the shard."""
    return ((ids >> _ROW_SHIFT) & np.uint64(2**24 - 1)).astype(np.int64)


def first_of_shard(shard: int) -> np.uint64:
    """The smallest id of a shard."""
    return np.uint64(shard) << _SHARD_SHIFT


def read_thumbnails(index: ShardIndex, ids: Ids) -> NDArray[np.uint8]:
    """[k, 1152] thumbnails of images, read from the features."""
    found = np.empty((len(ids), THUMBNAIL_BYTES), np.uint8)
    for shard, here in by_shard(shards_of(ids)):
        items, rows = flat(read_features(index, shard, ["thumbnails"])["thumbnails"])
        first = np.searchsorted(rows, rows_of(ids[here]))
        found[here] = as_bytes(items)[first + (ids[here] & np.uint64(2**16 - 1)).astype(np.int64)]
    return found


def read_texts(index: ShardIndex, ids: Ids) -> list[str]:
    """The whole text of each of these samples, read from the features."""
    found = np.full(len(ids), "", object)
    for shard, here in by_shard(shards_of(ids)):
        column = read_features(index, shard, ["texts"])["texts"].take(pa.array(rows_of(ids[here])))
        found[here] = ["\n".join(texts) for texts in column.to_pylist()]
    return list(found)


def by_shard(shards: NDArray[np.int32] | Ints) -> list[tuple[int, Ints]]:
    """Each shard that occurs, and where."""
    order = np.argsort(shards, kind="stable")
    found, begins = np.unique(shards[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, begins)[1:], strict=True))


def load_samples(index: ShardIndex, is_in: Mapping[int, NDArray[np.bool_]]) -> SampleTable:
    """The selected samples of these shards, in the order of the folder."""
    parts = [_load_shard(index, shard, np.flatnonzero(selected)) for shard, selected in sorted(is_in.items())]
    samples = [np.concatenate(column) for column in zip(*(each for each, _ in parts), strict=True)]
    contents = np.concatenate([each for _, each in parts])
    shards, rows, qualities, text_hashes, is_conversation, num_images = samples
    owners = np.repeat(np.arange(len(rows)), num_images)
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(num_images) - num_images, num_images)
    images = ImageTable(owners, positions.astype(np.int32), contents)
    return SampleTable(index, shards, rows, qualities, text_hashes, is_conversation, images)


def _load_shard(index: ShardIndex, shard: int, rows: Ints) -> tuple[list[NDArray[Any]], NDArray[np.uint64]]:
    """Columns per sample; contents per image."""
    known = index.read(shard, ["widths", "heights", "text_bytes"])
    features = read_features(index, shard, ["contents", "text_hash", "is_conversation"])
    (widths, of_size), (heights, _) = flat(known["widths"]), flat(known["heights"])
    areas = widths.fill_null(0).to_numpy().astype(np.int64) * heights.fill_null(0).to_numpy()
    pixels = np.zeros(len(known), np.int64)
    np.add.at(pixels, of_size, areas)
    contents, owners = flat(features["contents"])
    is_here = np.isin(owners, rows)
    samples = [
        np.full(len(rows), shard, np.int32),
        rows.astype(np.int32),
        _qualities(pixels[rows], known["text_bytes"].to_numpy()[rows].astype(np.int64)),
        features["text_hash"].combine_chunks().fill_null(0).to_numpy()[rows],
        features["is_conversation"].combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)[rows],
        np.bincount(owners, minlength=len(known))[rows],
    ]
    return samples, as_bytes(contents)[is_here].view(np.uint64)


def _qualities(pixels: Ints, num_bytes: Ints) -> NDArray[np.uint64]:
    """One number for both: the smaller, the better."""
    by_pixels = (_MAX_PIXELS - np.minimum(pixels, _MAX_PIXELS)).astype(np.uint64) << np.uint64(24)
    return by_pixels | (_MAX_TEXT - np.minimum(num_bytes, _MAX_TEXT)).astype(np.uint64)
