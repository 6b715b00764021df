"""A prompt whose images were only measured is the prompt of full preprocessing without patches."""

import dataclasses
import zlib

import numpy as np
import pytest
import torch
from engine.test_preprocessing import encode_video, encoded, noise, turned, url
from PIL import Image, PngImagePlugin

from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.media import MediaMissingError, TaskDescription
from saccade.errors import UserError
from saccade.model.families import named_sizes
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import MediaLimits
from saccade.processor.image import FORMATS

TIMEOUT_S = 300
SIZES = [size for size in named_sizes() if size.endswith("tiny")]
LIMITS = MediaLimits(max_side=2000, max_pixels=500_000, max_bytes=300_000)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def make(size):
        if size not in folders:
            folders[size] = tmp_path_factory.mktemp(size.replace("/", "-")) / "checkpoint"
            initialize_random(folders[size], named_size(size), dtype=torch.float32)
        return folders[size]

    return make


def open_both(folder, num_workers=0):
    options = {"num_workers": num_workers, "processed_image_cache_bytes": 2**28, "limits": LIMITS}
    return Preprocessor(folder, **options), Preprocessor(folder, **options, measures_only=True)


@pytest.fixture(scope="module", params=SIZES)
def both(request, folder_of):
    """Preprocessors of a family: a full one, and one that measures."""
    full, measuring = open_both(folder_of(request.param))
    with full, measuring:
        yield full, measuring


@pytest.fixture(scope="module")
def sealed(folder_of):
    """The same with worker processes."""
    full, measuring = open_both(folder_of("qwen3_vl/tiny"), num_workers=1)
    with full, measuring:
        yield full, measuring


def with_exif(image, orientation, kind, **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif, **options)


def png_chunk(name, data):
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


def late(png, chunk):
    """A PNG with a chunk after its pixels."""
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunk + png[end:]


def exif_bytes(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes().removeprefix(b"Exif\x00\x00")


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
XMP_CHUNK = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)


def with_early_text():
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", XMP.decode())
    return encoded(noise(90, 40), pnginfo=text)


IMAGES = {
    "tiny": noise(5, 3),
    "wide": encoded(noise(700, 40)),
    "tall": encoded(noise(33, 500), "JPEG"),
    "large": encoded(noise(640, 480), "JPEG"),
    **{f"jpeg turned {turn}": turned(noise(120, 64), turn) for turn in range(1, 10)},
    **{f"tiff turned {turn}": with_exif(noise(90, 40), turn, "TIFF") for turn in (1, 3, 6, 8)},
    "png turned": with_exif(noise(90, 40), 6, "PNG"),
    "webp turned": with_exif(noise(90, 40), 8, "WEBP"),
    **({"avif turned": with_exif(noise(90, 40), 6, "AVIF")} if "AVIF" in FORMATS else {}),
    "png turned after its pixels": late(encoded(noise(90, 40)), png_chunk(b"eXIf", exif_bytes(6))),
    "png turned by a text": with_early_text(),
    "png turned by a text after its pixels": late(encoded(noise(90, 40)), XMP_CHUNK),
    "png with EXIF that is damaged": late(encoded(noise(90, 40)), png_chunk(b"eXIf", b"MM\0*\0\0")),
    "alpha": encoded(noise(60, 90).convert("RGBA")),
    "palette": encoded(noise(60, 90).convert("P"), "GIF", transparency=3),
    "bmp": encoded(noise(60, 90), "BMP"),
    "16 bits": encoded(Image.fromarray(np.full((70, 50), 40000, np.uint16))),
    "cmyk": encoded(noise(60, 90).convert("CMYK"), "JPEG"),
    "data URL": url(encoded(noise(100, 50))),
    "array": np.asarray(noise(40, 70)),
    "PIL": noise(70, 40),
}
VIDEOS = {
    "frames": {"type": "video", "video": [noise(64, 40, seed) for seed in range(5)], "fps": 2.0},
    "files": {"type": "video", "video": [turned(noise(64, 40, seed), 6) for seed in range(3)], "fps": 1.0},
}
BROKEN = {
    "empty": b"",
    "text": b"no image at all",
    "header": encoded(noise(60, 60), "JPEG")[:30],
    "truncated GIF header": encoded(noise(60, 60), "GIF")[:8],
    "bytes": encoded(noise(600, 600)),
    "side": encoded(Image.new("L", (2001, 100))),
    "pixels": encoded(Image.new("L", (1000, 501))),
    "ratio": encoded(Image.new("L", (1990, 4))),
    "animated GIF": encoded(noise(60, 60), "GIF", save_all=True, append_images=[noise(60, 60, 1)]),
    "animated WEBP": encoded(noise(60, 60), "WEBP", save_all=True, append_images=[noise(60, 60, 1)]),
    "animated PNG": encoded(noise(60, 60), "PNG", save_all=True, append_images=[noise(60, 60, 1)]),
    "float TIFF": encoded(Image.fromarray(np.zeros((30, 30), np.float32)), "TIFF"),
    "EXIF": encoded(noise(60, 60), "WEBP", exif=b"Exif\0\0MM\0*\xff\xff"),
    "base64": "data:image/png;base64,????",
    "path": "/no/such/file.png",
}


