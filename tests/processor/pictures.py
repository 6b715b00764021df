"""Pictures and files of images for the tests."""

import io
import struct
import zlib

import numpy as np
from hypothesis import settings
from PIL import Image

from saccade.processor.image import FORMATS, MediaLimits

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
