"""Split a shard folder into samples to train on and held-out ones, so that no image is on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import Sample, images
from saccade.data.shards import ShardWriter
from saccade.errors import ConfigError, DataError


def split_shards(
    shards: str | Path,
    training: Path,
    held_out: Path,
    *,
    share: float = 0.1,
    max_held_out: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[int, int]:
    """Copy the kept samples of `shards` into two new folders; returns their sizes.

    The side of a sample depends on `seed` and the bytes of its images, so that an image stays on its side when samples
    are added. Samples that share an image, directly or through others, are on one side. About `share` of them are held
    out, `max_held_out` at most on average; at least one group is on each side. The samples are read twice.
    `on_progress` is called with "reading" or "writing" after every sample.
    """
    if not 0 < share < 1:
        raise ConfigError(f"the held-out share is {share}, not between 0 and 1")
    for folder in (training, held_out):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder}: exists already. Choose another folder, or remove it")
    notify = on_progress or (lambda _: None)
    index = open_index(str(shards))
    positions = _positions(index, seed, notify)
    if len(set(positions)) < 2:
        raise DataError(f"{shards}: {len(positions)} samples are too few to hold some out: all share their images")
    limit = share if max_held_out is None else min(share, max_held_out / len(positions))
    threshold = min(max(limit, min(positions)), max(position for position in positions if position < max(positions)))
    num_held_out = 0
    with ShardWriter(training) as train_writer, ShardWriter(held_out) as held_out_writer:
        for position, sample in zip(positions, _kept_samples(index), strict=True):
            is_held_out = position <= threshold
            (held_out_writer if is_held_out else train_writer).write(sample)
            num_held_out += is_held_out
            notify("writing")
    return len(positions) - num_held_out, num_held_out


def _kept_samples(index: ShardIndex) -> Iterator[Sample]:
    for shard in range(len(index.shards)):
        for row in index.kept(shard).tolist():
            yield index.read_sample(shard, row)


def _positions(index: ShardIndex, seed: int, notify: Callable[[str], None]) -> list[float]:
    """A number from 0 to 1 for every kept sample, the same for samples that share an image."""
    group_of: dict[bytes, bytes] = {}  # union-find over the digests of images

    def find(digest: bytes) -> bytes:
        root = digest
        while (above := group_of.setdefault(root, root)) != root:
            root = above
        group_of[digest] = root
        return root

    first_digests = []
    for sample in _kept_samples(index):
        digests = [_digest(image, seed) for image in images(sample) or [sample.key.encode()]]
        for digest in digests:
            one, other = sorted((find(digests[0]), find(digest)))
            group_of[other] = one  # the smallest digest names the group, whatever the order of the samples
        first_digests.append(digests[0])
        notify("reading")
    return [int.from_bytes(find(digest)[:8], "big") / 2**64 for digest in first_digests]


def _digest(data: bytes, seed: int) -> bytes:
    return hashlib.sha256(data + (f"seed {seed}".encode() if seed else b"")).digest()
