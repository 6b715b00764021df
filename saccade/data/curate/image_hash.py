"""What is remembered of an image's pixels: a hash to find its copies by, a thumbnail to be sure by.

    bytes  ->  32x32 RGB  ->  signs of 255 low DCT coefficients (32 bytes)  +  16x16 luma and 8x8 chroma (384 bytes)

Two images are near-duplicates when one is the other resized or encoded anew: their hashes share a band of 25 bits, differ in
few bits, and their thumbnails agree cell by cell. The hash alone takes one chart for another of the same layout, or a product
for its twin in another colour; the thumbnail does not. What differs in small print alone (bars of equal heights, other numbers
beside them) is told apart by neither: of 1.1 million pairs of charts four pass.
"""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image

from saccade.processor.image import MediaLimits, load_image

HASH_BYTES = 32
THUMBNAIL_BYTES = 16 * 16 + 2 * 8 * 8
NUM_BANDS = 10
BAND_BITS = 25
"""On 8,000 photos 10 bands of 25 bits find every copy of scale 0.5-0.9 and quality 40-90 (8 of 32: 99.9 %, 5 of 48: 97.6 %)."""

_SIDE = 32  # of the small picture all features are made from
_LOW = 16  # DCT coefficients per axis that are kept
_SILENT = 3.0  # grey levels: what is below may be noise of the encoder. At 2 copies of blurred images are lost, at 4 pages of text meet
_DECODED_SIDE = 64  # JPEGs are decoded at the smallest scale that leaves both sides this long
_CHUNK = 2**16  # thumbnails compared at a time
_MAX_MEAN, _MAX_CELL, _MAX_CHROMA = 3.0, 16.0, 8.0  # measured on copies: 99.9 % stay below 1.7, 12.5 and 3.4


def small_picture(data: bytes, limits: MediaLimits) -> NDArray[np.uint8]:
    """[32, 32, 3] of an encoded image. `ImageError` where `load_image` refuses it: truncated, animated, over the limits.

    A JPEG is decoded at reduced scale (2.5 times as fast at 1024 pixels): all its data is read, so a truncated one is
    found as in a full decode.
    """
    reduced = _decode_reduced(data, limits)
    if reduced is not None:
        pixels, box = reduced
        return _shrink(pixels, box)
    pixels = load_image(data, limits)
    return _shrink(pixels, (0, 0, pixels.shape[1], pixels.shape[0]))


def _shrink(pixels: NDArray[np.uint8], box: tuple[float, float, float, float]) -> NDArray[np.uint8]:
    """A triangle filter: its weights move smoothly with the size, unlike those of a box (half the bit errors on copies)."""
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0))


def _decode_reduced(
    data: bytes, limits: MediaLimits
) -> tuple[NDArray[np.uint8], tuple[float, float, float, float]] | None:
    """Pixels at reduced scale and the part of them the image covers; None for what only `load_image` can judge."""
    if not data.startswith(b"\xff\xd8") or len(data) > limits.max_bytes:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        longer, shorter = max(width, height), min(width, height)
        is_allowed = width * height <= limits.max_pixels and longer <= limits.max_side
        if not is_allowed or longer > limits.max_aspect_ratio * shorter or colours == "CMYK" or _is_turned(data):
            return None
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=_DECODED_SIDE, min_width=_DECODED_SIDE, strict=True)
    except ValueError:
        return None
    # The decoder rounds the reduced size up to whole pixels; the image ends within the last one.
    scale = round(8 * pixels.shape[1] / width) / 8
    return pixels, (0, 0, min(width * scale, pixels.shape[1]), min(height * scale, pixels.shape[0]))


def _is_turned(data: bytes) -> bool:
    """Whether EXIF or XMP asks for a turn, or cannot be read."""
    if b"Exif\0\0" not in data and b"http://ns.adobe.com/xap/" not in data:
        return False
    try:
        exif = Image.open(io.BytesIO(data), formats=("JPEG",)).getexif()
        return bool(exif.get(ExifTags.Base.Orientation, 1) != 1)
    except Exception:  # hostile bytes reach deep into Pillow
        return True


# ------------------------------------------------------------------ features of many small pictures at once


def perceptual_hashes(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, 32] from [n, 32, 32, 3]: the signs of the 255 lowest coefficients, from coarse to fine, and one bit unused."""
    matrix, order = _dct_matrix(), _coarse_to_fine()
    coefficients = (matrix @ _luma(pictures) @ matrix.T).reshape(len(pictures), _LOW * _LOW)
    return np.ascontiguousarray(np.packbits(coefficients[:, order] > _SILENT, axis=1))


def thumbnails(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, 384] from [n, 32, 32, 3]: 16x16 luma, then 8x8 of both colour differences around 128."""
    num = len(pictures)
    luma = _luma(pictures)
    blue = (pictures[..., 2] - luma) * 0.564
    red = (pictures[..., 0] - luma) * 0.713
    cells = luma.reshape(num, 16, 2, 16, 2).mean((2, 4)).reshape(num, 256)
    colours = 128 + np.stack([blue, red], axis=1).reshape(num, 2, 8, 4, 8, 4).mean((3, 5)).reshape(num, 128)
    return np.concatenate([cells, colours], axis=1).round().clip(0, 255).astype(np.uint8)


def band_keys(hashes: NDArray[np.uint8], band: int) -> NDArray[np.uint32]:
    """[n]: the bits of one band. Copies agree in at least one of the bands; the first holds the coarsest structure."""
    byte, bit = divmod(band * BAND_BITS, 8)
    window = np.ascontiguousarray(hashes[:, byte : byte + 4]).view(">u4").reshape(-1).astype(np.uint32)
    return (window >> np.uint32(32 - BAND_BITS - bit)) & np.uint32(2**BAND_BITS - 1)


def hash_distances(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> NDArray[np.int64]:
    """[n] bits in which [n, 32] hashes differ."""
    differing: NDArray[np.uint8] = np.bitwise_count(one.view(np.uint64) ^ other.view(np.uint64))
    return np.asarray(differing.sum(axis=1, dtype=np.int64))


def thumbnails_agree(
    thumbnails: NDArray[np.uint8], one: NDArray[np.int64], other: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether thumbnails `one[i]` and `other[i]` differ by no more than an encoder's noise, on the whole and in every cell."""
    agree = np.zeros(len(one), bool)
    for begin in range(0, len(one), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        difference = np.abs(thumbnails[one[part]].astype(np.int16) - thumbnails[other[part]])
        luma, chroma = difference[:, : 16 * 16], difference[:, 16 * 16 :]
        agree[part] = (luma.mean(1) <= _MAX_MEAN) & (luma.max(1) <= _MAX_CELL) & (chroma.max(1) <= _MAX_CHROMA)
    return agree


def _luma(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    return pictures.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)


@cache
def _dct_matrix() -> NDArray[np.float32]:
    """[16, 32]: the first rows of the orthonormal DCT."""
    row, column = np.arange(_LOW)[:, None], np.arange(_SIDE)[None]
    matrix = np.cos(np.pi * (2 * column + 1) * row / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    matrix[0] /= np.sqrt(2)
    return np.asarray(matrix, np.float32)


@cache
def _coarse_to_fine() -> NDArray[np.int64]:
    """Coefficients by diagonal, the mean left out."""
    cells = sorted((row + column, row, column) for row in range(_LOW) for column in range(_LOW))
    return np.array([row * _LOW + column for _, row, column in cells[1:]])
