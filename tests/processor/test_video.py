"""Video files are sampled at the requested frame rate, within the limits, by the demuxer of their own container."""

import base64
import io

import numpy as np
import pytest
import torch

from saccade.errors import ConfigError, ImageError
from saccade.processor import MediaLimits, Processor
from saccade.processor.image import MediaBudget
from saccade.processor.messages import VideoFileItem
from saccade.processor.video import sampled_frames


def encode(num_frames, *, rate=10, size=(84, 56), container="mp4", codec="mpeg4"):
    """A video whose frame n has the grey level 12 n, wrapped around."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(num_frames):
            frame = np.full((size[1], size[0], 3), 12 * number % 256, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


def levels(data, fps, limits=MediaLimits()):  # noqa: B008  frozen
    """The numbers of the frames that were sampled."""
    return [round(frame.mean() / 12) for frame in sampled_frames(data, fps, MediaBudget(limits))]


def ask(video, **options):
    return [{"role": "user", "content": [{"type": "video", "video": video, **options}]}]


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi"])
def test_frames_are_sampled_at_the_rate_asked_for(container):
    data = encode(20, container=container)
    assert levels(data, 5) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert levels(data, 2) == [0, 5, 10, 15]
    assert levels(data, 3) == [0, 4, 7, 10, 14, 17]
    assert levels(data, 100) == list(range(20)), "no frame comes twice"
    assert levels(data, 0.1) == [0]


def test_a_file_gives_what_its_frames_give(processor, tmp_path):
    data = encode(12)
    frames = sampled_frames(data, 5, MediaBudget(MediaLimits()))
    assert [frame.shape for frame in frames] == [(56, 84, 3)] * 6
    expected = processor.preprocess(ask(frames, fps=5))
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    for video in (path, str(path), data, bytearray(data), io.BytesIO(data), url):
        inputs = processor.preprocess(ask(video, fps=5))
        assert torch.equal(inputs.token_ids, expected.token_ids)
        assert torch.equal(inputs.positions, expected.positions)
        assert torch.equal(inputs.patches, expected.patches)
    part = {"type": "video_url", "video_url": {"url": url}, "fps": 5}
    assert torch.equal(processor.preprocess([{"role": "user", "content": [part]}]).patches, expected.patches)


def test_a_video_past_the_limits_is_refused_before_it_is_decoded(checkpoint):
    data = encode(50)  # 5 s
    with pytest.raises(
        ImageError, match=r"a video of 5 s has 50 frames at 10 fps, over the limit of 20 .* Set fps to 4 "
    ):
        levels(data, 10, MediaLimits(max_frames=20))
    assert len(levels(data, 4, MediaLimits(max_frames=20))) == 20
    with pytest.raises(ImageError, match="images and frames of 14112 pixels so far, over the limit of 10000"):
        levels(data, 4, MediaLimits(max_request_pixels=10_000))
    with pytest.raises(ImageError, match="the longest side may be 60"):
        levels(data, 4, MediaLimits(max_side=60))
    strict = Processor.load(checkpoint, limits=MediaLimits(max_request_bytes=1000, allow_local_files=False))
    with pytest.raises(ImageError, match=rf"the video has {len(data)} bytes, over the limit of 1000"):
        strict.preprocess_visual(VideoFileItem(data, 2.0))
    with pytest.raises(ImageError, match="videos given as a path are not read here"):
        strict.preprocess_visual(VideoFileItem("/etc/hostname", 2.0))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"#EXTM3U\nfile:///etc/passwd", "in no supported container"),
        (b"ffconcat version 1.0\nfile /etc/passwd", "in no supported container"),
        (b"\x00\x00\x00\x18ftypmp42" + b"\x00" * 100, "cannot be decoded|has no video stream"),
        (b"\x1a\x45\xdf\xa3" + b"\x00" * 100, "cannot be decoded"),
    ],
)
def test_what_is_not_a_video_is_refused(data, reason):
    pytest.importorskip("av")
    with pytest.raises(ImageError, match=reason):
        levels(data, 2)


def test_a_truncated_video_is_refused():
    with pytest.raises(ImageError, match="no video stream, or is truncated"):
        levels(encode(20)[:-600], 10)  # an MP4 has its index at the end


def test_without_pyav_one_line_says_what_to_install(processor, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'saccade\[video\]'"):
        processor.preprocess(ask(b"\x00\x00\x00\x18ftypmp42"))
