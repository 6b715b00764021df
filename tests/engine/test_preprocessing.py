"""Prompts of worker processes equal the processor's inputs, with any input form, cache hits, crashes and timeouts."""

import base64
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import is_alive
from PIL import Image

from saccade.engine.frontend.preprocessing.checks import ImageChecks, check_seconds
from saccade.engine.frontend.preprocessing.config import ProcessorMetadata, VisualMetadata
from saccade.engine.frontend.preprocessing.jobs import Mailbox
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.frontend.preprocessing.processed_images import ReadAhead
from saccade.engine.media import ImageTask, Source
from saccade.errors import CheckpointError, ImageError, RequestError, UserError
from saccade.model import load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import MediaLimits, Processor
from saccade.processor.families import load_rules
from saccade.processor.image import FORMATS
from saccade.workers.messages import receive, receive_with_fds, send
from saccade.workers.pool import WorkerLostError
from saccade.workers.shared_memory import SharedMemory

TIMEOUT_S = 300
CACHE_BYTES = 2**28


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def turned(image, orientation):
    """The same pixels with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "JPEG", exif=exif)


def ask(*parts):
    """One user message: text for a string, a part for a dict, an image for anything else."""

    def part(content):
        if isinstance(content, dict):
            return content
        return {"type": "text", "text": content} if isinstance(content, str) else {"type": "image", "image": content}

    return [{"role": "user", "content": [part(content) for content in parts]}]


def video(num_frames, width=60, height=60, **options):
    return {"type": "video", "video": [noise(width, height, seed) for seed in range(num_frames)], **options}


@functools.cache
def _huge_picture():
    return encoded(Image.fromarray(np.zeros((7000, 7000), dtype=np.uint8)), compress_level=1)


def huge_picture(seed):
    """A file that takes a worker about a second. A byte after the end makes it another file."""
    return _huge_picture() + bytes([seed])


@functools.cache
def _medium_picture():
    return encoded(Image.fromarray(np.zeros((3000, 3000), dtype=np.uint8)), compress_level=1)


def medium_picture(seed):
    """A file that takes a worker about 0.1 s."""
    return _medium_picture() + bytes([seed])


@functools.cache
def encode_video(num_frames):
    """An MP4 file of 84 x 56 pixels, ten frames per second."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 84, 56, "yuv420p"
        for number in range(num_frames):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(noise(84, 56, number)), format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


