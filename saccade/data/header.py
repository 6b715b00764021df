"""The size of an encoded image as it will be seen, from its header alone: no pixel is decoded.

A camera's photo may lie on its side and say so in its EXIF; the processor turns it upright before anything else, so width and
height are those of the turned picture. JPEG is measured by libjpeg-turbo (450 thousand headers a second) and PNG by hand;
every other format, and whatever is out of the ordinary, goes to Pillow.
"""

from __future__ import annotations

import io
import warnings

import simplejpeg
from PIL import Image

from saccade.errors import ImageError
from saccade.processor.image import FORMATS

_ORIENTATION = 0x0112
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
_PNG_TEXT = {b"tEXt", b"zTXt", b"iTXt"}
_PNG_TURNING = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""Names under which tools keep EXIF and XMP in a PNG's texts."""


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height after turning upright. Raises `ImageError` for what the processor would refuse on the header."""
    try:
        size = _jpeg_size(data) or _png_size(data) or _pillow_size(data)
    except ImageError:
        raise
    except Exception as error:  # hostile bytes reach deep into Pillow; whatever it raises, the header is bad
        raise ImageError(f"the header cannot be read ({error})") from error
    if min(size) < 1:
        raise ImageError(f"the image is {size[0]}x{size[1]} pixels")
    return size


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """By the JPEG's own segments; None where Pillow must judge."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    segments = _app1_segments(data)
    if segments is None or any(segment.startswith(_XMP) for segment in segments):
        return None
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
    except ValueError:
        return None
    found = [segment for segment in segments if segment.startswith(_EXIF)]
    if not found:
        return width, height
    exif = Image.Exif()
    exif.load(found[0] + b"".join(segment[len(_EXIF) :] for segment in found[1:]))
    return _turned((width, height), exif)


def _app1_segments(data: bytes) -> list[bytes] | None:
    """The APP1 segments before the first scan, home of EXIF and XMP. None where the markers do not follow one another."""
    at = 2
    found: list[bytes] = []
    while data[at : at + 1] == b"\xff" and (marker := data[at + 1]) not in (0x00, 0xFF):
        if marker == 0xDA:
            return found
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xE1:
            found.append(data[at + 4 : at + 2 + length])
        at += 2 + length
    return None


def _png_size(data: bytes) -> tuple[int, int] | None:
    """From the first chunk, if no other turns or animates the picture; else None."""
    if not data.startswith(_PNG_START):
        return None
    at = 8
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind in (b"eXIf", b"acTL") or (kind in _PNG_TEXT and data.startswith(_PNG_TURNING, at + 8)):
            return None
        at += 12 + length
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _pillow_size(data: bytes) -> tuple[int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # limits are the processor's
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ImageError(f"animated {image.format}")
    return _turned(image.size, image.getexif())


def _turned(size: tuple[int, int], exif: Image.Exif) -> tuple[int, int]:
    width, height = size
    return (height, width) if exif.get(_ORIENTATION, 1) in (5, 6, 7, 8) else (width, height)
