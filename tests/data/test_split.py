"""Splitting a shard folder into training and held-out samples."""

import pytest

from saccade.data.index import open_index
from saccade.data.sample import Sample, images
from saccade.data.scenes import scene_sample
from saccade.data.shards import ShardWriter
from saccade.data.split import split_shards
from saccade.errors import DataError


def write(folder, samples):
    with ShardWriter(folder) as writer:
        for sample in samples:
            writer.write(sample)


def images_of(folder):
    index = open_index(str(folder))
    return [images(index.read_sample(shard, row))[0] for shard in range(len(index.shards)) for row in index.kept(shard)]


def test_every_sample_is_on_one_side_and_no_image_is_on_both(tmp_path):
    samples = [scene_sample(number % 60) for number in range(120)]  # every image twice
    write(tmp_path / "all", [Sample(f"{key:04d}", "x", one.members) for key, one in enumerate(samples)])
    sizes = split_shards(tmp_path / "all", tmp_path / "train", tmp_path / "held-out", share=0.2)
    train, held_out = images_of(tmp_path / "train"), images_of(tmp_path / "held-out")
    assert sizes == (len(train), len(held_out))
    assert len(train) + len(held_out) == 120
    assert 8 <= len(held_out) <= 44
    assert not set(train) & set(held_out)


def test_a_set_too_small_to_split_is_refused(tmp_path):
    write(tmp_path / "all", [scene_sample(1)])
    with pytest.raises(DataError, match="too few"):
        split_shards(tmp_path / "all", tmp_path / "train", tmp_path / "held-out")
