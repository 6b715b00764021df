"""Split a shard folder into samples to train on and held-out ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

from saccade.data.index import open_index
from saccade.data.sample import Sample, images
from saccade.data.shards import ShardWriter
from saccade.errors import DataError


def split_shards(
    shards: Path, training: Path, held_out: Path, *, share: float = 0.1, max_held_out: int = 200
) -> tuple[int, int]:
    """Copy the kept samples of `shards` into two new folders; returns their sizes.

    The side of a sample depends on its images alone, so that an image with several samples is on one side. About `share` of the
    samples are held out, `max_held_out` at most.
    """
    index = open_index(str(shards))
    count = len(index)
    threshold = min(share, max_held_out / max(count, 1))
    num_training = num_held_out = 0
    with ShardWriter(training) as train_writer, ShardWriter(held_out) as held_out_writer:
        for shard in range(len(index.shards)):
            for row in index.kept(shard).tolist():
                sample = index.read_sample(shard, row)
                if _position(sample) < threshold:
                    held_out_writer.write(sample)
                    num_held_out += 1
                else:
                    train_writer.write(sample)
                    num_training += 1
    if not num_training or not num_held_out:
        raise DataError(f"{shards}: {count} samples are too few to hold some out. Give at least 50")
    return num_training, num_held_out


def _position(sample: Sample) -> float:
    """A number from 0 to 1 by the content of the images."""
    digest = hashlib.sha256(b"".join(images(sample)) or sample.key.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
