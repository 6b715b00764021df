import numpy as np
import pytest
import torch
from PIL import Image

from saccade.kernels import launch
from saccade.kernels.resize import resize, resize_reference, resize_weights
from saccade.processor.pillow_resize import rows_first

LARGE = [
    ((952, 1288), (840, 1148)),
    ((517, 301), (504, 308)),
    ((30, 2000), (28, 56)),
    ((2000, 30), (56, 28)),
]
"""(height, width) of an image, and of the result."""
SMALL = [
    ((1, 1), (5, 3)),
    ((5, 3), (1, 1)),
    ((1, 40), (7, 11)),
    ((40, 1), (7, 11)),
    ((20, 31), (20, 45)),  # one pass
    ((20, 31), (33, 31)),
    ((19, 23), (29, 17)),
    ((90, 16), (8, 15)),  # Pillow 13 begins with rows
    ((16, 90), (15, 8)),
    ((3, 400), (4, 2)),
    ((2, 171), (2, 342)),  # 2052 elements: three programs, the last with 4
]


def sizes_of(case):
    return " to ".join(f"{height}x{width}" for height, width in case)


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def hard_edges(size, seed=0):
    """Black and white: the filter overshoots, so that colours are clipped in both passes."""
    return np.random.default_rng(seed).choice(np.array([0, 255], np.uint8), (*size, 3))


def pillow(pixels, size):
    return torch.from_numpy(np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC)))


def resize_as_pillow(function, pixels, size, device):
    first = rows_first(*pixels.shape[:2], *size)
    return function(torch.from_numpy(pixels).to(device), *size, rows_first=first)


def resize_triton(*arguments, **options):
    with launch.forced("triton"):
        return resize(*arguments, **options)


@pytest.mark.parametrize("picture", [noise, hard_edges])
@pytest.mark.parametrize("case", LARGE + SMALL, ids=sizes_of)
def test_the_reference_equals_pillow(case, picture, device):
    size, new_size = case
    pixels = picture(size)
    result = resize_as_pillow(resize_reference, pixels, new_size, device)
    assert result.dtype == torch.uint8
    assert torch.equal(result.cpu(), pillow(pixels, new_size))


def test_the_reference_equals_pillow_at_random_sizes(device):
    random = np.random.default_rng(1)
    for seed in range(150):
        height, width, new_height, new_width = (int(2**power) for power in random.uniform(0, 8, 4))
        pixels = (noise, hard_edges)[seed % 2]((height, width), seed)
        result = resize_as_pillow(resize_reference, pixels, (new_height, new_width), device)
        assert torch.equal(result.cpu(), pillow(pixels, (new_height, new_width))), (pixels.shape, new_height, new_width)


def test_weights_of_every_ratio_are_those_of_pillow(device):
    """A pass over a line: each of 97 sizes to each of 14."""
    for old in range(1, 98):
        pixels = hard_edges((1, old), old)
        for new in range(1, 98, 7):
            result = resize_as_pillow(resize_reference, pixels, (1, new), device)
            assert torch.equal(result.cpu(), pillow(pixels, (1, new))), (old, new)


def test_weights_are_normalised_and_zero_after_the_last_pixel():
    for old, new in [(1, 9), (9, 1), (37, 36), (36, 37), (1288, 1148), (2000, 56)]:
        first, weights = resize_weights(old, new)
        is_after = first[:, None] + np.arange(weights.shape[1]) >= old
        assert first.min() >= 0
        assert not weights[is_after].any()
        assert np.abs(weights.sum(axis=1) - 2**22).max() <= weights.shape[1]
        assert 255 * np.abs(weights.astype(np.int64)).sum(axis=1).max() + 2**21 < 2**31
        assert not first.flags.writeable
        assert not weights.flags.writeable


@pytest.mark.parametrize("picture", [noise, hard_edges])
@pytest.mark.parametrize("case", SMALL, ids=sizes_of)
def test_the_kernel_equals_the_reference_in_both_orders(case, picture, device):
    size, new_size = case
    pixels = torch.from_numpy(picture(size)).to(device)
    for first in (False, True):
        result = resize_triton(pixels, *new_size, rows_first=first)
        assert result.is_contiguous()
        assert result.dtype == torch.uint8
        assert torch.equal(result, resize_reference(pixels, *new_size, rows_first=first))


