"""The fast resize is within 2/255 of Pillow for any picture and size, and gives the same patches otherwise."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.errors import ConfigError, ImageError
from saccade.processor import Processor
from saccade.processor.patches import ImageSettings, image_patches
from saccade.processor.pillow_resize import pillow_resize, resize_in_strips
from saccade.processor.torch_resize import torch_resize

BOUND = 2


def photo(width, height, seed):
    """Shapes of every scale with falling contrast, as in a photo."""
    random, layers = np.random.default_rng(seed), np.full((height, width, 3), 128.0)
    for cells in (3, 8, 20, 50, 120):
        shapes = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        layers += (np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC), float) - 128) / cells**0.3
    return np.clip(layers, 0, 255).astype(np.uint8)


def print_page(width, height, seed):
    """Black on white with the hardest edges, where the two kernels differ most."""
    return np.random.default_rng(seed).choice(np.array([0, 255], np.uint8), (height, width, 3))


def furthest(pixels, height, width):
    difference = pillow_resize(pixels, height, width).astype(int) - torch_resize(pixels, height, width)
    return np.abs(difference).max(), np.abs(difference).mean()


SIZES = {
    "shrunk": (1600, 1200),
    "nearly the same": (511, 897),
    "enlarged": (37, 20),
    "one pixel": (1, 1),
    "a line": (600, 3),
    "a column": (3, 600),
    "wide": (1000, 30),
    "tall": (30, 1000),
}


@pytest.mark.parametrize("picture", [photo, print_page])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_fast_resize_is_within_two_steps_of_pillow(picture, size):
    width, height = size
    largest, mean = furthest(picture(width, height, seed=0), *ImageSettings().resized(height, width))
    assert largest <= BOUND
    assert mean <= 0.1


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    sizes=st.tuples(*[st.integers(1, 200)] * 4),
    picture=st.sampled_from([photo, print_page]),
    seed=st.integers(0, 10**6),
)
def test_the_bound_holds_for_any_two_sizes(sizes, picture, seed):
    width, height, new_width, new_height = sizes
    assert furthest(picture(width, height, seed), new_height, new_width)[0] <= BOUND


@settings(deadline=None, derandomize=True, max_examples=150)
@given(sizes=st.tuples(*[st.integers(1, 200)] * 4), num_strips=st.integers(2, 5), seed=st.integers(0, 10**6))
def test_strips_have_the_pixels_of_the_whole_image(sizes, num_strips, seed):
    width, height, new_width, new_height = sizes
    pixels = print_page(width, height, seed)
    whole = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BICUBIC))
    assert np.array_equal(resize_in_strips(pixels, new_height, new_width, num_strips), whole)


def test_a_large_image_has_the_pixels_of_pillow():
    pixels = photo(1000, 700, seed=1)
    whole = np.asarray(Image.fromarray(pixels).resize((560, 448), Image.Resampling.BICUBIC))
    assert np.array_equal(pillow_resize(pixels, 448, 560), whole)


def test_the_bound_is_tight_enough_to_notice_another_kernel():
    pixels = torch.from_numpy(photo(300, 200, seed=0).copy())[None].permute(0, 3, 1, 2)
    aliased = torch.nn.functional.interpolate(pixels, (98, 154), mode="bicubic")[0].permute(1, 2, 0).numpy()
    assert np.abs(aliased.astype(int) - pillow_resize(photo(300, 200, seed=0), 98, 154)).max() > BOUND


def test_an_image_that_needs_no_resize_is_the_same_by_both():
    pixels = photo(56, 84, seed=0)
    with_pillow, _ = image_patches(pixels, ImageSettings())
    with_torch, _ = image_patches(pixels, ImageSettings(), torch_resize)
    assert np.array_equal(with_pillow, with_torch)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_processor_resizes_as_it_was_told(checkpoint, kind):
    buffer = io.BytesIO()
    Image.fromarray(photo(200, 150, seed=1)).save(buffer, kind)
    message = {"role": "user", "content": [{"type": "image", "image": buffer.getvalue()}]}
    exact, fast = Processor.load(checkpoint), Processor.load(checkpoint, resize="torch")
    expected, found = exact.preprocess([message]), fast.preprocess([message])
    difference = (found.patches.int() - expected.patches.int()).abs()
    assert 0 < difference.max() <= BOUND
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.image_grids, expected.image_grids)


def test_a_truncated_jpeg_is_an_error_with_the_fast_resize_too(checkpoint):
    buffer = io.BytesIO()
    Image.fromarray(photo(200, 150, seed=1)).save(buffer, "JPEG")
    data = buffer.getvalue()
    message = {"role": "user", "content": [{"type": "image", "image": data[: len(data) // 2]}]}
    with pytest.raises(ImageError, match="truncated or corrupt"):
        Processor.load(checkpoint, resize="torch").preprocess([message])


def test_an_unknown_resize_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="resize is 'opencv'"):
        Processor.load(checkpoint, resize="opencv")
