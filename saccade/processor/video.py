"""Video files to frames, through PyAV (optional: `pip install 'saccade[video]'`).

    read file -> check container -> decode -> one frame every 1 / fps seconds -> upright RGB

Only MP4/MOV, WebM/Matroska and AVI are opened, each by its own demuxer: FFmpeg's playlist formats would read other
files.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from saccade.errors import ConfigError, ImageError
from saccade.processor.image import MediaBudget, Pixels

if TYPE_CHECKING:
    from av.container import InputContainer


def sampled_frames(data: bytes, fps: float, budget: MediaBudget) -> list[Pixels]:
    """Decode the frames of a video file at 0, 1 / fps, 2 / fps, ... seconds, each counted against `budget`."""
    av = _import_av()
    try:
        with av.open(io.BytesIO(data), format=_demuxer(data)) as container:
            frames = list(_sample(container, fps, budget))
    except av.FFmpegError as error:
        raise ImageError("the video cannot be decoded. Re-encode it as MP4 (H.264)") from error
    if not frames:
        raise ImageError("the video has no frames. Send the whole file")
    return frames


def _sample(container: InputContainer, fps: float, budget: MediaBudget) -> Iterator[Pixels]:
    if not container.streams.video:
        raise ImageError("the file has no video stream, or is truncated")
    stream = container.streams.video[0]
    if container.duration is not None:  # refuse a long video before its first frame is decoded
        budget.check_duration(container.duration / 1_000_000, fps)
    start, number = None, 0
    for frame in container.decode(stream):
        time = 0.0 if frame.time is None else frame.time
        start = time if start is None else start
        if (time - start) * fps >= number - 1e-3:  # a stream's clock may be rounded to milliseconds
            number = int((time - start) * fps + 1e-3) + 1
            budget.add_frames(1)
            budget.add_pixels((frame.width, frame.height))
            pixels = cast(Pixels, frame.to_ndarray(format="rgb24"))
            yield np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))


def _demuxer(data: bytes) -> str:
    """FFmpeg's name of the container, from the first bytes."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    raise ImageError("the video is in no supported container (MP4, MOV, WebM, MKV, AVI). Re-encode it as MP4")


def import_all_of_av() -> None:
    """Import every module of PyAV, if installed: it imports some when decoding, which a sandboxed process cannot."""
    if importlib.util.find_spec("av") is None:
        return
    for module in pkgutil.walk_packages(_import_av().__path__, "av."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            "reading video files needs PyAV: pip install 'saccade[video]'. Or send the video as a list of frames"
        ) from error
    return av
