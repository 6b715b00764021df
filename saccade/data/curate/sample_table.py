"""The samples that passed the rules, over all shards and best first, as arrays for duplicate search.

Best is larger (pixels of all images), then longer (bytes of text), then earlier in the folder. In memory are 17 bytes
per sample and 156 per image; thumbnails and texts stay on disk and are read for the samples that have a likely copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from saccade.data.curate.features import as_bytes, flat, read_features
from saccade.data.curate.image_hash import HASH_BYTES, NUM_VIEWS, THUMBNAIL_BYTES
from saccade.data.curate.text_features import NUM_BANDS
from saccade.data.index import ShardIndex
from saccade.data.order import Ints


@dataclass(frozen=True)
class ImageTable:
    """The images of all samples: m images, in the order of their samples."""

    owners: Ints
    """[m] number of the sample, ascending."""
    positions: NDArray[np.int32]
    """[m] position among the images of the sample."""
    contents: NDArray[np.uint64]
    """[m, 2] hash of the bytes."""
    hashes: NDArray[np.uint8]
    """[m, 4, 32] perceptual hashes of the views."""


@dataclass(frozen=True)
class SampleTable:
    """n samples, 0 the best."""

    index: ShardIndex
    shards: NDArray[np.int32]
    rows: NDArray[np.int32]
    text_hashes: NDArray[np.uint64]
    is_conversation: NDArray[np.bool_]
    images: ImageTable

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, is_in: NDArray[np.bool_]) -> SampleTable:
        """The selected samples, renumbered in the same order."""
        images, stays = self.images, is_in[self.images.owners]
        renumbered = np.cumsum(is_in) - 1
        return SampleTable(
            self.index,
            self.shards[is_in],
            self.rows[is_in],
            self.text_hashes[is_in],
            self.is_conversation[is_in],
            ImageTable(
                renumbered[images.owners[stays]], images.positions[stays], images.contents[stays], images.hashes[stays]
            ),
        )

    def name(self, sample: int) -> str:
        """Shard and key."""
        shard, row = int(self.shards[sample]), int(self.rows[sample])
        return f"{self.index.shards[shard]}/{self.index.read(shard, ['key'])['key'][row].as_py()}"

    def thumbnails(self, images: Ints) -> NDArray[np.uint8]:
        """[k, 1152] thumbnails of these images, read from the features."""
        owners = self.images.owners[images]
        found = np.empty((len(images), THUMBNAIL_BYTES), np.uint8)
        for shard, here in by_shard(self.shards[owners]):
            items, rows = flat(read_features(self.index, shard, ["thumbnails"])["thumbnails"])
            first = np.searchsorted(rows, self.rows[owners[here]])
            found[here] = as_bytes(items)[first + self.images.positions[images[here]]]
        return found

    def texts(self, samples: Ints) -> list[str]:
        """The whole text of each of these samples, read from the features."""
        found = np.full(len(samples), "", object)
        for shard, here in by_shard(self.shards[samples]):
            column = read_features(self.index, shard, ["texts"])["texts"].take(pa.array(self.rows[samples[here]]))
            found[here] = ["\n".join(texts) for texts in column.to_pylist()]
        return list(found)

    def text_bands(self) -> NDArray[np.uint32]:
        """[n, 20] MinHash keys, read from the features."""
        found = np.empty((len(self), NUM_BANDS), np.uint32)
        for shard, here in by_shard(self.shards):
            column = read_features(self.index, shard, ["text_bands"])["text_bands"].combine_chunks()
            found[here] = as_bytes(column.take(pa.array(self.rows[here]))).view(np.uint32)
        return found


def by_shard(shards: NDArray[np.int32]) -> list[tuple[int, Ints]]:
    """Each shard that occurs, and where."""
    order = np.argsort(shards, kind="stable")
    found, begins = np.unique(shards[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, begins)[1:], strict=True))


def load_samples(index: ShardIndex, is_in: Sequence[NDArray[np.bool_]]) -> SampleTable:
    """The selected samples of all shards, in order of quality."""
    parts = [_load_shard(index, shard, np.flatnonzero(selected)) for shard, selected in enumerate(is_in)]
    columns = [np.concatenate(column) for column in zip(*(samples for samples, _, _ in parts), strict=True)]
    shards, rows, text_hashes, is_conversation, num_images, pixels, num_bytes = columns
    contents = np.concatenate([each for _, each, _ in parts])
    hashes = np.concatenate([each for _, _, each in parts]).reshape(-1, NUM_VIEWS, HASH_BYTES)

    order = np.lexsort((-num_bytes, -pixels))  # stable: equals stay in the order of the folder
    owners = np.repeat(np.arange(len(order)), num_images[order])
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(num_images[order]) - num_images[order], num_images[order])
    of_image = (np.cumsum(num_images) - num_images)[order][owners] + positions
    images = ImageTable(owners, positions.astype(np.int32), contents[of_image], hashes[of_image])
    return SampleTable(index, shards[order], rows[order], text_hashes[order], is_conversation[order], images)


def _load_shard(
    index: ShardIndex, shard: int, rows: Ints
) -> tuple[list[NDArray[np.generic]], NDArray[np.uint64], NDArray[np.uint8]]:
    """Columns per sample; contents and hashes per image."""
    known = index.read(shard, ["widths", "heights", "text_bytes"])
    features = read_features(index, shard, ["contents", "hashes", "text_hash", "is_conversation"])
    (widths, of_size), (heights, _) = flat(known["widths"]), flat(known["heights"])
    areas = widths.fill_null(0).to_numpy().astype(np.int64) * heights.fill_null(0).to_numpy()
    pixels = np.zeros(len(known), np.int64)
    np.add.at(pixels, of_size, areas)
    (contents, owners), (hashes, _) = flat(features["contents"]), flat(features["hashes"])
    is_here = np.isin(owners, rows)
    samples: list[NDArray[np.generic]] = [
        np.full(len(rows), shard, np.int32),
        rows.astype(np.int32),
        features["text_hash"].combine_chunks().fill_null(0).to_numpy()[rows],
        features["is_conversation"].combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)[rows],
        np.bincount(owners, minlength=len(known))[rows],
        pixels[rows],
        known["text_bytes"].to_numpy()[rows].astype(np.int64),
    ]
    return samples, as_bytes(contents)[is_here].view(np.uint64), as_bytes(hashes)[is_here]
