"""From bytes to patches: check the header, decode, turn upright, flatten transparency, resize, cut.

    read source -> check header -> decode to RGB -> resize to a multiple of the patch grid -> patches

Everything that can be refused is refused on the header, before a pixel is decoded. What the model sees is what a person
sees: EXIF orientation and transparency are applied first. The resize is Pillow's here, exactly that of Hugging Face's processor;
a caller may give another one (`processor.torch_resize`).
"""

from __future__ import annotations

import base64
import io
import math
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.errors import ConfigError, ImageError

Pixels = NDArray[np.uint8]
"""[height, width, 3] RGB."""

Resize = Callable[[Pixels, int, int], Pixels]
"""(pixels, height, width) -> pixels of that size: bicubic, antialiased when shrinking."""

ImageSource = str | Path | bytes | Image.Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What is decoded; every other format Pillow knows stays closed."""

_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What each EXIF orientation asks for. (Pillow's own function writes the EXIF anew, which a damaged tag breaks.)"""
_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What an image or video may be before it is decoded. The defaults suit a server that strangers talk to."""

    max_bytes: int = 32 * 2**20
    """Encoded size of one image."""
    max_pixels: int = 64_000_000
    """Width times height as the header states them; decoding takes 3 bytes a pixel."""
    max_side: int = 16384
    """Longest side in pixels."""
    max_aspect_ratio: float = 200.0
    """Longer side over shorter side; the resize of the model family is not defined beyond 200."""
    max_frames: int = 768
    """Frames of one video."""
    allow_local_files: bool = True
    """Whether an image may be named by a path. A server that takes requests from others sets this to False."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How images become patches: the content of `preprocessor_config.json` that we honour."""

    patch_size: int = 14
    """Side of a patch in pixels."""
    merge_size: int = 2
    """Patches merged into one token, per side."""
    temporal_patch_size: int = 2
    """Frames in one patch; an image is repeated to fill them."""
    min_pixels: int = 56 * 56
    """Smaller images are enlarged to about this many pixels."""
    max_pixels: int = 28 * 28 * 1280
    """Larger images are shrunk to at most this many pixels."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    """Per channel, in the 0..1 range."""
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    """Per channel, in the 0..1 range."""

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"image settings: {name} is {value!r}, not a whole number of at least 1")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
                raise ConfigError(f"image settings: {name} is {values!r}, not three numbers, one per colour")
        if min(self.std) <= 0:
            raise ConfigError(f"image settings: std is {self.std!r}; every colour's must be above 0")
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"image settings: min_pixels {self.min_pixels} must be over 0 and at most max_pixels {self.max_pixels}"
            )
        if self.max_pixels < self.cell**2:
            raise ConfigError(
                f"image settings: max_pixels {self.max_pixels} holds not even one token ({self.cell}x{self.cell} pixels)"
            )

    @property
    def cell(self) -> int:
        """Side of one token's square in pixels; resized images are whole cells."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch."""
        return len(self.mean) * self.temporal_patch_size * self.patch_size**2

    def grid(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int, int]:
        """Frame pairs, rows and columns of patches for an image of this size; no pixel is needed."""
        resized_height, resized_width = self.resized(height, width)
        frames = math.ceil(num_frames / self.temporal_patch_size)
        return frames, resized_height // self.patch_size, resized_width // self.patch_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The nearest size in whole cells within the pixel budget, keeping the aspect ratio as far as cells allow."""
        rows, columns = round(height / self.cell), round(width / self.cell)
        if rows * columns * self.cell**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / self.cell))
            columns = max(1, math.floor(width / shrink / self.cell))
        elif rows * columns * self.cell**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / self.cell)
            columns = math.ceil(width * grow / self.cell)
        return rows * self.cell, columns * self.cell


