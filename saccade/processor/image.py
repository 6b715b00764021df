"""Image sources to pixels: read, check the header, decode, rotate upright, flatten transparency.

    read source -> check header -> decode to RGB

Limits are checked on the header, before a pixel is decoded. EXIF orientation and transparency are applied, so that the
model gets the picture that viewers show. `patches.py` cuts the pixels into patches.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, features

from saccade.errors import ImageError
from saccade.processor.pillow_resize import Pixels as Pixels

ImageSource = str | Path | bytes | Image.Image
"""A path, a data URL, encoded bytes, or a PIL image."""

IMAGE_FORMS = "a path, bytes, BytesIO, a data URL, a PIL image or a uint8 array [height, width, 3]"

_HAS_AVIF = "avif" in features.modules and features.check_module("avif")
if _HAS_AVIF:
    from PIL import AvifImagePlugin

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # images are decoded in parallel, each by one thread
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *(["AVIF"] if _HAS_AVIF else []))
"""Decoded formats; Pillow's other plugins are never called. Some builds of Pillow lack AVIF."""

FIRST_FRAME_FORMATS = ("MPO", "TIFF", "AVIF")
"""Formats with several images, of which the first counts: an MPO file has further JPEGs, a TIFF may have pages."""

_ORIENTATION = 0x0112  # the EXIF tag
_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # TIFF tags
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transpositions by EXIF orientation. (Pillow's `exif_transpose` rewrites the EXIF, which fails on a damaged tag.)"""
_SWAPPING_TRANSPOSES = (
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)
"""The orientations that swap width and height."""
_START_OF_SCAN = b"\xff\xda"
_USUAL_SCANS = 10
"""Scans of a progressive JPEG as libjpeg writes it."""
_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits on the images and videos of a request, checked before decoding. The defaults suit a public server."""

    max_bytes: int = 32 * 2**20
    """Encoded size of one image."""
    max_pixels: int = 64_000_000
    """Pixels of one image as its header states them; decoding takes 3 bytes per pixel."""
    max_side: int = 16384
    """Longest side in pixels."""
    max_aspect_ratio: float = 200.0
    """Longer side over shorter side; the resize of the model family is not defined beyond 200."""
    max_frames: int = 768
    """Video frames of one request, all its videos together."""
    max_request_bytes: int = 256 * 2**20
    """Encoded size of all images, frames and video files of one request."""
    max_request_pixels: int = 2_000_000_000
    """Pixels of all images and frames of one request as their headers state them (768 frames of 1080p are 1.6e9)."""
    allow_local_files: bool = True
    """Whether an image may be given as a path. A server sets this to False."""


class MediaBudget:
    """Totals of one request, checked against its limits. An image is counted before it is decoded."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self._num_frames = self._num_bytes = self._num_pixels = 0

    def add_frames(self, count: int) -> None:
        """Count frames of a video."""
        self._num_frames += count
        if self._num_frames > self.limits.max_frames:
            raise ImageError(
                f"{self._num_frames} frames, over the limit of {self.limits.max_frames} per request. Sample fewer "
                "frames"
            )

    def add_bytes(self, count: int) -> None:
        """Count the encoded bytes of an image, frame or video file."""
        self._num_bytes += count
        if self._num_bytes > self.limits.max_request_bytes:
            raise ImageError(
                f"images and videos of {self._num_bytes} bytes so far, over the limit of "
                f"{self.limits.max_request_bytes} per request. "
                "Send fewer or smaller ones"
            )

    def add_pixels(self, size: tuple[int, int]) -> None:
        """Check the width and height of an image or frame and count its pixels."""
        check_size(size, self.limits)
        self.add_decoded(size[0] * size[1])

    def add_decoded(self, num_pixels: int) -> None:
        """Count the pixels of an image or video whose size was checked before."""
        self._num_pixels += num_pixels
        if self._num_pixels > self.limits.max_request_pixels:
            raise ImageError(
                f"images and frames of {self._num_pixels} pixels so far, over the limit of "
                f"{self.limits.max_request_pixels} per request. "
                "Send fewer or smaller ones"
            )

    def check_duration(self, seconds: float, fps: float) -> None:
        """Refuse a video file that has too many frames at this sampling rate."""
        if (num_frames := int(seconds * fps)) > self.limits.max_frames:
            raise ImageError(
                f"a video of {seconds:.0f} s has {num_frames} frames at {fps:g} fps, over the limit of "
                f"{self.limits.max_frames} per request. "
                f"Set fps to {self.limits.max_frames / seconds:.2g} or send a shorter video"
            )


def to_image_source(value: object) -> object:
    """Convert a bytearray, BytesIO or numpy array to an `ImageSource`; anything else is returned as it is."""
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, np.ndarray):
        is_image = value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))
        if value.dtype != np.uint8 or not is_image or not value.size:
            raise ImageError(
                f"an image array is {value.dtype} {list(value.shape)}; use uint8 [height, width], [height, width, "
                "3] or [height, width, 4]"
            )
        return Image.fromarray(np.ascontiguousarray(value))
    return value