def ask(*parts):
    made = [part if isinstance(part, dict) else {"type": "image", "image": part} for part in parts]
    return [{"role": "user", "content": [*made, {"type": "text", "text": "what is it?"}]}]


def outcome(future):
    """A prompt, or the message of its error."""
    try:
        return future.result(TIMEOUT_S)
    except UserError as error:
        return str(error)


def assert_measured(both, messages):
    full, measuring = both
    expected, measured = outcome(full.submit(messages)), outcome(measuring.submit(messages))
    if isinstance(expected, str):
        assert measured == expected
        return
    assert not isinstance(measured, str), measured
    assert measured.token_ids == expected.token_ids
    np.testing.assert_array_equal(measured.positions, expected.positions)
    assert [image.span for image in measured.images] == [image.span for image in expected.images]
    assert [image.grid for image in measured.images] == [image.grid for image in expected.images]
    assert all(image.patches.size == 0 and not image.is_whole for image in measured.images)
    assert (expected.sources is None, measured.sources is None) == (True, False)
    made = made_again(full, measured.sources)
    assert dataclasses.replace(made, positions=0, images=()) == dataclasses.replace(expected, positions=0, images=())
    np.testing.assert_array_equal(made.positions, expected.positions)
    for one, other in zip(made.images, expected.images, strict=True):
        assert (one.span, one.grid) == (other.span, other.grid)
        np.testing.assert_array_equal(one.patches, other.patches)


def made_again(preprocessor, sources):
    tasks = [TaskDescription.of(task) for task in sources.tasks]
    media = [task.media() for task in sources.tasks]
    return preprocessor.submit_tasks(sources.token_ids, tasks, media).result(TIMEOUT_S)


def test_prompts_of_every_kind_of_image_are_equal_but_for_the_patches(both):
    for image in IMAGES.values():
        assert_measured(both, ask(image))


def test_prompts_with_several_images_and_videos_are_equal_but_for_the_patches(both):
    images = list(IMAGES.values())
    assert_measured(both, ask())
    assert_measured(both, ask(*images[:4], images[0]))
    for video in VIDEOS.values():
        assert_measured(both, ask(images[1], video, images[2]))
    assert_measured(both, ask({"type": "video", "video": encode_video(12), "fps": 4.0}))


def test_what_the_header_shows_is_refused_with_the_same_line(both):
    for broken in BROKEN.values():
        full, measuring = (outcome(one.submit(ask(noise(30, 30), broken))) for one in both)
        assert isinstance(full, str)
        assert measuring == full


@pytest.mark.parametrize("name", IMAGES)
def test_sealed_workers_measure(sealed, name):
    assert_measured(sealed, ask(IMAGES[name]))


def test_sealed_workers_measure_videos_and_refuse_what_the_header_shows(sealed):
    for video in [*VIDEOS.values(), {"type": "video", "video": encode_video(12), "fps": 4.0}]:
        assert_measured(sealed, ask(video, noise(60, 60)))
    for broken in BROKEN.values():
        assert_measured(sealed, ask(broken))


def test_the_pixels_of_an_image_are_not_read(sealed):
    _, measuring = sealed
    for kind in ("PNG", "JPEG", "WEBP", "BMP"):
        data = encoded(noise(200, 100), kind)
        prompt = measuring.submit(ask(data[: len(data) // 2 if kind != "WEBP" else None])).result(TIMEOUT_S)
        assert prompt.images[0].span.num_patches > 0


def test_prompts_without_their_media_use_processed_images_or_say_which_are_missing(sealed):
    full, measuring = sealed
    first, second = encoded(noise(80, 80, 77)), encoded(noise(80, 80, 78))
    sources = measuring.submit(ask(first, second), salt=b"a").result(TIMEOUT_S).sources
    tasks = [TaskDescription.of(task) for task in sources.tasks]
    full.submit(ask(first), salt=b"a").result(TIMEOUT_S)
    assert [full.has(task.digest, b"a") for task in tasks] == [True, False]
    assert [full.has(task.digest, b"b") for task in tasks] == [False, False]
    with pytest.raises(MediaMissingError) as missing:
        full.submit_tasks(sources.token_ids, tasks, [None, None], salt=b"a")
    assert missing.value.numbers == [1]
    before = full.statistics.num_processed
    made = full.submit_tasks(sources.token_ids, tasks, [None, second], salt=b"a").result(TIMEOUT_S)
    expected = full.submit(ask(first, second), salt=b"a").result(TIMEOUT_S)
    assert [image.span for image in made.images] == [image.span for image in expected.images]
    assert full.statistics.num_processed == before + 1
    assert full.statistics.num_unfinished == 0
