"""From bytes to patches: results of Hugging Face and Pillow for accepted images, an ImageError for all others."""

import base64
import io
import os
import random
import struct
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from saccade.errors import ConfigError, ImageError
from saccade.processor.image import FORMATS, ImageSettings, MediaLimits, image_patches, load_image, video_patches

LIMITS = MediaLimits()
AVIF = ["AVIF"] if "AVIF" in FORMATS else []
repeatable = settings(deadline=None, derandomize=True)


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(height, width):
    """A picture rather than noise, so that chroma upsampling has something to do."""
    return Image.fromarray(noise(5, 7)).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png_chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_header(width, height):
    """A PNG that states a size and has no pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"\0")) + png_chunk(b"IEND", b"")


def tiff_header(width, height, tags=None):
    """An uncompressed grey TIFF that states a size, with almost no pixels."""
    strips = {273: 8, 278: height, 279: width * height} if tags is None else {}
    entries = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 277: 1, **strips, **(tags or {})}
    body = b"".join(struct.pack("<HHII", tag, 4, 1, entries[tag]) for tag in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(64)


def gif(screen, frame):
    """A GIF whose frame has another size."""
    head = b"GIF89a" + struct.pack("<HH", *screen) + b"\x80\0\0" + b"\0" * 6
    return head + b"," + struct.pack("<HHHH", 0, 0, *frame) + b"\0" + b"\x02\x02\x44\x01\0;"


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


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "zero bytes"),
        (b"To be, or not to be", "in no supported format"),
        (b"x", "in no supported format"),
        (b"%PDF-1.7 \n%\xe2\xe3", "in no supported format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "in no supported format"),
        (b"\xff\xd8\xff", "looks like JPEG"),
        (b"\x89PNG\r\n\x1a\n", "looks like PNG"),
        (b"GIF89a", "looks like GIF"),
        (b"BM", "looks like BMP"),
        (b"II*\0", "looks like TIFF"),
        (b"\0\0\0\x1cftypheic" + bytes(60), "in no supported format"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "looks like WEBP"),
        ("http://example.org/cat.png", "remote images are not fetched"),
        ("HTTPS://example.org/cat.png", "remote images are not fetched"),
        ("s3://bucket/cat.png", "remote images are not fetched"),
        ("/no/such/picture.png", "/no/such/picture.png: No such file"),
        ("x" * 5000, "File name too long"),
        ("data:image/png;base64,====", "invalid base64"),
        ("data:image/png;base64,aGVs bG8=", "invalid base64"),
        ("data:image/png;base64,", "zero bytes"),
        ("data:image/png;base64,aGVsbG8=", "in no supported format"),
        ("data:image/png,hello", "not of the form data:image/<format>;base64,<data>"),
        ("data:text/plain;base64,aGVsbG8=", "not of the form data:image/<format>;base64,<data>"),
        ("data:image/png;base64", "not of the form data:image/<format>;base64,<data>"),
        (
            None,
            "an image is a path, bytes, BytesIO, a data URL, a PIL image or a uint8 array [height, width, 3], "
            "not NoneType",
        ),
        (7, ", not int"),
        (["a.png"], ", not list"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_not_an_image_is_refused_with_the_reason(source, words):
    with pytest.raises(ImageError) as caught:
        load_image(source, LIMITS)
    assert words in str(caught.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ImageError, match="not a file"):
        load_image(tmp_path, LIMITS)


def test_a_text_file_is_refused(tmp_path):
    (tmp_path / "cat.png").write_text("not a cat")
    with pytest.raises(ImageError, match="in no supported format"):
        load_image(tmp_path / "cat.png", LIMITS)


def test_formats_that_pillow_knows_and_we_do_not_stay_closed():
    for kind in ("PPM", "ICO", "TGA", "PDF", "JPEG2000"):
        with pytest.raises(ImageError, match="in no supported format"):
            load_image(encoded(Image.new("RGB", (16, 16)), kind), LIMITS)


def test_over_max_bytes_is_refused_by_every_road(tmp_path):
    data = encoded(Image.fromarray(noise(20, 30)), "PNG")
    limits = MediaLimits(max_bytes=len(data) - 1)
    path = tmp_path / "big.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, path, url):
        with pytest.raises(ImageError, match=rf"bytes, over the limit of {len(data) - 1}\. (Send|Use) a smaller file"):
            load_image(source, limits)
        assert load_image(source, MediaLimits(max_bytes=len(data))).shape == (20, 30, 3)


def test_a_much_too_large_data_url_is_refused_before_it_is_decoded():
    url = "data:image/png;base64," + "!" * 4000  # not base64: decoding it would say so
    with pytest.raises(ImageError, match="about 3000 bytes, over the limit of 1000"):
        load_image(url, MediaLimits(max_bytes=1000))


def test_a_bomb_is_refused_on_its_header():
    """The file ends after the header: decoding it would raise another error."""
    with pytest.raises(ImageError, match=r"60000x60000 pixels; the longest side may be 16384"):
        load_image(png_header(60000, 60000), LIMITS)
    with pytest.raises(ImageError, match=r"16000x16000 = 256000000 pixels, over the limit of 64000000"):
        load_image(png_header(16000, 16000), LIMITS)


def test_a_pil_image_obeys_the_limits_too():
    with pytest.raises(ImageError, match="longest side may be 10"):
        load_image(Image.new("RGB", (11, 4)), MediaLimits(max_side=10))
    with pytest.raises(ImageError, match="0x4 pixels; both sides must be at least 1"):
        load_image(Image.new("RGB", (0, 4)), LIMITS)


def test_over_max_side_is_refused_and_at_it_is_not():
    data = encoded(Image.new("RGB", (50, 40)), "PNG")
    assert load_image(data, MediaLimits(max_side=50)).shape == (40, 50, 3)
    with pytest.raises(ImageError, match=r"50x40 pixels; the longest side may be 49. Shrink it first"):
        load_image(data, MediaLimits(max_side=49))


def test_over_max_pixels_is_refused_and_at_it_is_not():
    data = encoded(Image.new("RGB", (50, 40)), "PNG")
    assert load_image(data, MediaLimits(max_pixels=2000)).shape == (40, 50, 3)
    with pytest.raises(ImageError, match=r"50x40 = 2000 pixels, over the limit of 1999. Shrink it first"):
        load_image(data, MediaLimits(max_pixels=1999))


def test_over_the_aspect_ratio_is_refused_and_at_it_is_not():
    assert load_image(encoded(Image.new("RGB", (200, 1)), "PNG"), LIMITS).shape == (1, 200, 3)
    with pytest.raises(ImageError, match=r"1x201 pixels, an aspect ratio of 201 over the limit of 200. Crop it first"):
        load_image(encoded(Image.new("RGB", (1, 201)), "PNG"), LIMITS)


def test_a_path_is_not_read_where_local_files_are_not_allowed(tmp_path):
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(Image.new("RGB", (4, 4)), "PNG"))
    limits = MediaLimits(allow_local_files=False)
    for source in (path, str(path), "/etc/passwd", "/no/such/file"):
        with pytest.raises(ImageError) as caught:
            load_image(source, limits)
        assert str(caught.value) == "images given as a path are not read here. Send the bytes as a data URL"
    assert load_image(path.read_bytes(), limits).shape == (4, 4, 3)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_refused(kind):
    frames = [Image.fromarray(noise(8, 8, seed=number)) for number in range(3)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match=f"animated {kind}. Send it as a video, a list of frames"):
        load_image(data, LIMITS)


def test_a_jpeg_cut_anywhere_is_refused():
    for options in ({}, {"progressive": True}, {"exif": with_orientation(6)}):
        data = encoded(Image.fromarray(noise(24, 24)), "JPEG", **options)
        for end in range(0, len(data) - 1, 7):
            with pytest.raises(ImageError):
                load_image(data[:end], LIMITS)


def test_a_jpeg_cut_in_its_picture_is_called_truncated():
    data = encoded(Image.fromarray(noise(24, 24)), "JPEG")
    with pytest.raises(ImageError, match=r"JPEG image of 24x24 pixels is truncated or corrupt. Send the whole file"):
        load_image(data[: len(data) // 2 + 200], LIMITS)


@pytest.mark.filterwarnings("ignore")  # Pillow warns about metadata it cannot read
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", *AVIF])
def test_a_file_cut_anywhere_is_refused_or_whole(kind):
    pixels = noise(24, 24)
    data = encoded(Image.fromarray(pixels), kind)
    whole = load_image(data, LIMITS)
    for end in range(0, len(data) - 1, max(1, len(data) // 80)):
        try:
            assert np.array_equal(load_image(data[:end], LIMITS), whole)
        except ImageError:
            continue


def test_a_png_cut_in_its_picture_is_called_truncated():
    data = encoded(Image.fromarray(noise(24, 24)), "PNG")
    with pytest.raises(ImageError, match="PNG image of 24x24 pixels is truncated or corrupt"):
        load_image(data[: len(data) // 2], LIMITS)


def test_a_png_with_a_wrong_checksum_is_refused():
    data = bytearray(encoded(Image.fromarray(noise(24, 24)), "PNG"))
    data[len(data) // 2] ^= 1
    with pytest.raises(ImageError, match="truncated or corrupt"):
        load_image(bytes(data), LIMITS)


# The following were found by fuzzing.


def test_a_path_that_no_file_system_can_hold_is_refused():
    for source in ("a\0b.png", "a\ud800.png"):
        with pytest.raises(ImageError):
            load_image(source, LIMITS)


def test_a_data_url_with_letters_outside_ascii_is_refused():
    with pytest.raises(ImageError, match="invalid base64"):
        load_image("data:image/png;base64,äöü", LIMITS)


def test_a_long_string_that_is_no_path_is_not_repeated_in_the_error():
    with pytest.raises(ImageError) as caught:
        load_image("iVBORw0KGgo" * 1000, LIMITS)  # base64 without its data: header
    assert len(str(caught.value)) < 500


def test_a_truncated_pil_image_is_refused():
    data = encoded(Image.fromarray(noise(24, 24)), "PNG")
    with pytest.raises(ImageError, match="truncated or corrupt"):
        load_image(Image.open(io.BytesIO(data[: len(data) // 2])), LIMITS)


def test_a_pil_mode_without_a_road_to_rgb_is_refused():
    with pytest.raises(ImageError):
        load_image(Image.new("La", (4, 4)), LIMITS)


@pytest.mark.filterwarnings("ignore")  # Pillow's own limit
@pytest.mark.parametrize("size", [(40_000, 1_000), (16_000, 16_000), (60_000, 60_000), (0, 5), (16_000, 4)])
def test_the_size_of_a_tiff_is_checked_before_it_is_decoded(size):
    with pytest.raises(ImageError, match=r"pixels|header cannot be read"):
        load_image(tiff_header(*size), LIMITS)


def test_a_tiff_with_huge_tiles_is_refused():
    tiles = {322: 65_520, 323: 65_520, 324: 8, 325: 100}
    with pytest.raises(ImageError, match="tiles of 65520x65520 pixels, over the limit"):
        load_image(tiff_header(64, 64, tiles), LIMITS)


@pytest.mark.parametrize("kind", AVIF)
def test_the_size_of_an_avif_is_checked_before_it_is_decoded(kind):
    data = bytearray(encoded(Image.new("RGB", (64, 48)), kind))
    at = data.index(b"ispe") + 8
    data[at : at + 8] = struct.pack(">II", 12_000, 12_000)
    with pytest.raises(ImageError, match=r"12000x12000|header cannot be read"):
        load_image(bytes(data), LIMITS)
    with pytest.raises(ImageError, match="64x48 = 3072 pixels, over the limit of 3000"):
        load_image(encoded(Image.new("RGB", (64, 48)), kind), MediaLimits(max_pixels=3000))


def test_a_gif_frame_larger_than_its_screen_is_refused():
    with pytest.raises(ImageError):
        load_image(gif(screen=(10, 10), frame=(65535, 65535)), LIMITS)


def test_a_webp_that_states_a_huge_canvas_is_refused():
    data = bytearray(encoded(Image.fromarray(noise(8, 8, channels=4)), "WEBP", exif=with_orientation(1)))
    start = data.index(b"VP8X") + 12
    data[start : start + 6] = b"\xff\x3f\x00" * 2  # 16384 x 16384
    with pytest.raises(ImageError):
        load_image(bytes(data), LIMITS)


def test_an_animated_gif_cut_anywhere_is_refused():
    frames = [Image.fromarray(noise(8, 8, seed=number)) for number in range(3)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    whole = load_image(encoded(frames[0], "GIF"), LIMITS)
    for end in range(len(data) - 1):
        try:
            assert load_image(data[:end], LIMITS).shape == whole.shape
        except ImageError:
            continue


@pytest.mark.filterwarnings("ignore")
def test_a_wrongly_typed_exif_tag_does_not_break_the_upright_turn():
    exif = with_orientation(6)
    exif[0x010E] = "hello"
    for kind in ("JPEG", "WEBP"):
        data = encoded(smooth(40, 60), kind, exif=exif)
        position = data.index(b"\x01\x0e\x00\x02") if b"\x01\x0e\x00\x02" in data else data.index(b"\x0e\x01\x02\x00")
        damaged = bytearray(data)
        damaged[position : position + 2] = b"\x01\x4e" if data[position] == 1 else b"\x4e\x01"
        try:
            assert load_image(bytes(damaged), LIMITS).shape == (60, 40, 3)
        except ImageError:
            continue


def test_a_jpeg_with_harmless_bytes_before_its_end_is_read_as_pillow_reads_it():
    data = encoded(Image.fromarray(noise(24, 24)), "JPEG")
    padded = data[:-2] + b"\0" * 10 + data[-2:]
    assert np.array_equal(load_image(padded, LIMITS), np.asarray(Image.open(io.BytesIO(padded))))


def test_a_phone_photo_with_a_second_picture_inside_is_its_first():
    photo = smooth(40, 60)
    data = encoded(photo, "MPO", save_all=True, append_images=[photo.resize((30, 20))])
    assert np.array_equal(load_image(data, LIMITS), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    caught = []

    def read():
        try:
            load_image(pipe, LIMITS)
        except ImageError as error:
            caught.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    is_stuck = reader.is_alive()
    if is_stuck:
        os.close(os.open(pipe, os.O_WRONLY))  # let the reader go
        reader.join(1)
    assert not is_stuck, "a path that is not a regular file is read without end"
    assert caught


# ------------------------------------------------------------------ fuzzing


@settings(repeatable, max_examples=300)
@given(
    head=st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"RIFF"]),
    rest=st.binary(),
)
@pytest.mark.filterwarnings("ignore")  # Pillow warns about metadata it cannot read
def test_arbitrary_bytes_raise_an_image_error_or_nothing(head, rest):
    message = ""
    try:
        load_image(head + rest, LIMITS)
    except ImageError as error:
        message = str(error)
    assert len(message) < 300


VICTIMS = [
    encoded(Image.fromarray(noise(24, 31)), "JPEG"),
    encoded(Image.fromarray(noise(24, 31)), "JPEG", progressive=True, exif=with_orientation(6)),
    encoded(Image.fromarray(noise(24, 31)).convert("CMYK"), "JPEG"),
    encoded(Image.fromarray(noise(24, 31)), "PNG", exif=with_orientation(3)),
    encoded(Image.fromarray(noise(24, 31)).quantize(16), "PNG", transparency=3),
    encoded(Image.fromarray(noise(24, 31, channels=4)), "WEBP"),
    encoded(Image.fromarray(noise(24, 31)), "WEBP", lossless=True, exif=with_orientation(6)),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("victim", VICTIMS, ids=["jpeg", "progressive", "cmyk", "png", "palette", "webp", "lossless"])
def test_flipped_bits_raise_an_image_error_or_nothing(victim):
    dice = random.Random(0)
    for _ in range(400):
        data = bytearray(victim)
        for _ in range(dice.choice([1, 1, 2, 8])):
            reach = len(data) if dice.random() < 0.4 else min(len(data), 100)  # most faults are in headers
            data[dice.randrange(reach)] ^= 1 << dice.randrange(8)
        try:
            assert load_image(bytes(data), LIMITS).shape[2] == 3
        except ImageError:
            continue


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded():
    file = io.BytesIO()
    Image.new("L", (4000, 4000)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    assert load_image(data, MediaLimits()).shape == (4000, 4000, 3)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match="4000x4000 pixels has 46 scans; 10 are usual"):
        load_image(data[:-2] + 40 * scan + b"\xff\xd9", MediaLimits())