def load_image(source: ImageSource, limits: MediaLimits, budget: MediaBudget | None = None) -> Pixels:
    """Decode one image to upright, opaque RGB. `budget` counts it against the limits of its request."""
    budget = budget or MediaBudget(limits)
    if isinstance(source, Image.Image):
        budget.add_pixels(source.size)
        return _decode(source, None)
    data = read_encoded(source, limits)
    return _decode(_checked_header(data, budget), data)


def upright_size(source: ImageSource, limits: MediaLimits) -> tuple[int, int]:
    """Height and width of the pixels that `load_image` returns, from the header alone.

    Errors that the header shows are those of `load_image`. A PNG with EXIF or text after its pixels is decoded: they
    may turn it.
    """
    data = read_encoded(source, limits)
    image = _checked_header(data, MediaBudget(limits))
    with _decoding_errors(image):
        _check_is_still(image)
        if image.format == "PNG" and _has_late_metadata(data):
            height, width = _decode(image, data).shape[:2]
            return height, width
        transpose = _transpose_of(image)
        _check_mode(image)
    return image.size if transpose in _SWAPPING_TRANSPOSES else image.size[::-1]


def _checked_header(data: bytes, budget: MediaBudget) -> Image.Image:
    """The image, of which only the header is read, within all limits."""
    limits = budget.limits
    budget.add_bytes(len(data))
    image = _open_header(data, limits)
    budget.add_pixels(image.size)
    _check_tiles(image, limits)
    _check_scans(image, data, limits)
    return image


def read_encoded(source: ImageSource, limits: MediaLimits, kind: Literal["image", "video"] = "image") -> bytes:
    """The encoded bytes of a path, bytes or data URL, never more than the limit; nothing is decoded."""
    max_bytes = _max_bytes(limits, kind)
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and source[:5].lower() == "data:":
        data = _read_data_url(source, limits, kind)
    elif isinstance(source, str) and (scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)):
        raise ImageError(f"remote {kind}s are not fetched ({scheme[1]}). Send the bytes, a data URL or a path")
    elif isinstance(source, str | Path):
        data = _read_file(Path(source), max_bytes, kind, is_allowed=limits.allow_local_files)
    else:
        forms = IMAGE_FORMS if kind == "image" else "a path, bytes, BytesIO or a data URL"
        raise ImageError(f"{'an' if kind == 'image' else 'a'} {kind} is {forms}, not {type(source).__name__}")
    if not data:
        raise ImageError(f"the {kind} has zero bytes. Send the whole file")
    if len(data) > max_bytes:
        raise ImageError(f"the {kind} has {len(data)} bytes, over the limit of {max_bytes}. Send a smaller file")
    return data


def check_data_url(url: str, limits: MediaLimits, kind: Literal["image", "video"]) -> int:
    """Check the form and the size of a data URL without decoding it; returns the offset of its data."""
    start = url.find(",") + 1
    header, max_bytes = url[: max(0, start - 1)].lower(), _max_bytes(limits, kind)
    if not start or not header.startswith(f"data:{kind}/") or not header.endswith(";base64"):
        raise ImageError(f"the data URL is not of the form data:{kind}/<format>;base64,<data>")
    if (num_bytes := (len(url) - start) * 3 // 4) > max_bytes + 2:
        raise ImageError(f"the {kind} has about {num_bytes} bytes, over the limit of {max_bytes}. Send a smaller file")
    return start


def _max_bytes(limits: MediaLimits, kind: Literal["image", "video"]) -> int:
    return limits.max_bytes if kind == "image" else limits.max_request_bytes


def _read_data_url(url: str, limits: MediaLimits, kind: Literal["image", "video"]) -> bytes:
    start = check_data_url(url, limits, kind)
    try:
        return base64.b64decode(url[start:], validate=True)
    except ValueError as error:
        raise ImageError("the data URL holds invalid base64. Encode the file again") from error


def _read_file(path: Path, max_bytes: int, kind: str, *, is_allowed: bool) -> bytes:
    """Read at most one byte more than the limit, from a regular file: pipes and devices may never end."""
    if not is_allowed:
        raise ImageError(f"{kind}s given as a path are not read here. Send the bytes as a data URL")
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:60]}... ({len(str(path))} characters)"
    shown = shown.encode("utf-8", "replace").decode()
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{shown}: not a file. Check the path")
        if status.st_size > max_bytes:
            raise ImageError(f"{shown}: {status.st_size} bytes, over the limit of {max_bytes}. Use a smaller file")
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise ImageError(f"{shown}: {error.strerror}. Check the path") from error
    except ValueError as error:  # a null byte, half of a surrogate pair
        raise ImageError(f"{shown}: not a path. Check it") from error


