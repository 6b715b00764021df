"""Upright size of an encoded image from its header alone; no pixel is decoded.

The EXIF orientation of a photo is applied, as the processor does before anything else. JPEG headers are read by
libjpeg-turbo (450 thousand per second) and PNG here; every other format and every unusual file by Pillow.
"""

from __future__ import annotations

import io
import re
import warnings

import simplejpeg
from PIL import Image, UnidentifiedImageError

from saccade.data.image_formats import unsupported_format
from saccade.errors import ImageError
from saccade.processor.image import FIRST_FRAME_FORMATS, FORMATS

_ORIENTATION = 0x0112
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
_PNG_TEXT = {b"tEXt", b"zTXt", b"iTXt"}
_PNG_EXIF = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""Keywords of PNG text chunks in which tools store EXIF and XMP."""


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height with the EXIF orientation applied.

    Raises `ImageError` if the processor would refuse the header.
    """
    try:
        size = _jpeg_size(data) or _png_size(data) or _pillow_size(data)
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        found = unsupported_format(data)
        what = f"{found} images are not supported" if found else "not an image in a supported format"
        raise ImageError(f"{what} ({', '.join(FORMATS)}). Convert it to JPEG, PNG or WebP") from error
    except Exception as error:  # malformed bytes may raise anything in Pillow: the header is bad
        reason = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "the file", str(error))
        raise ImageError(f"the header cannot be read ({reason})") from error
    if min(size) < 1:
        raise ImageError(f"the image is {size[0]}x{size[1]} pixels")
    return size


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """The size from a JPEG's segments; None if Pillow must decide."""
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
    return _oriented((width, height), exif)


def _app1_segments(data: bytes) -> list[bytes] | None:
    """The APP1 segments (EXIF, XMP) before the first scan. None if the markers are not contiguous."""
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
    """The size from a PNG's first chunk; None if another chunk rotates or animates the image."""
    if not data.startswith(_PNG_START):
        return None
    at = 8
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind in (b"eXIf", b"acTL") or (kind in _PNG_TEXT and data.startswith(_PNG_EXIF, at + 8)):
            return None
        at += 12 + length
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _pillow_size(data: bytes) -> tuple[int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the processor has its own limits; damaged metadata do not matter
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.format not in FIRST_FRAME_FORMATS and getattr(image, "is_animated", False):
        raise ImageError(f"animated {image.format}")
    return image.size if image.format == "TIFF" else _oriented(image.size, image.getexif())  # a TIFF's is upright


def _oriented(size: tuple[int, int], exif: Image.Exif) -> tuple[int, int]:
    width, height = size
    return (height, width) if exif.get(_ORIENTATION, 1) in (5, 6, 7, 8) else (width, height)