def load_image(source: ImageSource, limits: MediaLimits) -> Pixels:
    """Decode one image (path, bytes, data URL or PIL image) to upright, opaque RGB."""
    if isinstance(source, Image.Image):
        check_size(source.size, limits)
        return _decode(source, None)
    data = _read(source, limits)
    if data.startswith(_PNG_START):  # Pillow reads a PNG on to its first pixels; its size stands before them
        check_size((int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")), limits)
    image = _open_header(data)
    check_size(image.size, limits)
    return _decode(image, data)


def _read(source: ImageSource, limits: MediaLimits) -> bytes:
    """The encoded bytes, never more than the limit."""
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and source[:5].lower() == "data:":
        data = _read_data_url(source, limits)
    elif isinstance(source, str) and (scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)):
        raise ImageError(f"remote images are not fetched ({scheme[1]}). Send the bytes, a data URL or a plain path")
    elif isinstance(source, str | Path):
        data = _read_file(Path(source), limits)
    else:
        raise ImageError(f"an image is a path, bytes, a data URL or a PIL image, not {type(source).__name__}")
    if not data:
        raise ImageError("the image has zero bytes")
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has {len(data)} bytes, over the limit of {limits.max_bytes}. Send a smaller file")
    return data


def _read_data_url(url: str, limits: MediaLimits) -> bytes:
    header, comma, body = url.partition(",")
    header = header.lower()
    if not comma or not header.startswith("data:image/") or not header.endswith(";base64"):
        raise ImageError("the data URL is not of the form data:image/<format>;base64,<data>")
    if len(body) * 3 // 4 > limits.max_bytes + 2:  # the encoded length tells before anything is decoded
        raise ImageError(
            f"the image has about {len(body) * 3 // 4} bytes, over the limit of {limits.max_bytes}. Send a smaller file"
        )
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ImageError("the data URL holds invalid base64. Encode the file again") from error


def _read_file(path: Path, limits: MediaLimits) -> bytes:
    """At most one byte more than the limit, from a regular file: pipes and devices would never end."""
    if not limits.allow_local_files:
        raise ImageError("images named by a path are not read here. Send the bytes as a data URL")
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:60]}... ({len(str(path))} characters)"
    shown = shown.encode("utf-8", "replace").decode()
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{shown}: not a file. Check the path")
        if status.st_size > limits.max_bytes:
            raise ImageError(
                f"{shown}: {status.st_size} bytes, over the limit of {limits.max_bytes}. Use a smaller file"
            )
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except OSError as error:
        raise ImageError(f"{shown}: {error.strerror}. Check the path") from error
    except ValueError as error:  # a null byte, half of a surrogate pair
        raise ImageError(f"{shown}: not a path. Check it") from error


def _open_header(data: bytes) -> Image.Image:
    """Parse the header with the plugin whose signature fits; pixels stay encoded.

    `Image.open` would do, but it raises its own error for large images before we can state the size and our limit.
    """
    Image.init()
    for name in FORMATS:
        factory, accepts = Image.OPEN[name]
        if accepts is None or accepts(data[:16]):
            try:
                image: Image.Image = factory(io.BytesIO(data), b"")
                return image
            except Exception as error:  # hostile bytes reach deep into Pillow; whatever it raises, the header is bad
                raise ImageError(
                    f"the image looks like {name} but its header cannot be read. Save it again as PNG or JPEG"
                ) from error
    raise ImageError(f"the image is in no format known here ({', '.join(FORMATS)}). Save it as PNG or JPEG")


def check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    """Refuse an image by its width and height, as its header states them."""
    width, height = size
    if min(size) < 1:
        raise ImageError(f"the image is {width}x{height} pixels; both sides must be at least 1")
    if max(size) > limits.max_side:
        raise ImageError(
            f"the image is {width}x{height} pixels; the longest side may be {limits.max_side}. Shrink it first"
        )
    if width * height > limits.max_pixels:
        raise ImageError(
            f"the image is {width}x{height} = {width * height} pixels, over the limit of {limits.max_pixels}. Shrink it first"
        )
    if max(size) > limits.max_aspect_ratio * min(size):
        ratio = max(size) / min(size)
        raise ImageError(
            f"the image is {width}x{height} pixels, an aspect ratio of {ratio:.0f} over the limit of {limits.max_aspect_ratio:.0f}. Crop it first"
        )


