"""Tiles are those of `transformers`: resolution, pixels and the features that are not padding, at any size."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from model.hugging_face import picture
from transformers import LlavaNextProcessor
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from saccade.errors import ConfigError
from saccade.processor.pillow_resize import pillow_resize
from saccade.processor.tiles import Tiling, best_resolution

PUBLISHED = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
MAX_9 = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
SIZES = [(1, 1), (1, 200), (200, 1), (16384, 82), (82, 16384), (336, 336), (337, 336), (672, 671), (480, 640)]


def random_sizes(count):
    rng = random.Random(0)
    lengths = [lambda: rng.randint(1, 2000), lambda: int(2 ** rng.uniform(0, 14))]
    return [(rng.choice(lengths)(), rng.choice(lengths)()) for _ in range(count)]


@pytest.mark.parametrize("resolutions", [PUBLISHED, MAX_9, PUBLISHED[::-1]], ids=["published", "max 9", "reversed"])
def test_the_resolution_is_that_of_transformers(resolutions):
    for size in SIZES + random_sizes(500):
        assert best_resolution(size, resolutions) == select_best_resolution(size, resolutions), size


@pytest.mark.parametrize(("tile_size", "patch_size"), [(336, 14), (30, 7)])
def test_the_number_of_tokens_is_that_of_transformers(tile_size, patch_size):
    resolutions = tuple((height // 336 * tile_size, width // 336 * tile_size) for height, width in PUBLISHED)
    tiling = Tiling(tile_size=tile_size, patch_size=patch_size, resolutions=resolutions)
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=[list(one) for one in resolutions]), patch_size=patch_size,
        num_additional_image_tokens=0,
    )  # fmt: skip
    processor._get_unpadded_features = LlavaNextProcessor._get_unpadded_features.__get__(processor)
    for size in SIZES + random_sizes(500):
        expected = LlavaNextProcessor._get_number_of_features(processor, *size, tile_size, tile_size)
        kept = tiling.unpadded(size)
        assert tiling.patches_per_tile + kept.rows * (kept.columns + 1) == expected, size


def test_a_long_strip_may_keep_no_row_and_a_tall_one_no_column():
    tiling = Tiling(tile_size=336, patch_size=14, resolutions=PUBLISHED)
    assert tiling.unpadded((1, 200)).rows == 0
    assert tiling.unpadded((200, 1)).columns == 0


@pytest.mark.parametrize(("tile_size", "patch_size"), [(28, 14), (30, 14), (9, 3)], ids=str)
@pytest.mark.parametrize("size", [(40, 90), (130, 61), (28, 28), (5, 300), (90, 30)], ids=str)
def test_pixels_are_those_of_transformers(tile_size, patch_size, size):
    resolutions = tuple((height // 336 * tile_size, width // 336 * tile_size) for height, width in PUBLISHED)
    image = picture(size[1], size[0], 7)
    oracle = LlavaNextImageProcessorPil(
        size={"shortest_edge": tile_size}, crop_size={"height": tile_size, "width": tile_size},
        image_grid_pinpoints=[list(one) for one in resolutions], do_rescale=False, do_normalize=False,
    )  # fmt: skip
    [expected] = oracle([image], return_tensors="np")["pixel_values"]
    tiling = Tiling(tile_size=tile_size, patch_size=patch_size, resolutions=resolutions)
    assert len(expected) == tiling.num_tiles(size)
    patches = np.empty((len(expected) * tiling.patches_per_tile, 3 * patch_size**2), np.uint8)
    tiling.cut(np.asarray(image), pillow_resize, patches)
    side = tiling.patches_per_side
    tiles = patches.reshape(-1, side, side, 3, patch_size, patch_size).transpose(0, 3, 1, 4, 2, 5)
    whole = side * patch_size
    assert np.array_equal(tiles.reshape(-1, 3, whole, whole), expected[:, :, :whole, :whole])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resolutions": ((336, 500),)}, "not made of whole tiles"),
        ({"resolutions": ()}, "empty"),
        ({"patch_size": 400}, "do not fit"),
    ],
)
def test_tilings_that_no_tower_has_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Tiling(**{"tile_size": 336, "patch_size": 14, "resolutions": PUBLISHED} | change)
