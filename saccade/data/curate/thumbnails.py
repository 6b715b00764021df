"""Small pictures of images, to find copies by and to verify them with.

    bytes  ->  32x32 RGB  ->  thumbnail: 32x32 luma, 8x8 chroma (1,152 bytes)

`image_search.py` finds likely copies among any number of thumbnails, `image_match.py` aligns two and decides.
`descriptors` are unit vectors of 63 low DCT coefficients, for comparing every image of one set with every image of
another, where overlays count too.
"""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image

from saccade.processor.image import MediaLimits, load_image

SIDE = 32
"""Side of the small image that all features are computed from."""
THUMBNAIL_BYTES = SIDE * SIDE + 2 * 8 * 8

_LOWEST = 8  # DCT coefficients per axis of a descriptor
_FLAT = 30.0  # norm of the descriptor of an image without structure: its cosine with anything is near zero
_DECODED_SIDE = 64  # JPEGs are decoded at the smallest scale that leaves both sides this long


def small_picture(data: bytes, limits: MediaLimits) -> NDArray[np.uint8]:
    """[32, 32, 3] from an encoded image.

    Raises `ImageError` as `load_image` does: truncated, animated, over the limits.

    A JPEG is decoded at reduced scale (2.5 times as fast at 1024 pixels). All its data is read, so a truncated one is
    found as in a full decode.
    """
    reduced = _decode_reduced(data, limits)
    if reduced is not None:
        pixels, box = reduced
        return _shrink(pixels, box)
    pixels = load_image(data, limits)
    return _shrink(pixels, (0, 0, pixels.shape[1], pixels.shape[0]))


def _shrink(pixels: NDArray[np.uint8], box: tuple[float, float, float, float]) -> NDArray[np.uint8]:
    """Resize with a triangle filter, whose weights vary smoothly with the size.

    Copies differ half as much as with a box filter.
    """
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0))


def _decode_reduced(
    data: bytes, limits: MediaLimits
) -> tuple[NDArray[np.uint8], tuple[float, float, float, float]] | None:
    """Pixels at reduced scale and the part of them that the image covers; None if only `load_image` can decode it."""
    if not data.startswith(b"\xff\xd8") or len(data) > limits.max_bytes:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        longer, shorter = max(width, height), min(width, height)
        is_allowed = width * height <= limits.max_pixels and longer <= limits.max_side
        if not is_allowed or longer > limits.max_aspect_ratio * shorter or colours == "CMYK" or _is_rotated(data):
            return None
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=_DECODED_SIDE, min_width=_DECODED_SIDE, strict=True)
    except ValueError:
        return None
    # The decoder rounds the reduced size up to whole pixels; the image ends within the last one.
    scale = round(8 * pixels.shape[1] / width) / 8
    return pixels, (0, 0, min(width * scale, pixels.shape[1]), min(height * scale, pixels.shape[0]))


def _is_rotated(data: bytes) -> bool:
    """Whether EXIF or XMP asks for a rotation, or cannot be read."""
    if b"Exif\0\0" not in data and b"http://ns.adobe.com/xap/" not in data:
        return False
    try:
        exif = Image.open(io.BytesIO(data), formats=("JPEG",)).getexif()
        return bool(exif.get(ExifTags.Base.Orientation, 1) != 1)
    except Exception:  # hostile bytes reach deep into Pillow
        return True


# ------------------------------------------------------------------ features of many small images at once


def thumbnails(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, 1152] from [n, 32, 32, 3]: 32x32 luma, then 8x8 of both colour differences around 128."""
    num = len(pictures)
    luma = _luma(pictures)
    blue = (pictures[..., 2] - luma) * 0.564
    red = (pictures[..., 0] - luma) * 0.713
    colours = 128 + np.stack([blue, red], axis=1).reshape(num, 2, 8, 4, 8, 4).mean((3, 5)).reshape(num, 128)
    flat = np.concatenate([luma.reshape(num, SIDE * SIDE), colours], axis=1)
    return np.asarray(flat.round().clip(0, 255), np.uint8)


def split_thumbnails(thumbnails: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Luma [n, 32, 32] and colour differences [n, 2, 8, 8] around 0."""
    num, values = len(thumbnails), thumbnails.astype(np.float32)
    return values[:, : SIDE * SIDE].reshape(num, SIDE, SIDE), values[:, SIDE * SIDE :].reshape(num, 2, 8, 8) - 128


def descriptors(luma: NDArray[np.float32], centre: float = 1.0) -> NDArray[np.float32]:
    """[n, 63] unit vectors from the central part of [n, 32, 32]; shorter for an image without structure."""
    matrix = dct_matrix(_LOWEST) @ _crop_matrix(centre)
    vectors = (matrix @ luma @ matrix.T).reshape(len(luma), -1)[:, 1:]
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _FLAT), np.float32)


def _luma(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    return pictures.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)


@cache
def dct_matrix(num_rows: int) -> NDArray[np.float32]:
    """[rows, 32]: the first rows of the orthonormal DCT."""
    row, column = np.arange(num_rows)[:, None], np.arange(SIDE)[None]
    matrix = np.cos(np.pi * (2 * column + 1) * row / (2 * SIDE)) * np.sqrt(2 / SIDE)
    matrix[0] /= np.sqrt(2)
    return np.asarray(matrix, np.float32)


@cache
def _crop_matrix(centre: float) -> NDArray[np.float32]:
    """[32, 32]: linear interpolation of the central part of a line."""
    positions = ((np.arange(SIDE) * 2 + 1) / SIDE - 1) * centre * (SIDE / 2) + (SIDE - 1) / 2
    return np.asarray(np.maximum(0, 1 - np.abs(positions[:, None] - np.arange(SIDE))), np.float32)
