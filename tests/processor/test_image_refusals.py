"""Files that are no images, damaged, or over a limit are refused with the reason."""

import base64
import io
import os
import random
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from processor.pictures import (
    AVIF,
    LIMITS,
    encoded,
    gif,
    noise,
    png_header,
    repeatable,
    smooth,
    tiff_header,
    with_orientation,
)

from saccade.errors import ImageError
from saccade.processor.image import MediaLimits, load_image


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
