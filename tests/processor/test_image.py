"""From bytes to patches: results of Hugging Face and Pillow for accepted images."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from processor.pictures import AVIF, LIMITS, encoded, noise, repeatable, smooth, with_orientation
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from saccade.errors import ConfigError, ImageError
from saccade.processor.image import load_image
from saccade.processor.patches import ImageSettings, image_patches, video_patches

# ------------------------------------------------------------------ sizes


@settings(repeatable, max_examples=400)
@given(height=st.integers(1, 5000), width=st.integers(1, 5000))
def test_the_resized_size_is_hugging_faces_smart_resize(height, width):
    if max(height, width) > 200 * min(height, width):
        return
    own = ImageSettings()
    expected = smart_resize(height, width, own.cell, own.min_pixels, own.max_pixels)
    assert own.resized(height, width) == expected
    assert own.grid(height, width) == (1, expected[0] // 14, expected[1] // 14)


@settings(repeatable, max_examples=200)
@given(
    height=st.integers(1, 800),
    width=st.integers(1, 800),
    patch_size=st.sampled_from([14, 16]),
    merge_size=st.sampled_from([1, 2, 3]),
    min_cells=st.integers(1, 60),
    more_cells=st.integers(0, 200),
)
def test_the_resized_size_is_smart_resize_for_any_budget(height, width, patch_size, merge_size, min_cells, more_cells):
    if max(height, width) > 200 * min(height, width):
        return
    area = (patch_size * merge_size) ** 2
    own = ImageSettings(
        patch_size=patch_size,
        merge_size=merge_size,
        min_pixels=min_cells * area,
        max_pixels=(min_cells + more_cells) * area,
    )
    assert own.resized(height, width) == smart_resize(height, width, own.cell, own.min_pixels, own.max_pixels)


@pytest.mark.parametrize(("num_frames", "pairs"), [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4)])
def test_the_grid_counts_frame_pairs(num_frames, pairs):
    assert ImageSettings().grid(56, 84, num_frames) == (pairs, 4, 6)


def test_an_impossible_pixel_budget_is_refused():
    with pytest.raises(ConfigError, match="min_pixels 100 must be over 0 and at most max_pixels 50"):
        ImageSettings(min_pixels=100, max_pixels=50)
    with pytest.raises(ConfigError, match="min_pixels is 0"):
        ImageSettings(min_pixels=0)
    with pytest.raises(ConfigError, match=r"less than one token \(28x28 pixels\)"):
        ImageSettings(min_pixels=1, max_pixels=27 * 28)


# ------------------------------------------------------------------ patches


@pytest.mark.parametrize(
    ("width", "height"), [(28, 28), (644, 364), (1100, 60), (1, 1), (13, 200), (200, 1), (1009, 1200)]
)
def test_patches_are_the_pixels_of_hugging_face(width, height):
    pixels, own = noise(height, width), ImageSettings()
    reference = Qwen2VLImageProcessorPil()(images=[Image.fromarray(pixels)], return_tensors="np")
    patches, grid = image_patches(pixels, own)
    assert grid == tuple(reference["image_grid_thw"][0])
    normalized = reference["pixel_values"].reshape(len(patches), 3, -1)
    mean, std = np.array(own.mean).reshape(1, 3, 1), np.array(own.std).reshape(1, 3, 1)
    assert patches.dtype == np.uint8
    np.testing.assert_allclose(patches.reshape(len(patches), 3, -1), (normalized * std + mean) * 255, atol=1e-3)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("own", [ImageSettings(), ImageSettings(patch_size=4, merge_size=3, min_pixels=12 * 12)])
def test_every_pixel_of_every_frame_lands_where_the_grid_says(num_frames, own):
    height, width = 5 * own.cell, 3 * own.cell
    frames = [noise(height, width, seed=number) for number in range(num_frames)]
    patches, (pairs, rows, columns) = video_patches(frames, own)
    assert (pairs, rows, columns) == (-(-num_frames // 2), height // own.patch_size, width // own.patch_size)
    side, merge, index = own.patch_size, own.merge_size, 0
    for pair in range(pairs):
        for row_of_tokens in range(rows // merge):
            for column_of_tokens in range(columns // merge):
                for row in range(row_of_tokens * merge, (row_of_tokens + 1) * merge):
                    for column in range(column_of_tokens * merge, (column_of_tokens + 1) * merge):
                        found = patches[index].reshape(3, 2, side, side)
                        for slot in range(2):
                            frame = frames[min(2 * pair + slot, num_frames - 1)]
                            square = frame[row * side : (row + 1) * side, column * side : (column + 1) * side]
                            assert np.array_equal(found[:, slot], square.transpose(2, 0, 1))
                        index += 1
    assert index == len(patches)


def test_an_image_fills_both_temporal_slots_and_a_pair_of_frames_one_each():
    first, second = noise(56, 56, seed=1), noise(56, 56, seed=2)
    image = image_patches(first, ImageSettings())[0].reshape(16, 3, 2, 14, 14)
    pair = video_patches([first, second], ImageSettings())[0].reshape(16, 3, 2, 14, 14)
    alone = image_patches(second, ImageSettings())[0].reshape(16, 3, 2, 14, 14)
    assert np.array_equal(image[:, :, 0], image[:, :, 1])
    assert np.array_equal(pair[:, :, 0], image[:, :, 0])
    assert np.array_equal(pair[:, :, 1], alone[:, :, 0])


def test_an_odd_number_of_frames_repeats_the_last():
    frames = [noise(56, 56, seed=number) for number in range(3)]
    odd, odd_grid = video_patches(frames, ImageSettings())
    even, even_grid = video_patches([*frames, frames[-1]], ImageSettings())
    assert odd_grid == even_grid == (2, 4, 4)
    assert np.array_equal(odd, even)


# ------------------------------------------------------------------ decoding


@pytest.mark.parametrize(
    "options",
    [{}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}, {"quality": 20}, {"restart_marker_blocks": 1}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("size", [(101, 67), (1, 1), (16, 16)])
def test_jpeg_pixels_are_pillows(options, mode, size):
    data = encoded(smooth(*reversed(size)).convert(mode), "JPEG", **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(load_image(data, LIMITS), expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_adobe_deflate"}),
    ],
    ids=lambda v: str(v),
)
def test_lossless_formats_give_the_pixels_back(kind, options):
    pixels = noise(9, 14)
    assert np.array_equal(load_image(encoded(Image.fromarray(pixels), kind, **options), LIMITS), pixels)


@pytest.mark.parametrize("kind", ["TIFF", *AVIF])
def test_of_several_images_in_one_file_the_first_counts(kind):
    pages = [smooth(16, 24), *(Image.new("RGB", (24, 16), colour) for colour in ("red", "black"))]
    several = encoded(pages[0], kind, save_all=True, append_images=pages[1:])
    assert np.abs(load_image(several, LIMITS).astype(int) - load_image(encoded(pages[0], kind), LIMITS)).max() <= 16


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_upright_once(orientation):
    image, exif = Image.fromarray(noise(9, 14)), with_orientation(orientation)
    for compression in (None, "tiff_lzw"):
        data = encoded(image, "TIFF", exif=exif, compression=compression)
        assert np.array_equal(load_image(data, LIMITS), load_image(encoded(image, "PNG", exif=exif), LIMITS))
        assert np.array_equal(load_image(Image.open(io.BytesIO(data)), LIMITS), load_image(data, LIMITS))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_tiffs_of_other_modes_look_as_in_a_png_or_a_bmp(mode):
    picture = smooth(20, 30).convert("L" if mode == "I;16" else mode if mode != "CMYK" else "RGB").convert(mode)
    expected = np.asarray(picture.convert("RGB")) if mode == "CMYK" else load_image(encoded(picture, "PNG"), LIMITS)
    assert np.array_equal(load_image(encoded(picture, "TIFF"), LIMITS), expected)


@pytest.mark.parametrize("kind", AVIF)
def test_an_avif_is_close_to_its_picture_upright_and_opaque(kind):
    picture = smooth(40, 60)
    options = {"quality": 95, "subsampling": "4:4:4"}
    assert np.abs(load_image(encoded(picture, kind, **options), LIMITS).astype(int) - np.asarray(picture)).max() <= 12
    turned = load_image(encoded(picture, kind, exif=with_orientation(6), **options), LIMITS)
    assert np.abs(turned.astype(int) - np.rot90(np.asarray(picture), -1)).max() <= 12
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    assert load_image(encoded(clear, kind, **options), LIMITS).min() >= 250, "transparent pixels are white"


def test_a_still_gif_is_its_one_frame():
    image = Image.fromarray(noise(9, 14)).quantize(16)
    assert np.array_equal(load_image(encoded(image, "GIF"), LIMITS), np.asarray(image.convert("RGB")))


def test_the_same_image_by_every_road_is_the_same(tmp_path):
    pixels = noise(20, 30)
    data = encoded(Image.fromarray(pixels), "PNG")
    path = tmp_path / "picture of a cat.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, path, str(path), url, Image.open(path), Image.fromarray(pixels)):
        loaded = load_image(source, LIMITS)
        assert loaded.dtype == np.uint8
        assert np.array_equal(loaded, pixels)


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, -1)[:, ::-1][::-1, ::-1],
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    picture = smooth(40, 60)
    jpeg = encoded(picture, "JPEG", exif=with_orientation(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg)))
    assert np.array_equal(load_image(jpeg, LIMITS), np.asarray(upright))
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        data = encoded(picture, kind, exif=with_orientation(orientation), **options)
        assert np.array_equal(load_image(data, LIMITS), UPRIGHT[orientation](np.asarray(picture)))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_exif_does_not_know_is_left_alone(orientation):
    jpeg = encoded(smooth(40, 60), "JPEG", exif=with_orientation(orientation))
    assert np.array_equal(load_image(jpeg, LIMITS), np.asarray(Image.open(io.BytesIO(jpeg))))


def test_an_opened_pil_image_is_turned_upright_too():
    jpeg = encoded(smooth(40, 60), "JPEG", exif=with_orientation(6))
    assert np.array_equal(load_image(Image.open(io.BytesIO(jpeg)), LIMITS), load_image(jpeg, LIMITS))


def on_white(rgb, alpha):
    share = alpha[..., None] / 255
    return rgb * share + 255 * (1 - share)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_rgba_is_laid_on_white(kind):
    pixels = noise(12, 18, channels=4)
    data = encoded(Image.fromarray(pixels), kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    expected = on_white(pixels[..., :3].astype(float), pixels[..., 3].astype(float))
    np.testing.assert_allclose(load_image(data, LIMITS), expected, atol=1)


def test_grey_with_alpha_is_laid_on_white():
    pixels = noise(12, 18, channels=2)
    expected = on_white(pixels[..., :1].repeat(3, -1).astype(float), pixels[..., 1].astype(float))
    np.testing.assert_allclose(load_image(encoded(Image.fromarray(pixels), "PNG"), LIMITS), expected, atol=1)


def test_a_transparent_palette_entry_shows_white():
    image = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4), mode=None).convert("P")
    image.putpalette([value for entry in range(256) for value in (entry, 100, 255 - entry)])
    loaded = load_image(encoded(image, "PNG", transparency=5), LIMITS)
    indices = np.asarray(image)
    assert (loaded[indices == 5] == 255).all()
    assert np.array_equal(loaded[indices != 5], np.asarray(image.convert("RGB"))[indices != 5])


def test_a_transparent_colour_shows_white():
    pixels = noise(4, 4)
    pixels[1, 2] = (10, 20, 30)
    loaded = load_image(encoded(Image.fromarray(pixels), "PNG", transparency=(10, 20, 30)), LIMITS)
    assert (loaded[1, 2] == 255).all()
    assert np.array_equal(loaded[0], pixels[0])


def test_16_bit_grey_keeps_its_range():
    values = np.linspace(0, 65535, 256 * 4).astype(np.uint16).reshape(32, 32)
    loaded = load_image(encoded(Image.fromarray(values), "PNG"), LIMITS)
    np.testing.assert_allclose(loaded[..., 0], values / 257, atol=1)
    assert loaded.min() == 0
    assert loaded.max() == 255
    assert (loaded[..., 0] == loaded[..., 1]).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "LA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "I;16"])
def test_pil_images_of_the_usual_modes_become_rgb(mode):
    assert load_image(Image.new(mode, (6, 4)), LIMITS).shape == (4, 6, 3)


def test_16_bit_grey_that_is_dark_stays_dark():
    values = np.full((4, 4), 200, np.uint16)
    assert load_image(encoded(Image.fromarray(values), "PNG"), LIMITS).max() <= 1


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pil_images_of_numbers_without_a_known_range_are_refused(mode):
    with pytest.raises(ImageError, match=f"mode {mode} .*Convert it to RGB first"):
        load_image(Image.new(mode, (6, 4)), LIMITS)
