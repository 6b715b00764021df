"""Stochastic depth of the vision tower: images skip blocks independently, in training only."""

import dataclasses

import pytest
import torch

from saccade.model.families import VISION_LANGUAGE, named_size
from saccade.model.vision.layout import Segments
from saccade.model.vision.tower import drop_paths
from saccade.model.vlm import VLM


def make_tower(size):
    torch.manual_seed(0)
    return VLM(size).vision


def same_images(tower, count):
    """Pixels and layout of the same image `count` times."""
    grid, num_patches = tower.square_grid(64)
    pixels = torch.rand(num_patches, tower.config.patch_dim).repeat(count, 1)
    return pixels, tower.layout([grid] * count).to(torch.device("cpu"))


def test_an_image_is_dropped_as_a_whole_with_a_probability_that_grows_with_depth():
    lengths = torch.tensor([3, 1, 5] * 400, dtype=torch.int32)
    segments = Segments(torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(), 5)
    torch.manual_seed(0)
    kept = torch.stack(drop_paths(0.4, 5, segments, torch.zeros(int(lengths.sum()), 8)))
    assert kept.shape == (5, 2, lengths.sum(), 1)
    images = [part[:, :, 0, 0] for part in kept.split(lengths.tolist(), dim=2)]
    for part, image in zip(kept.split(lengths.tolist(), dim=2), images, strict=True):
        assert (part[..., 0] == image[..., None]).all(), "all patches of an image alike"
    for layer, rate in enumerate([0.0, 0.1, 0.2, 0.3, 0.4]):
        factors = torch.stack(images)[:, layer]
        assert factors.unique().tolist() == pytest.approx([1.0] if rate == 0.0 else [0.0, 1 / (1 - rate)])
        assert (factors == 0).float().mean().item() == pytest.approx(rate, abs=0.04)
        assert rate == 0.0 or (factors[:, 0] != factors[:, 1]).any(), "attention and MLP are drawn apart"


def test_an_image_that_skips_a_block_has_the_features_before_it():
    size = named_size("tiny")
    tower = make_tower(size)
    pixels, inputs = same_images(tower, 6)
    tower.drop_path = 0.9
    torch.manual_seed(5)
    *_, last = drop_paths(0.9, size.vision.num_layers, inputs.images, pixels)
    torch.manual_seed(5)
    [features] = tower(pixels, inputs)
    shorter = make_tower(
        dataclasses.replace(size, vision=dataclasses.replace(size.vision, num_layers=1, full_attention_layers=()))
    )
    shorter.load_state_dict(tower.state_dict(), strict=False)
    assert size.vision.num_layers == 2, "all blocks but the last are never skipped"
    [before] = shorter(pixels, inputs)
    is_skipped = (last == 0).all(0)[:, 0]
    assert is_skipped.any()
    assert not is_skipped.all()
    assert torch.equal(features[is_skipped], before[is_skipped])
    assert not torch.isclose(features[~is_skipped], before[~is_skipped]).all(1).any()


@pytest.mark.parametrize("family", VISION_LANGUAGE.values(), ids=VISION_LANGUAGE)
def test_every_tower_drops_paths_in_training_alone_and_learns_from_the_rest(family):
    tower = make_tower(family.sizes["tiny"])
    pixels, inputs = same_images(tower, 16)
    plain = [output.detach() for output in tower(pixels, inputs)]
    tower.drop_path = 0.5
    torch.manual_seed(1)
    dropped = tower(pixels, inputs)
    per_image = dropped[0].chunk(16)
    assert not all(torch.allclose(per_image[0], other) for other in per_image[1:])
    sum(output.square().mean() for output in dropped).backward()
    unused = {parameter for module in tower.unused_modules() for parameter in module.parameters()}
    trained = [parameter for parameter in tower.parameters() if parameter not in unused]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in trained)
    state = torch.get_rng_state()
    for output, expected in zip(tower.eval()(pixels, inputs), plain, strict=True):
        assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), state), "no random number is drawn"