def _open_header(data: bytes, limits: MediaLimits) -> Image.Image:
    """Parse the header with the plugin whose signature matches; no pixel is decoded.

    (`Image.open` raises an error of its own for large images, without our limit.)
    """
    if data.startswith(_PNG_START):  # Pillow would read up to the first pixels; the size comes before them
        check_size((int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")), limits)
    Image.init()
    for name in FORMATS:
        factory, accepts = Image.OPEN[name]
        if accepts is None or accepts(data[:16]):
            try:
                image: Image.Image = factory(io.BytesIO(data), b"")
                return image
            except Exception as error:  # Pillow raises anything on hostile bytes
                raise ImageError(
                    f"the image looks like {name} but its header cannot be read. Save it again as PNG or JPEG"
                ) from error
    raise ImageError(f"the image is in no supported format ({', '.join(FORMATS)}). Save it as PNG or JPEG")


def check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    """Check an image's width and height, as its header states them."""
    width, height = size
    if min(size) < 1:
        raise ImageError(f"the image is {width}x{height} pixels; both sides must be at least 1")
    if max(size) > limits.max_side:
        raise ImageError(
            f"the image is {width}x{height} pixels; the longest side may be {limits.max_side}. Shrink it first"
        )
    if width * height > limits.max_pixels:
        raise ImageError(
            f"the image is {width}x{height} = {width * height} pixels, over the limit of {limits.max_pixels}. "
            "Shrink it first"
        )
    if max(size) > limits.max_aspect_ratio * min(size):
        ratio = max(size) / min(size)
        raise ImageError(
            f"the image is {width}x{height} pixels, an aspect ratio of {ratio:.0f} over the limit of "
            f"{limits.max_aspect_ratio:.0f}. Crop it first"
        )


def _check_tiles(image: Image.Image, limits: MediaLimits) -> None:
    """Refuse a TIFF with tiles over the limits: a whole tile is decoded even for a small image."""
    tags = getattr(image, "tag_v2", {})
    width, height = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_HEIGHT, 1)
    if not isinstance(width, int) or not isinstance(height, int) or width * height > limits.max_pixels:
        raise ImageError(
            f"the TIFF has tiles of {width}x{height} pixels, over the limit of {limits.max_pixels}. Save it "
            "without tiles"
        )


def _check_scans(image: Image.Image, data: bytes, limits: MediaLimits) -> None:
    """Refuse a progressive JPEG with too many scans: each is a pass over all pixels."""
    if image.format not in ("JPEG", "MPO"):
        return
    num_scans = data.count(_START_OF_SCAN)
    if num_scans > _USUAL_SCANS and num_scans * image.width * image.height > _USUAL_SCANS * limits.max_pixels:
        raise ImageError(
            f"the JPEG of {image.width}x{image.height} pixels has {num_scans} scans; {_USUAL_SCANS} are usual. "
            "Save it again as a baseline JPEG"
        )


def _decode(image: Image.Image, data: bytes | None) -> Pixels:
    """Decode an image whose header was checked. Colour JPEGs are decoded by libjpeg-turbo directly."""
    with _decoding_errors(image):
        if data is not None:
            _check_is_still(image)
        if image.format == "PNG":
            image.load()  # EXIF may follow the pixels
        transpose = _transpose_of(image)
        if data is not None and image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
            pixels = _decode_jpeg(data)
            if pixels is not None:
                return pixels if transpose is None else np.asarray(Image.fromarray(pixels).transpose(transpose))
        return _to_rgb(image if transpose is None else image.transpose(transpose))


def _check_is_still(image: Image.Image) -> None:
    if image.format not in FIRST_FRAME_FORMATS and getattr(image, "is_animated", False):
        raise ImageError(f"animated {image.format}. Send it as a video, a list of frames")


def _check_mode(image: Image.Image) -> None:
    if image.mode in ("I", "F"):
        raise ImageError(f"an image of mode {image.mode} has no 8- or 16-bit colours. Convert it to RGB first")


def _transpose_of(image: Image.Image) -> Image.Transpose | None:
    """The transposition that turns the image upright, from the metadata read so far."""
    if image.format == "TIFF":  # Pillow turns it when it loads its pixels; its size is the upright one
        return None
    return _TRANSPOSES.get(Image.Image.getexif(image).get(_ORIENTATION, 1))  # a PNG's own method loads its pixels


def _has_late_metadata(png: bytes) -> bool:
    """Whether a PNG may have EXIF or text after its first pixels."""
    first = png.find(b"IDAT")
    return any(png.find(chunk, first) >= 0 for chunk in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"))


@contextlib.contextmanager
def _decoding_errors(image: Image.Image) -> Iterator[None]:
    """Errors of Pillow as errors of the image."""
    try:
        yield
    except ImageError:
        raise
    except MemoryError as error:
        raise ImageError(
            f"an image of {image.width}x{image.height} pixels needs more memory than there is. Shrink it first"
        ) from error
    except Exception as error:  # Pillow raises anything on hostile bytes
        raise ImageError(
            f"the {image.format or image.mode} image of {image.width}x{image.height} pixels is truncated or "
            "corrupt. Send the whole file"
        ) from error


def _decode_jpeg(data: bytes) -> Pixels | None:
    """Decode with simplejpeg, the same pixels in less than half of Pillow's time. None: it cannot decode the image."""
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
    except ValueError:
        return None
    return pixels


def _to_rgb(image: Image.Image) -> Pixels:
    """8-bit RGB, transparent pixels on white."""
    if image.mode.startswith("I;16"):  # Pillow's conversion clips 16 bits instead of scaling them
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    _check_mode(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))  # RGB to RGB copies