def _decode(image: Image.Image, data: bytes | None) -> Pixels:
    """Pixels of an image whose header has passed. Colour JPEGs go through libjpeg-turbo directly."""
    try:
        # A camera's MPO file is a JPEG with further pictures behind the first; the first is the photo.
        if data is not None and image.format != "MPO" and getattr(image, "is_animated", False):
            raise ImageError(f"animated {image.format}. Send it as a video, a list of frames")
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        if data is not None and image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
            pixels = _decode_jpeg(data)
            if pixels is not None:
                return pixels if turn is None else np.asarray(Image.fromarray(pixels).transpose(turn))
        return _to_rgb(image if turn is None else image.transpose(turn))
    except ImageError:
        raise
    except Exception as error:  # hostile bytes reach deep into Pillow; whatever it raises, the pixels are bad
        raise ImageError(
            f"the {image.format or image.mode} image of {image.width}x{image.height} pixels is truncated or corrupt. Send the whole file"
        ) from error


def _decode_jpeg(data: bytes) -> Pixels | None:
    """simplejpeg takes under half of Pillow's time and gives the same pixels. What it refuses, Pillow judges."""
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
    """On white where transparent, 8-bit RGB."""
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip 16 bits instead of scaling them
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(f"a picture of mode {image.mode} has no 8- or 16-bit colours. Convert it to RGB first")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))  # converting RGB to RGB would copy


def pillow_resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """As Hugging Face's processor, to the bit."""
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def image_patches(
    pixels: Pixels, settings: ImageSettings, resize: Resize = pillow_resize, into: Pixels | None = None
) -> tuple[Pixels, tuple[int, int, int]]:
    """[patches, patch_dim] uint8 and the grid of one image."""
    return video_patches([pixels], settings, resize, into)


def video_patches(
    frames: Sequence[Pixels], settings: ImageSettings, resize: Resize = pillow_resize, into: Pixels | None = None
) -> tuple[Pixels, tuple[int, int, int]]:
    """[patches, patch_dim] uint8 and the grid of frames that share one size; the last frame fills the last frame pair.

    The patches are written to the first rows of `into`; without it they get memory of their own.
    """
    height, width = frames[0].shape[:2]
    size, grid = settings.resized(height, width), settings.grid(height, width, len(frames))
    num_patches = math.prod(grid)
    if into is None:
        into = np.empty((num_patches, settings.patch_dim), dtype=np.uint8)
    if len(into) < num_patches:
        raise ImageError(f"{width}x{height} pixels are {num_patches} patches where only {len(into)} have room")
    resized = (frame if frame.shape[:2] == size else resize(frame, *size) for frame in frames)
    _cut(resized, into[:num_patches], grid, settings)
    return into[:num_patches], grid


def _cut(frames: Iterable[Pixels], into: Pixels, grid: tuple[int, int, int], settings: ImageSettings) -> None:
    """Frames to patches: the four patches of one token lie together; a patch is channel, frame, row, column."""
    side, merge, depth = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    assert into.flags.c_contiguous, "patches are written through a view"
    pairs, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    #                     time  row of tokens  column  row and column in token  channel  frame  pixel row and column
    patches = into.reshape(pairs, rows, columns, merge, merge, -1, depth, side, side)
    slots = [patches[number // depth, ..., number % depth, :, :] for number in range(pairs * depth)]
    number = 0
    for number, frame in enumerate(frames):
        slots[number][...] = frame.reshape(rows, merge, side, columns, merge, side, -1).transpose(0, 3, 1, 4, 6, 2, 5)
    for slot in slots[number + 1 :]:
        slot[...] = slots[number]
