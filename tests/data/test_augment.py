"""Augmentation changes pixels in every epoch, alike after a resume and for any ranks and workers, and only if asked."""

import numpy as np
import pytest
import torch
from data.making import make_picture, make_shards
from data.test_loader import assert_same_batches
from PIL import Image, ImageOps

from saccade.data.augment import AugmentConfig, augment, generator, has_sides
from saccade.data.index_builder import build_index
from saccade.errors import ConfigError

STRONG = AugmentConfig(
    crop_scale=(0.3, 1.0), crop_ratio=(0.75, 1.333), flip=0.5, brightness=0.4, contrast=0.4, saturation=0.4,
    grayscale=0.2, erase=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_shards(tmp_path_factory.mktemp("augment") / "photos", 2, 6)
    build_index(folder, num_workers=1)
    return folder


def patches_by_sample(batches):
    """The patches of every sample by id; all images of the folder have equally many."""
    found = {}
    for batch in batches:
        for sequence in batch.sequences:
            parts = sequence.inputs.patches.chunk(len(sequence.sample_ids))
            found |= dict(zip(sequence.sample_ids, parts, strict=True))
    return found


def changed(picture, *, seed=0, can_flip=True, **settings):
    return augment(picture, picture.size, AugmentConfig(**settings), generator(seed, "a", 0), can_flip=can_flip)


def test_a_config_that_changes_nothing_gives_the_pixels_of_no_augmentation(folder, opened):
    plain, unchanged = (
        list(opened(folder, num_epochs=1, resize="pillow", augment=augment)) for augment in (None, AugmentConfig())
    )
    assert_same_batches(unchanged, plain)


def test_every_epoch_changes_every_image_and_no_length(folder, opened):
    plain = patches_by_sample(opened(folder, num_epochs=1))
    stream = list(opened(folder, num_epochs=2, augment=STRONG))
    first, second = patches_by_sample(stream[: len(stream) // 2]), patches_by_sample(stream[len(stream) // 2 :])
    assert first.keys() == second.keys() == plain.keys()
    for name in plain:
        assert first[name].shape == plain[name].shape
        assert not torch.equal(first[name], second[name])
        assert not torch.equal(first[name], plain[name])


def test_resumed_stream_augments_as_the_uninterrupted_one_with_workers_too(folder, opened):
    settings = {"num_epochs": 3, "augment": STRONG, "max_seq_len": 300}
    whole = list(opened(folder, **settings))
    resumed = list(opened(folder, state=whole[3].state, num_workers=1, **settings))
    assert_same_batches(resumed, whole[4:])


def test_another_seed_gives_other_pixels(folder, opened):
    one, other = (patches_by_sample(opened(folder, num_epochs=1, augment=STRONG, seed=seed)) for seed in (0, 1))
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_conversations_about_left_and_right_are_not_mirrored():
    picture = make_picture()
    assert changed(picture, flip=1.0) == ImageOps.mirror(picture)
    assert changed(picture, flip=1.0, can_flip=False) == picture
    question = {"role": "user", "content": [{"type": "image", "image": b""}, {"type": "text", "text": "What is it?"}]}
    assert has_sides([question, {"role": "assistant", "content": "A dog to the Left of a man."}])
    assert has_sides([question, {"role": "assistant", "content": "The rightmost door."}])
    assert not has_sides([question, {"role": "assistant", "content": "A bright dog."}])


def test_crops_have_the_area_and_the_ratio_asked_for():
    """A ramp in x and y shows which part of it a crop took."""
    rows, columns = np.mgrid[0:200, 0:200]
    ramp = Image.fromarray(np.stack([rows, columns, rows], axis=2).astype(np.uint8))
    areas, ratios = [], []
    for seed in range(60):
        pixels = np.asarray(changed(ramp, seed=seed, crop_scale=(0.2, 0.5), crop_ratio=(0.8, 1.25))).astype(float)
        height, width = np.ptp(pixels[:, 100, 0]), np.ptp(pixels[100, :, 1])
        areas.append(height * width / 200**2)
        ratios.append(width / height)
    assert 0.18 <= min(areas) < 0.25
    assert 0.45 < max(areas) <= 0.52
    assert 0.75 <= min(ratios) < 0.9
    assert 1.1 < max(ratios) <= 1.3


def test_a_gray_image_has_the_brightness_of_the_original():
    picture = make_picture()
    assert changed(picture, grayscale=1.0) == ImageOps.grayscale(picture).convert("RGB")
    is_gray = [changed(picture, seed=seed, grayscale=0.25) != picture for seed in range(200)]
    assert 0.15 < sum(is_gray) / len(is_gray) < 0.35


def test_an_erased_rectangle_has_the_mean_colour_and_a_fiftieth_to_a_third_of_the_area():
    picture = make_picture()
    pixels, areas = np.asarray(picture), []
    for seed in range(60):
        erased = np.asarray(changed(picture, seed=seed, erase=1.0))
        rows, columns = (np.flatnonzero((erased != pixels).any(axis=(2, axis))) for axis in (1, 0))
        box = erased[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (np.abs(box - pixels.mean((0, 1))) < 1.0).all()
        areas.append(box.shape[0] * box.shape[1] / pixels[..., 0].size)
    assert 0.01 < min(areas) < 0.06
    assert 0.25 < max(areas) < 0.35
    is_erased = [changed(picture, seed=seed, erase=0.25) != picture for seed in range(200)]
    assert 0.15 < sum(is_erased) / len(is_erased) < 0.35


@pytest.mark.parametrize(
    "wrong",
    [{"crop_scale": (0.5,)}, {"crop_scale": (0.0, 1.0)}, {"crop_ratio": (2.0, 1.0)}, {"flip": 1.5}, {"erase": 2.0}],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AugmentConfig(**wrong)
