"""Splitting a shard folder into training and held-out samples."""

import json

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


def sample_of(key, *pictures):
    caption = b'{"captions": ["A scene."]}'
    return Sample(key, "x", {**{f"{n}.png": picture for n, picture in enumerate(pictures)}, "json": caption})


def test_samples_that_share_an_image_through_a_third_one_are_on_one_side(tmp_path):
    pictures = [images(scene_sample(number))[0] for number in range(40)]
    chained = [sample_of(f"{n:03d}", pictures[n], pictures[n + 1]) for n in range(0, 38)]
    write(tmp_path / "all", [*chained, sample_of("999", pictures[39])])
    sizes = split_shards(tmp_path / "all", tmp_path / "train", tmp_path / "held-out", share=0.5)
    assert sorted(sizes) == [1, 38]


def test_a_few_images_are_split_too_and_each_side_gets_one(tmp_path):
    write(tmp_path / "all", [scene_sample(number) for number in range(2)])
    for share in (0.01, 0.99):
        folder = tmp_path / str(share)
        assert split_shards(tmp_path / "all", folder / "train", folder / "held-out", share=share) == (1, 1)


def test_an_image_stays_on_its_side_when_samples_are_added_and_another_seed_holds_out_others(tmp_path):
    sides = {}
    for name, count, seed in (("few", 40, 0), ("many", 80, 0), ("other", 80, 1)):
        write(tmp_path / name, [scene_sample(number) for number in range(count)])
        held_out = tmp_path / f"{name}-held-out"
        split_shards(tmp_path / name, tmp_path / f"{name}-train", held_out, share=0.3, seed=seed)
        sides[name] = set(images_of(held_out))
    assert sides["few"] < sides["many"]
    assert sides["other"] != sides["many"]


def test_the_command_writes_train_and_test_and_refuses_to_write_there_twice(tmp_path, command):
    write(tmp_path / "all", [scene_sample(number) for number in range(30)])
    words = ("data", "split", tmp_path / "all", "-o", tmp_path / "parts", "--share", "0.2")
    ended = command(*words, "--json")
    assert ended.status == 0, ended.err
    report = json.loads(ended.out)
    assert (report["train"], report["test"]) == tuple(len(images_of(tmp_path / "parts" / n)) for n in ("train", "test"))
    again = command(*words)
    assert again.status == 2
    assert "parts/train: exists already" in again.err
    wrong = command(*words[:4], tmp_path / "new", "--share", "1.5")
    assert wrong.status == 2
    assert "1.5" in wrong.err