def test_the_order_of_the_passes_changes_pixels_on_hard_edges(device):
    pixels = torch.from_numpy(hard_edges((24, 24))).to(device)
    columns, rows = (resize_triton(pixels, 17, 31, rows_first=first) for first in (False, True))
    assert not torch.equal(columns, rows)


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_an_image_of_the_right_size_is_returned_as_it_is(path, device):
    pixels = torch.from_numpy(noise((7, 9))).to(device)
    with launch.forced(path):
        assert resize(pixels, 7, 9, rows_first=True) is pixels


def test_a_pixel_that_differs_changes_the_positions_whose_taps_have_it_and_no_others(device):
    pixels = torch.full((30, 40, 3), 100, dtype=torch.uint8, device=device)
    expected = resize_reference(pixels, 22, 50, rows_first=False)
    pixels[11, 23, 1] += 50
    changed = (resize_triton(pixels, 22, 50, rows_first=False) != expected).nonzero().tolist()
    reached = []
    for position, old, new in ((11, 30, 22), (23, 40, 50)):
        first, weights = resize_weights(old, new)
        reached.append({n for n in range(new) if weights[n][first[n] + np.arange(weights.shape[1]) == position].any()})
    rows, columns, colours = (set(values) for values in zip(*changed, strict=True))
    assert rows <= reached[0]
    assert columns <= reached[1]
    assert colours == {1}


def test_one_level_more_in_one_pixel_is_noticed(device):
    pixels = torch.from_numpy(noise((24, 20))).to(device)
    expected = resize_reference(pixels, 30, 30, rows_first=False)
    result = resize_triton(pixels, 30, 30, rows_first=False)
    assert torch.equal(result, expected)
    result[29, 29, 2] ^= 1
    assert not torch.equal(result, expected)


def test_what_is_no_image_is_refused(device):
    pixels = torch.from_numpy(noise((8, 6))).to(device)
    planar, gray, strided = pixels.permute(2, 0, 1), pixels[:, :, :1].contiguous(), pixels[:, ::2]
    for bad in (pixels.float(), pixels[0], pixels[None], planar, gray, strided, pixels[:0]):
        with pytest.raises(ValueError, match=r"resize: needs a contiguous uint8 image .* to 4 x 5"):
            resize(bad, 4, 5, rows_first=False)
    for height, width in ((0, 5), (4, 0), (-1, 5)):
        with pytest.raises(ValueError, match=rf"\(8, 6, 3\) .* to {height} x {width}"):
            resize(pixels, height, width, rows_first=False)


@pytest.mark.gpu
@pytest.mark.parametrize("picture", [noise, hard_edges])
@pytest.mark.parametrize("case", [*LARGE, ((6000, 9000), (2240, 3360))], ids=sizes_of)
def test_real_images_equal_pillow_without_synchronisation(case, picture, device):
    size, new_size = case
    pixels = picture(size)
    on_device, first = torch.from_numpy(pixels).to(device), rows_first(*size, *new_size)
    torch.cuda.set_sync_debug_mode("error")
    result = resize(on_device, *new_size, rows_first=first)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result.cpu(), pillow(pixels, new_size))


@pytest.mark.gpu
def test_weights_are_there_on_every_stream(device):
    pixels = torch.from_numpy(noise((203, 411))).to(device)
    expected = resize_reference(pixels, 196, 420, rows_first=False)
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            result = resize(pixels, 196, 420, rows_first=False)
            assert torch.equal(result, expected)


@pytest.mark.gpu
def test_elements_beyond_two_to_the_31_are_found(device):
    pixels = torch.randint(256, (28000, 25600, 3), dtype=torch.uint8, device=device)
    wider = resize_triton(pixels, 28000, 25601, rows_first=False)
    assert torch.equal(wider[-3:], resize_reference(pixels[-3:], 3, 25601, rows_first=False))
    del wider
    higher = resize_triton(pixels, 28001, 25600, rows_first=False)
    assert torch.equal(higher[:, -3:], resize_reference(pixels[:, -3:], 28001, 3, rows_first=False))