def repeat_frame(patches, patch_dim):
    """Patches with all frames: an image's one frame is repeated."""
    frames = patches.reshape(len(patches), 3, 1, -1)
    return np.tile(frames, (1, 1, patch_dim // patches.shape[1], 1)).reshape(-1, patch_dim)


def assert_equal(prompt, inputs):
    """A prompt equals the processor's inputs."""
    assert prompt.token_ids == inputs.token_ids.tolist()
    assert prompt.positions.dtype == np.int64
    np.testing.assert_array_equal(prompt.positions, inputs.positions.numpy())
    assert [list(image.grid) for image in prompt.images] == inputs.image_grids.tolist()
    patch_dim = inputs.patches.shape[1]
    patches = [repeat_frame(image.patches, patch_dim) for image in prompt.images]
    patches = np.concatenate([np.zeros((0, patch_dim), np.uint8), *patches])
    np.testing.assert_array_equal(patches, inputs.patches.numpy())
    tokens = [index for image in prompt.images for index in range(image.span.start, image.span.end)]
    assert tokens == inputs.image_token_index.tolist()
    assert [image.span.num_patches for image in prompt.images] == inputs.image_grids.prod(dim=1).tolist()


def wait_for(condition, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def cpu_s(pid):
    """CPU time of a process; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


class BusyWorkers:
    """Finds workers that process a large image, by the CPU time they have used since they were first seen."""

    def __init__(self, preprocessor):
        self._preprocessor = preprocessor
        self._first_s = {pid: cpu_s(pid) for pid in preprocessor.worker_pids}

    def find(self):
        found = []
        for pid in self._preprocessor.worker_pids:
            if cpu_s(pid) - self._first_s.setdefault(pid, cpu_s(pid)) >= 0.08 and is_alive(pid):
                found.append(pid)
        return found


@contextlib.contextmanager
def stopped(pids):
    """Processes that make no progress inside the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preprocessor") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def processor(checkpoint):
    return Processor.load(checkpoint)


@pytest.fixture(scope="module")
def two_workers(checkpoint):
    with Preprocessor(checkpoint, num_workers=2, processed_image_cache_bytes=CACHE_BYTES) as preprocessor:
        yield preprocessor


@pytest.fixture(scope="module")
def no_workers(checkpoint):
    with Preprocessor(checkpoint, num_workers=0, processed_image_cache_bytes=CACHE_BYTES) as preprocessor:
        yield preprocessor


@pytest.fixture(params=["two_workers", "no_workers"])
def preprocessor(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=[1, 0], ids=["a worker", "no workers"])
def decoder(checkpoint, request):
    """A preprocessor whose images are patchified by the vision tower."""
    with Preprocessor(
        checkpoint, num_workers=request.param, processed_image_cache_bytes=CACHE_BYTES, patchifies_on_device=True
    ) as preprocessor:
        yield preprocessor


@pytest.fixture(scope="module")
def tower(checkpoint):
    return load_model(checkpoint, device="cpu").vision


# ------------------------------------------------------------------ prompts equal the processor's inputs


CONVERSATIONS = {
    "text": ask("What is a saccade? <|image_pad|>"),
    "an empty text": ask(""),
    "an image": ask(noise(120, 90), "what?"),
    "many turns": [
        {"role": "system", "content": "be brief"},
        *ask("look", noise(60, 60), "and", noise(200, 40, 1)),
        {"role": "assistant", "content": "seen"},
        *ask(noise(30, 200, 2)),
    ],
    "a video": ask(video(5, fps=3.0), "and", noise(90, 60, 3), "?"),
    "a video of arrays": ask({"type": "video", "video": np.stack([np.asarray(noise(60, 60, n)) for n in range(3)])}),
    "images alone": ask(noise(60, 60, 4), noise(60, 60, 5), noise(60, 60, 4)),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_prompt_equals_the_processors_inputs(preprocessor, processor, name):
    expected = processor.preprocess(CONVERSATIONS[name], add_generation_prompt=True)
    assert_equal(preprocessor.submit(CONVERSATIONS[name]).result(TIMEOUT_S), expected)


PICTURE = noise(150, 80, 7)
SOURCES = {
    "png": encoded(PICTURE),
    "jpeg": encoded(PICTURE, "JPEG"),
    "jpeg on its side": turned(PICTURE, 6),
    "webp": encoded(PICTURE, "WEBP", lossless=True),
    "tiff": encoded(PICTURE, "TIFF", compression="tiff_lzw"),
    **({"avif": encoded(PICTURE, "AVIF")} if "AVIF" in FORMATS else {}),
    "data url": url(encoded(PICTURE)),
    "bytes in memory": io.BytesIO(encoded(PICTURE)),
    "bytearray": bytearray(encoded(PICTURE, "JPEG")),
    "array": np.asarray(PICTURE),
    "gray array": np.asarray(PICTURE.convert("L")),
    "array on its side": np.asarray(PICTURE).transpose(1, 0, 2),
    "pil": PICTURE,
    "pil gray": PICTURE.convert("L"),
    "pil with palette": PICTURE.convert("P"),
    "pil transparent": Image.merge("RGBA", (*PICTURE.split(), noise(150, 80, 8).convert("L"))),
    "pil on its side": Image.open(io.BytesIO(turned(PICTURE, 8))),
    "pil 16 bits": Image.fromarray(np.arange(80 * 150, dtype=np.uint16).reshape(80, 150) * 5),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_image_can_be_given_in_any_form(preprocessor, processor, name):
    part = {"type": "image", "image": SOURCES[name]}
    expected = processor.preprocess(ask("see", part), add_generation_prompt=True)
    assert_equal(preprocessor.submit(ask("see", part)).result(TIMEOUT_S), expected)
    tokens = processor.tokenize(ask("see", part), add_generation_prompt=True)
    assert_equal(preprocessor.submit_tokens(tokens, [SOURCES[name]]).result(TIMEOUT_S), expected)


def test_an_image_can_be_a_file(preprocessor, processor, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(PICTURE))
    expected = processor.preprocess(ask(PICTURE), add_generation_prompt=True)
    for source in (path, str(path)):
        part = {"type": "image_url", "image_url": {"url": source}}
        assert_equal(preprocessor.submit(ask(part)).result(TIMEOUT_S), expected)


def test_placeholders_among_tokens_are_expanded_in_place(preprocessor, processor):
    image_id = processor.rules.image_id
    images = [noise(120, 60, 11), noise(60, 200, 12)]
    prompt = preprocessor.submit_tokens([5, image_id, 6, 7, image_id], images).result(TIMEOUT_S)
    lengths = [image.span.num_tokens for image in prompt.images]
    assert prompt.token_ids == [5, *[image_id] * lengths[0], 6, 7, *[image_id] * lengths[1]]
    assert [image.span.start for image in prompt.images] == [1, 3 + lengths[0]]
    assert prompt.positions.shape == (3, len(prompt.token_ids))
    plain = preprocessor.submit_tokens(np.array([3, 4]), []).result(TIMEOUT_S)
    assert (plain.token_ids, plain.images) == ([3, 4], ())


def test_an_image_holds_its_frame_once_and_a_video_all_of_them(preprocessor, processor):
    video = [{"role": "user", "content": [{"type": "video", "video": [noise(56, 56, seed) for seed in range(4)]}]}]
    for messages, num_frames in ((ask(noise(56, 56, 0)), 1), (video, 2)):
        [image] = preprocessor.submit(messages).result(TIMEOUT_S).images
        assert image.patches.shape[1] == num_frames * processor.images.frame_dim


def patchified(prompt, tower):
    """The prompt with patches instead of whole images."""
    images = []
    for image in prompt.images:
        assert image.is_whole
        patches = tower.patchify(torch.from_numpy(image.patches.copy()), image.grid).numpy()
        images.append(dataclasses.replace(image, patches=patches))
    return dataclasses.replace(prompt, images=tuple(images))


@pytest.mark.parametrize("name", SOURCES)
def test_an_image_that_the_tower_patchifies_has_the_same_patches_and_key(decoder, two_workers, processor, tower, name):
    part = {"type": "image", "image": SOURCES[name]}
    expected = processor.preprocess(ask("see", part), add_generation_prompt=True)
    prompt = decoder.submit(ask("see", part)).result(TIMEOUT_S)
    assert_equal(patchified(prompt, tower), expected)
    assert prompt.images[0].span.key == two_workers.submit(ask("see", part)).result(TIMEOUT_S).images[0].span.key


@pytest.mark.parametrize("size", [(56, 84), (57, 83), (28, 28), (700, 33), (20, 20), (1000, 200)], ids=str)
def test_images_of_any_size_have_the_patches_that_they_have_on_the_host(decoder, processor, tower, size):
    messages = ask(noise(*size, 21), encoded(noise(*size, 22)))
    expected = processor.preprocess(messages, add_generation_prompt=True)
    assert_equal(patchified(decoder.submit(messages).result(TIMEOUT_S), tower), expected)


def test_large_images_and_videos_are_patchified_on_the_host(decoder, processor):
    messages = ask(noise(2000, 1600), video(3))
    prompt = decoder.submit(messages).result(TIMEOUT_S)
    assert not any(image.is_whole for image in prompt.images)
    assert_equal(prompt, processor.preprocess(messages, add_generation_prompt=True))


def test_another_resize_than_pillows_is_not_left_to_the_device(checkpoint):
    with Preprocessor(
        checkpoint, num_workers=0, processed_image_cache_bytes=0, resize="torch", patchifies_on_device=True
    ) as preprocessor:
        assert not preprocessor.submit(ask(PICTURE)).result(TIMEOUT_S).images[0].is_whole


def test_times_are_those_of_workers(checkpoint):
    with Preprocessor(
        checkpoint, num_workers=0, processed_image_cache_bytes=0, patchifies_on_device=True
    ) as preprocessor:
        for source in (PICTURE, encoded(noise(60, 90, 41)), noise(2000, 1600, 42)):
            preprocessor.submit(ask(source)).result(TIMEOUT_S)
        found = preprocessor.statistics
    assert found.num_processed == 3
    assert (sum(found.decode_times.counts), sum(found.preprocess_times.counts)) == (2, 1)


def test_whole_images_are_read_only_and_cached(decoder):
    first, again = (decoder.submit(ask(noise(60, 90, 31))).result(TIMEOUT_S).images[0] for _ in range(2))
    assert again.patches is first.patches
    with pytest.raises(ValueError, match="read-only"):
        first.patches[0, 0, 0] = 1


def test_patches_are_read_only(preprocessor):
    prompt = preprocessor.submit(ask(PICTURE)).result(TIMEOUT_S)
    with pytest.raises(ValueError, match="read-only"):
        prompt.images[0].patches[0, 0] = 1


# ------------------------------------------------------------------ keys and the cache


def keys(preprocessor, *sources):
    return [preprocessor.submit(ask(source)).result(TIMEOUT_S).images[0].span.key for source in sources]


def test_equal_bytes_have_equal_keys(preprocessor):
    """Keys depend on the bytes that were sent, not on the result of a worker."""
    picture = noise(90, 150, 20)
    png, bmp = encoded(picture), encoded(picture, "BMP")
    part = {"type": "image_url", "image_url": {"url": url(png)}}
    first = keys(preprocessor, png, bmp, picture, part)
    assert len(set(first)) == 4
    assert keys(preprocessor, bytes(bytearray(png)), encoded(picture, "BMP"), noise(90, 150, 20), part) == first
    assert {len(key) for key in first} == {32}


def test_other_shapes_of_the_same_bytes_have_other_keys(preprocessor):
    gray = np.full((56, 112, 3), 77, dtype=np.uint8)
    pixels = np.asarray(noise(112, 56, 21))
    shapes = [gray, gray.transpose(1, 0, 2), pixels, pixels.reshape(112, 56, 3), pixels.transpose(1, 0, 2)]
    assert len(set(keys(preprocessor, *map(Image.fromarray, shapes)))) == len(shapes)


def test_an_image_a_video_and_a_faster_video_have_different_keys(preprocessor):
    frame = noise(60, 60, 22)
    videos = [{"type": "video", "video": [frame] * 2, "fps": fps} for fps in (1.0, 2.0)]
    assert len(set(keys(preprocessor, frame, *videos))) == 3


def test_another_resize_makes_another_key(checkpoint, no_workers):
    picture = noise(56, 56, 23)  # no pixel needs to be resized
    with Preprocessor(checkpoint, num_workers=0, processed_image_cache_bytes=0, resize="torch") as other:
        assert keys(other, picture) != keys(no_workers, picture)


def test_an_image_that_is_cached_is_not_decoded_again(preprocessor, processor):
    png = encoded(noise(140, 100, 24))
    first = preprocessor.submit(ask(png, "what?")).result(TIMEOUT_S)
    before = preprocessor.statistics
    second = preprocessor.submit(ask("now", png, "who?")).result(TIMEOUT_S)
    after = preprocessor.statistics
    assert (after.num_processed, after.num_cache_hits) == (before.num_processed, before.num_cache_hits + 1)
    assert second.images[0].patches is first.images[0].patches
    assert_equal(second, processor.preprocess(ask("now", png, "who?"), add_generation_prompt=True))
    assert after.cached_bytes == before.cached_bytes >= first.images[0].patches.nbytes


def test_a_cached_image_is_found_only_with_its_salt(preprocessor):
    png = encoded(noise(140, 100, 27))
    hits = []
    for salt in (b"one", b"one", b"two", b"", b"two"):
        before = preprocessor.statistics
        preprocessor.submit(ask(png), salt=salt).result(TIMEOUT_S)
        after = preprocessor.statistics
        hits.append(after.num_cache_hits - before.num_cache_hits)
        assert hits[-1] + after.num_processed - before.num_processed == 1
    assert hits == [0, 1, 0, 0, 1]


def test_a_new_image_of_several_prompts_is_processed_once(preprocessor):
    png = encoded(noise(900, 900, 26), compress_level=1)
    before = preprocessor.statistics
    futures = [preprocessor.submit(ask(png, f"question {number}")) for number in range(12)]
    patches = [future.result(TIMEOUT_S).images[0].patches for future in futures]
    after = preprocessor.statistics
    assert after.num_processed == before.num_processed + 1
    assert after.num_cache_hits + after.num_shared == before.num_cache_hits + before.num_shared + 11
    assert all(p is patches[0] for p in patches)
    for name in ("decode_times", "preprocess_times"):
        old, new = getattr(before, name), getattr(after, name)
        assert sum(new.counts) == sum(old.counts) + 1
        assert old.total_s < new.total_s


def test_images_that_differ_in_one_pixel_are_told_apart(preprocessor, processor):
    pixels = np.asarray(noise(100, 100, 28))
    found = []
    for index in range(0, 200, 7):
        changed = pixels.copy()
        changed.reshape(-1)[index] ^= 1
        image = Image.fromarray(changed)
        prompt = preprocessor.submit(ask(image)).result(TIMEOUT_S)
        assert_equal(prompt, processor.preprocess(ask(image), add_generation_prompt=True))
        found.append(prompt.images[0].span.key)
    assert len(set(found)) == len(found)


def test_the_cache_stays_within_its_bound(checkpoint):
    with Preprocessor(checkpoint, num_workers=0, processed_image_cache_bytes=10**5) as small:
        for _ in range(2):
            for seed in range(8):
                small.submit(ask(noise(112, 112, seed))).result(TIMEOUT_S)
            assert 0 < small.statistics.cached_bytes <= 10**5
        assert small.statistics.num_processed == 16


# ------------------------------------------------------------------ invalid requests


GOOD = encoded(noise(60, 60))
FRAMES_OF_TWO_SIZES = {"type": "video", "video": [noise(60, 60), noise(61, 60)]}
ANIMATED = encoded(noise(40, 40), "GIF", save_all=True, append_images=[noise(40, 40, 1)])
BAD = {
    "no image": ask(b"not an image"),
    "no bytes": [{"role": "user", "content": [{"type": "image", "image": b""}]}],
    "cut": ask(encoded(noise(300, 300))[:-5000]),
    "cut jpeg": ask("a", GOOD, encoded(noise(300, 300), "JPEG")[:3000]),
    "animated": ask(ANIMATED),
    "a narrow strip": ask(noise(900, 4)),
    "no such file": ask(GOOD, Path("/no/such.png")),
    "a folder": ask(Path("/tmp")),
    "remote": ask({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}),
    "no base64": ask({"type": "image_url", "image_url": "data:image/png;base64,*"}),
    "half a surrogate pair in a url": ask({"type": "image_url", "image_url": "data:image/png;base64,\ud800"}),
    "not an image url": ask({"type": "image_url", "image_url": "data:text/plain;base64,AAAA"}),
    "an array of floats": ask(np.zeros((60, 60, 3))),
    "two bad ones": ask(encoded(noise(300, 300))[:-5000], Path("/no/such.png")),
    "a bad frame": ask({"type": "video", "video": [GOOD, b"nothing"]}),
    "a missing frame": ask(GOOD, {"type": "video", "video": [GOOD, "/no/such.png"]}),
    "frames of two sizes": ask(FRAMES_OF_TWO_SIZES),
    "too many frames": ask({"type": "video", "video": [GOOD] * 769}),
    "pil of floats": ask(Image.new("F", (60, 60))),
    "no messages": [],
    "no role": [{"content": "x"}],
    "another role": [{"role": "robot", "content": "x"}],
    "no list": "hello",
    "no text": [{"role": "user", "content": 7}],
    "half a surrogate pair": ask("\ud800"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_processor(preprocessor, processor, name):
    with pytest.raises(UserError) as expected:
        processor.preprocess(BAD[name], add_generation_prompt=True)
    with pytest.raises(UserError) as found:
        preprocessor.submit(BAD[name]).result(TIMEOUT_S)
    assert str(found.value) == str(expected.value)
    assert type(found.value) is type(expected.value)


def test_limits_hold_in_every_process(checkpoint, tmp_path):
    (tmp_path / "a.png").write_bytes(GOOD)
    limits = MediaLimits(allow_local_files=False, max_pixels=5000, max_frames=2, max_bytes=50_000)
    strict = Processor.load(checkpoint, limits=limits)
    bad = [str(tmp_path / "a.png"), encoded(noise(100, 100)), noise(100, 100), encoded(noise(200, 200), "BMP")]
    conversations = [ask({"type": "image", "image": source}) for source in bad] + [ask(video(3, 40, 40))]
    with Preprocessor(
        checkpoint, num_workers=1, processed_image_cache_bytes=CACHE_BYTES, limits=limits
    ) as preprocessor:
        for messages in conversations:
            with pytest.raises(ImageError) as expected:
                strict.preprocess(messages, add_generation_prompt=True)
            with pytest.raises(ImageError) as found:
                preprocessor.submit(messages).result(TIMEOUT_S)
            assert str(found.value) == str(expected.value)


def image_part(width, height, seed):
    return {"type": "image", "image": encoded(noise(width, height, seed), "BMP")}


OVER_REQUEST_LIMITS = {
    "bytes": (MediaLimits(max_request_bytes=30_000), [image_part(60, 60, n) for n in range(3)]),
    "bytes of frames": (MediaLimits(max_request_bytes=30_000), [{"type": "video", "video": [GOOD] * 3}]),
    "frames": (MediaLimits(max_frames=3), [video(2), video(2)]),
    "pixels": (MediaLimits(max_request_pixels=10_000), [image_part(60, 60, n) for n in range(3)]),
    "pixels of frames": (MediaLimits(max_request_pixels=10_000), [{"type": "video", "video": [GOOD] * 3}]),
    "pixels of pil frames": (MediaLimits(max_request_pixels=10_000), [video(3)]),
}


@pytest.mark.parametrize("name", OVER_REQUEST_LIMITS)
def test_bytes_pixels_and_frames_of_a_request_are_bounded(checkpoint, name):
    limits, parts = OVER_REQUEST_LIMITS[name]
    with pytest.raises(ImageError, match=r"over the limit of .* per request") as expected:
        Processor.load(checkpoint, limits=limits).preprocess(ask(*parts), add_generation_prompt=True)
    with Preprocessor(checkpoint, num_workers=0, processed_image_cache_bytes=0, limits=limits) as preprocessor:
        with pytest.raises(ImageError) as found:
            preprocessor.submit(ask(*parts)).result(TIMEOUT_S)
        assert str(found.value) == str(expected.value)
        assert len(preprocessor.submit(ask(parts[0]) if len(parts) == 3 else ask(GOOD)).result(TIMEOUT_S).images) == 1


def test_images_of_a_request_are_bounded(checkpoint):
    with Preprocessor(checkpoint, num_workers=0, processed_image_cache_bytes=0, max_images=2) as preprocessor:
        assert len(preprocessor.submit(ask(GOOD, video(2))).result(TIMEOUT_S).images) == 2
        for future in (preprocessor.submit(ask(GOOD, GOOD, video(2))), preprocessor.submit_tokens([1], [GOOD] * 3)):
            with pytest.raises(RequestError, match="3 images and videos, over the limit of 2 per request"):
                future.result(TIMEOUT_S)


def test_bytes_that_are_read_ahead_are_bounded():
    read_ahead = ReadAhead(max_bytes=100, max_images=4)
    held = [read_ahead.acquire(1), read_ahead.acquire(60)]
    blocked = threading.Thread(target=lambda: held.append(read_ahead.acquire(1000)))
    blocked.start()
    blocked.join(0.05)
    assert held == [25, 60], "a large one waits until it is alone"
    for cost in (25, 60):
        read_ahead.release(cost)
    blocked.join(TIMEOUT_S)
    assert held == [25, 60, 100]


FRAMES = [Source("pixels", np.zeros((60, 60, 3), np.uint8))] * 4


@pytest.mark.parametrize("fps", [1e-9, 1e-300])
def test_a_frame_rate_that_cannot_be_computed_is_an_error_of_its_request(two_workers, fps):
    before = two_workers.statistics.num_worker_crashes
    with pytest.raises(RequestError, match="fps"):
        two_workers.submit(ask(video(4, fps=fps))).result(TIMEOUT_S)
    with pytest.raises(ImageError, match="Use another fps"):  # also if it reaches a worker
        two_workers._backend.patchify(ImageTask("video", FRAMES, fps)).result(TIMEOUT_S)
    assert two_workers.statistics.num_worker_crashes == before


class Enormous(Source):
    def describe(self):
        return ["pixels", 2**20, 2**20, 3]


def test_an_image_that_needs_too_much_memory_is_an_error_of_its_request(two_workers):
    before = two_workers.statistics.num_worker_crashes
    with pytest.raises(ImageError, match="more memory than a worker may use"):
        two_workers._backend.patchify(ImageTask("image", [Enormous("pixels", FRAMES[0].data)])).result(TIMEOUT_S)
    assert two_workers.statistics.num_worker_crashes == before


@pytest.mark.parametrize("form", ["bytes", "file", "data url", "bytes in memory"])
def test_a_video_file_is_decoded_by_a_worker(two_workers, processor, tmp_path, form):
    data = encode_video(20)
    (tmp_path / "video.mp4").write_bytes(data)
    source = {
        "bytes": data,
        "file": str(tmp_path / "video.mp4"),
        "data url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}",
        "bytes in memory": io.BytesIO(data),
    }[form]
    messages = ask({"type": "video", "video": source, "fps": 3}, "what?")
    expected = processor.preprocess(messages, add_generation_prompt=True)
    assert_equal(two_workers.submit(messages).result(TIMEOUT_S), expected)
    tokens = processor.tokenize(messages, add_generation_prompt=True)
    assert_equal(two_workers.submit_tokens(tokens, messages[0]["content"][:1]).result(TIMEOUT_S), expected)


def test_a_video_file_that_cannot_be_decoded_is_refused_with_the_same_words(two_workers, processor):
    for data in (b"no video", encode_video(20)[:500]):
        messages = ask({"type": "video", "video": data})
        with pytest.raises(ImageError) as expected:
            processor.preprocess(messages, add_generation_prompt=True)
        with pytest.raises(ImageError) as found:
            two_workers.submit(messages).result(TIMEOUT_S)
        assert str(found.value) == str(expected.value)


def test_tools_are_part_of_the_prompt(preprocessor, processor):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [*ask("see", PICTURE), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "a", "content": "seen"})
    expected = processor.preprocess(messages, add_generation_prompt=True, tools=tools)
    assert_equal(preprocessor.submit(messages, tools=tools).result(TIMEOUT_S), expected)
    with pytest.raises(RequestError, match="tools is"):
        preprocessor.submit(messages, tools=[]).result(TIMEOUT_S)


def test_a_final_assistant_message_can_be_continued(preprocessor, processor):
    messages = [*ask("count"), {"role": "assistant", "content": "one, two,"}]
    prompt = preprocessor.submit(messages, continue_final_message=True).result(TIMEOUT_S)
    assert prompt.token_ids == processor.tokenize(messages, continue_final_message=True)


def test_placeholders_and_images_must_pair_up(preprocessor, processor):
    image_id, video_id = processor.rules.image_id, processor.rules.video_id
    for token_ids, images in (
        ([1, 2], [PICTURE]),
        ([image_id], []),
        ([image_id] * 2, [PICTURE]),
        ([video_id], [PICTURE]),
    ):
        with pytest.raises(RequestError, match=f"placeholders.*Put one {image_id} where each image belongs"):
            preprocessor.submit_tokens(token_ids, images).result(TIMEOUT_S)
    for token_ids in ([1, "2"], [1.0], [-1]):
        with pytest.raises(RequestError, match="token ids must"):
            preprocessor.submit_tokens(token_ids, []).result(TIMEOUT_S)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        Preprocessor(tmp_path, num_workers=0, processed_image_cache_bytes=0)
    with Preprocessor(tmp_path, num_workers=1, processed_image_cache_bytes=0) as preprocessor:
        with pytest.raises(CheckpointError):
            preprocessor.wait_until_ready()
        with pytest.raises(CheckpointError):
            preprocessor.submit(ask("hello")).result(TIMEOUT_S)


# ------------------------------------------------------------------ load


def test_many_threads_submit_at_once(preprocessor, processor):
    conversations = [ask(noise(60 + 30 * (n % 5), 60, n % 7), f"number {n}", noise(60, 90, 100 + n)) for n in range(40)]
    expected = [processor.preprocess(messages, add_generation_prompt=True) for messages in conversations]
    with ThreadPoolExecutor(8) as threads:
        futures = list(threads.map(preprocessor.submit, conversations))
    for future, inputs in zip(futures, expected, strict=True):
        assert_equal(future.result(TIMEOUT_S), inputs)


def test_a_slow_image_occupies_only_its_worker(two_workers, processor):
    long, pid = busy_worker(two_workers, processor, huge_picture(1))
    with stopped([pid]):
        for number in range(6):
            two_workers.submit(ask(noise(60, 60, 200 + number), "short")).result(TIMEOUT_S)
        assert not long.done()
    assert len(long.result(TIMEOUT_S).images) == 1


def test_text_does_not_wait_for_images(two_workers):
    two_workers.submit(ask(noise(60, 60, 210))).result(TIMEOUT_S)
    with stopped(two_workers.worker_pids):
        images = [two_workers.submit(ask(medium_picture(seed))) for seed in range(4)]
        for number in range(3):
            two_workers.submit(ask(f"text {number}")).result(TIMEOUT_S)
            two_workers.submit_tokens([1, 2], []).result(TIMEOUT_S)
        assert not any(image.done() for image in images)
    assert all(len(image.result(TIMEOUT_S).images) == 1 for image in images)


def test_a_pending_prompt_can_be_cancelled(two_workers):
    png = medium_picture(12)
    with stopped(two_workers.worker_pids):
        futures = [two_workers.submit(ask(png, str(number))) for number in range(4)]
        assert futures[2].cancel()
    done, _ = concurrent.futures.wait(futures, TIMEOUT_S)
    assert done == set(futures)
    assert [future.cancelled() for future in futures] == [False, False, True, False]


def test_the_work_of_cancelled_prompts_is_not_done_unless_another_prompt_waits_for_it(two_workers):
    shared, num_before = medium_picture(13), two_workers.statistics.num_processed
    with stopped(two_workers.worker_pids):
        busy = [two_workers.submit(ask(medium_picture(14 + number))) for number in range(2)]
        left = [two_workers.submit(ask(medium_picture(20 + number), shared)) for number in range(4)]
        stays = two_workers.submit(ask(shared))
        wait_for(lambda: two_workers.statistics.num_unfinished == 7, "all are submitted")
        for future in left:
            assert future.cancel()
        wait_for(lambda: two_workers.statistics.num_unfinished == 3, "a cancelled prompt waits for the workers")
    assert all(len(future.result(TIMEOUT_S).images) == 1 for future in [*busy, stays])
    assert two_workers.statistics.num_processed == num_before + 3
    again = two_workers.submit(ask(medium_picture(22), shared))
    assert len(again.result(TIMEOUT_S).images) == 2


def test_an_image_whose_prompt_is_cancelled_while_a_worker_decodes_it_can_be_sent_again(two_workers):
    png, busy = huge_picture(30), BusyWorkers(two_workers)
    left = two_workers.submit(ask(png))
    wait_for(busy.find, "no worker is busy")
    assert left.cancel()
    assert len(two_workers.submit(ask(png)).result(TIMEOUT_S).images) == 1
    assert len(two_workers.submit(ask(png)).result(TIMEOUT_S).images) == 1


def test_a_long_text_does_not_hold_up_a_short_one(two_workers):
    text_pids = two_workers._backend.text_pids
    assert len(text_pids) == 3
    with stopped(text_pids[1:]):
        book = two_workers.submit(ask("word " * 20_000))
        assert two_workers.submit(ask("hello")).result(TIMEOUT_S)
        assert not book.done()
    assert len(book.result(TIMEOUT_S).token_ids) > 20_000


# ------------------------------------------------------------------ crashes, timeouts, closing


def busy_worker(preprocessor, processor, png):
    """A prompt in progress, and the process that works on its image."""
    wait_for(lambda: len(preprocessor.worker_pids) == 2, "a worker is missing")
    busy, found = BusyWorkers(preprocessor), []
    future = preprocessor.submit_tokens(processor.tokenize(ask(png, "what?"), add_generation_prompt=True), [png])
    wait_for(lambda: found.extend(busy.find()) or found, "no worker is busy")
    return future, found[0]


def test_a_prompt_whose_worker_is_killed_is_retried(two_workers, processor):
    png = huge_picture(3)
    before = two_workers.statistics
    future, pid = busy_worker(two_workers, processor, png)
    others = [two_workers.submit(ask(noise(60, 60, 300 + number))) for number in range(4)]
    os.kill(pid, signal.SIGKILL)
    assert_equal(future.result(TIMEOUT_S), processor.preprocess(ask(png, "what?"), add_generation_prompt=True))
    assert all(len(other.result(TIMEOUT_S).images) == 1 for other in others)
    assert two_workers.statistics.num_worker_crashes == before.num_worker_crashes + 1
    assert pid not in two_workers.worker_pids


def test_an_image_that_crashes_two_workers_fails_alone(two_workers, processor):
    before = two_workers.statistics
    busy, killed = BusyWorkers(two_workers), set()
    future, pid = busy_worker(two_workers, processor, huge_picture(4))
    while not future.done():
        for pid in busy.find():
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.002)
    with pytest.raises(RequestError, match="image 1: preprocessing it failed 2 times: the worker was lost, it exited"):
        future.result()
    assert (
        two_workers.statistics.num_worker_crashes
        == before.num_worker_crashes + 2
        == before.num_worker_crashes + len(killed)
    )
    assert len(two_workers.submit(ask(noise(60, 60, 301))).result(TIMEOUT_S).images) == 1


def test_an_image_whose_job_cannot_start_fails_its_prompts_and_is_tried_again(preprocessor, monkeypatch):
    """No prompt may leave the image in progress, or keep its space in the read-ahead."""
    image, no_thread = noise(60, 60, 320), RuntimeError("can't start new thread")

    def refuse(task):
        raise no_thread

    with monkeypatch.context() as patch:
        patch.setattr(preprocessor._backend, "patchify", refuse)
        for _ in range(10):  # more images than are read ahead
            assert preprocessor.submit(ask(image)).exception(30) is no_thread
    assert len(preprocessor.submit(ask(image)).result(30).images) == 1
    assert preprocessor.statistics.num_unfinished == 0


def test_workers_killed_while_idle_are_not_held_against_the_next_prompt(two_workers):
    two_workers.submit(ask("warm")).result(TIMEOUT_S)
    before = two_workers.worker_pids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, before)), "a killed worker is alive")
    futures = [two_workers.submit(ask(noise(60, 60, 310 + number))) for number in range(6)]
    assert all(len(future.result(TIMEOUT_S).images) == 1 for future in futures)
    assert not set(before) & set(two_workers.worker_pids)


def test_a_stuck_worker_is_replaced_within_the_timeout(checkpoint, processor):
    image_id = processor.rules.image_id
    with Preprocessor(checkpoint, num_workers=1, processed_image_cache_bytes=0, timeout_s=3.0) as preprocessor:
        preprocessor.wait_until_ready()
        wait_for(lambda: preprocessor._backend.text_pids, "no text worker")
        for pid in (preprocessor.worker_pids[0], preprocessor._backend.text_pids[0]):
            os.kill(pid, signal.SIGSTOP)
        futures = [preprocessor.submit_tokens([image_id], [PICTURE]), preprocessor.submit(ask("hello"))]
        for future, what in zip(futures, ("image 1: preprocessing", "text: tokenising"), strict=True):
            with pytest.raises(RequestError, match=f"{what} it failed once: .* no result within 3 s"):
                future.result(TIMEOUT_S)
        assert len(preprocessor.submit(ask(PICTURE, "what?")).result(TIMEOUT_S).images) == 1
        assert preprocessor.statistics.num_worker_crashes == 2


def test_a_killed_fork_server_is_replaced(checkpoint):
    with Preprocessor(checkpoint, num_workers=1, processed_image_cache_bytes=0) as preprocessor:
        preprocessor.wait_until_ready()
        worker = preprocessor.worker_pids[0]
        os.kill(parent_of(worker), signal.SIGKILL)
        wait_for(lambda: not is_alive(worker), "the worker outlives its fork server")
        assert len(preprocessor.submit(ask(PICTURE)).result(TIMEOUT_S).images) == 1


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_closing_cancels_unfinished_prompts_and_ends_all_processes(checkpoint):
    preprocessor = Preprocessor(checkpoint, num_workers=2, processed_image_cache_bytes=CACHE_BYTES)
    preprocessor.submit(ask("warm")).result(TIMEOUT_S)
    pids = preprocessor.worker_pids
    pids.append(parent_of(pids[0]))
    futures = [preprocessor.submit(ask(huge_picture(50 + number))) for number in range(8)]
    closer = threading.Thread(target=preprocessor.close)
    closer.start()
    done, _ = concurrent.futures.wait(futures, TIMEOUT_S)
    closer.join(TIMEOUT_S)
    assert done == set(futures)
    assert all(future.cancelled() for future in futures)
    wait_for(lambda: not any(map(is_alive, pids)), "a process outlives the preprocessor")
    with pytest.raises(RuntimeError, match="closed"):
        preprocessor.submit(ask("late"))
    preprocessor.close()


def test_closing_before_the_workers_are_ready_does_not_wait_for_them(checkpoint):
    preprocessor = Preprocessor(checkpoint, num_workers=2, processed_image_cache_bytes=0)
    futures = [preprocessor.submit(ask("hello")), preprocessor.submit_tokens([1, 2], [])]
    preprocessor.close()
    assert all(future.cancelled() for future in futures)


def test_workers_end_with_the_process_that_started_them(checkpoint):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor\n"
        "p = Preprocessor(Path(sys.argv[1]), num_workers=2, processed_image_cache_bytes=0); p.wait_until_ready()\n"
        "print(*p.worker_pids, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(checkpoint)], stdout=subprocess.PIPE, text=True
    ) as process:
        pids = list(map(int, process.stdout.readline().split()))
        pids.append(parent_of(pids[0]))
        assert all(map(is_alive, pids))
        process.kill()
    wait_for(lambda: not any(map(is_alive, pids)), "workers outlive their engine")


def test_workers_outlive_the_thread_that_created_the_preprocessor(checkpoint):
    made = []
    thread = threading.Thread(
        target=lambda: made.append(Preprocessor(checkpoint, num_workers=1, processed_image_cache_bytes=0))
    )
    thread.start()
    thread.join()
    with made[0] as preprocessor:
        preprocessor.wait_until_ready()
        pids = preprocessor.worker_pids
        time.sleep(0.1)
        assert len(preprocessor.submit(ask(PICTURE)).result(TIMEOUT_S).images) == 1
        assert preprocessor.worker_pids == pids


# ------------------------------------------------------------------ compromised workers


LIMITS = MediaLimits(max_frames=8, max_aspect_ratio=4.0)
TASK = ImageTask("image", [Source("image_file", b"encoded")])
MESSAGE = {"grid": [1, 4, 6], "texts": []}


def checks(rules):
    visual = VisualMetadata(token_id=9, patch_bytes=6, max_bytes=1 << 20, settings="")
    metadata = ProcessorMetadata(image=visual, video=visual, vocab_size=100, control_ids=[9, 10])
    known = Future()
    known.set_result(metadata)
    return ImageChecks(rules, LIMITS, known, allows_whole=True, measures_only=False)


def test_messages_of_a_worker_are_validated(processor):
    small = dataclasses.replace(processor.images, max_pixels=64 * 14 * 14)
    check = checks(dataclasses.replace(processor.rules, images=small))
    [part] = check.parts(MESSAGE, TASK)
    assert (part.grid, part.num_patches, part.length) == ((1, 4, 6), 24, 6)
    wrong = {
        "grid": [
            None, 24, [4, 6], [1, 4, 6, 1], [2, 4, 6], [0, 4, 6], [1, 3, 6], [1, 4, -6], [1, 0, 6], [1, 4, "6"],
            [1, 4, 6.0], [1, 4, True], [1, 2**20, 2**20], [1, 14, 12], {"0": 1},
        ],
        "texts": [None, "", [[1]], [[]], {}],
    }  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(WorkerLostError):
                check.parts(MESSAGE | {name: value}, TASK)
    for fps in (1e-300, 1e-7):
        with pytest.raises(WorkerLostError):
            check.parts({"grid": [1, 4, 6], "texts": []}, ImageTask("video", TASK.sources, fps))
    assert check.whole_shape([56, 84], (1, 4, 6), TASK) == (56, 84, 3)
    for size in (None, 56, [56], [56, 84, 3], [56, "84"], [-56, 84], [0, 84], [56, 112], [2**20, 84], [1600, 2400]):
        with pytest.raises(WorkerLostError):
            check.whole_shape(size, (1, 4, 6), TASK)
    with pytest.raises(WorkerLostError):
        check.whole_shape([56, 84], (1, 4, 6), ImageTask("video", TASK.sources))
    with pytest.raises(WorkerLostError):
        check._replace(allows_whole=False).whole_shape([56, 84], (1, 4, 6), TASK)
    assert check_seconds(0.25) == 0.25
    for value in (None, 1, "0.25", -0.1, 1e300, float("inf"), float("nan")):
        with pytest.raises(WorkerLostError):
            check_seconds(value)


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A checkpoint of a family that writes the times of a video's frames."""
    folder = tmp_path_factory.mktemp("timed") / "checkpoint"
    initialize_random(folder, named_size("qwen3_vl/tiny"), dtype=torch.float32)
    return folder


def test_texts_of_a_worker_have_no_control_tokens(timed):
    check = checks(load_rules(timed))
    task = ImageTask("video", [Source("image_file", b"encoded")] * 3, 2.0)
    message = {"grid": [2, 4, 6], "texts": [[1, 2], [3]]}
    assert [part.length for part in check.parts(message, task)] == [3, 6, 1, 2, 6, 1]
    for texts in (
        [[1], [9]],
        [[1], [10, 2]],
        [[1]],
        [[1], [2], [3]],
        [[1], [100]],
        [[1], [-1]],
        [[1], ["2"]],
        [[1], [2] * 65],
    ):
        with pytest.raises(WorkerLostError):
            check.parts(message | {"texts": texts}, task)


def test_a_video_with_times_of_a_worker_process_is_that_of_the_processor(timed):
    frames = [noise(90, 60, seed) for seed in range(3)]
    messages = ask({"type": "video", "video": frames, "fps": 0.7}, "When?", noise(64, 64))
    inputs = Processor.load(timed)([messages], add_generation_prompt=True)
    with Preprocessor(timed, num_workers=1, processed_image_cache_bytes=CACHE_BYTES) as preprocessor:
        prompt, again = (preprocessor.submit(messages).result(TIMEOUT_S) for _ in range(2))
    assert_equal(prompt, inputs)
    keys = [image.span.key for image in prompt.images]
    assert len(set(keys)) == 3
    assert keys == [image.span.key for image in again.images]


def test_an_outbox_that_is_too_short_is_refused():
    mailbox = Mailbox()
    mailbox.outbox.write(np.arange(10), 0)
    np.testing.assert_array_equal(mailbox.read_outbox((10,), np.int64), np.arange(10))
    os.ftruncate(mailbox.outbox.fd, 79)
    with pytest.raises(WorkerLostError, match="less than it said"):
        mailbox.read_outbox((10,), np.int64)


def test_messages_file_descriptors_and_memory_arrive_whole():
    ours, theirs = socket.socketpair()
    memory, array = SharedMemory(), np.arange(60, dtype=np.int64).reshape(3, 4, 5)
    with ours, theirs:
        for message in ({"a": [1, "\ufdd0ü"]}, {}, None, "x" * 100_000):
            send(ours, message)
            assert receive(theirs) == message
        send(ours, "x" * 100_000, [memory.fd])
        message, [fd] = receive_with_fds(theirs)
        assert (message, os.fstat(fd).st_ino) == ("x" * 100_000, os.fstat(memory.fd).st_ino)
        os.close(fd)
    assert (memory.write(b"head", 0), memory.write(array, 4), memory.write(b"", 484)) == (4, 480, 0)
    copy = np.zeros_like(array)
    assert memory.read_into(copy, 4)
    np.testing.assert_array_equal(copy, array)
    assert not memory.read_into(copy, 5)
    assert memory.read_into(np.zeros((0, 7)), 10**6)
    memory.free_if_larger(484)
    assert os.fstat(memory.fd).st_size == 484
    memory.free_if_larger(483)
    assert os.fstat(memory.fd).st_size == 0
