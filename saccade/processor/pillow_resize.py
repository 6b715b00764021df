"""Pillow's bicubic resize, bit-identical to Hugging Face's processor, with several threads for a large image.

Pillow makes two passes, each over one axis, and clips colours between them. A pass over strips of an image gives the
same pixels as one over the whole image, so threads compute the strips of a pass. (A strip cannot go through both
passes: whether Pillow begins with rows or columns depends on the shape.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
"""[height, width, 3] RGB."""

_MIN_PARALLEL_PIXELS = 2**19
"""Pixels from which threads are used: smaller images take less than 10 ms."""
_MAX_THREADS = 4
_PILLOW_MAJOR = int(PIL.__version__.partition(".")[0])


def pillow_resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Bicubic, antialiased when shrinking."""
    num_strips = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    if num_strips == 1 or pixels.shape[0] * pixels.shape[1] < _MIN_PARALLEL_PIXELS:
        return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    return resize_in_strips(pixels, height, width, num_strips)


def resize_in_strips(pixels: Pixels, height: int, width: int, num_strips: int) -> Pixels:
    """`pillow_resize` by `num_strips` threads."""
    old_height, old_width = pixels.shape[:2]
    if rows_first(old_height, old_width, height, width):
        return _resize_columns(_resize_rows(pixels, height, num_strips), width, num_strips)
    return _resize_rows(_resize_columns(pixels, width, num_strips), height, num_strips)


def rows_first(height: int, width: int, new_height: int, new_width: int) -> bool:
    """Whether Pillow makes the vertical pass first.

    Colours are clipped between the passes: on hard edges the other order differs by up to 31 of 255.
    """
    return _PILLOW_MAJOR >= 13 and new_height < height and height - new_height > 2 * (width - new_width)


def _resize_columns(pixels: Pixels, new_width: int, num_strips: int) -> Pixels:
    """The horizontal pass, over strips of rows."""
    height, width = pixels.shape[:2]
    if width == new_width:
        return pixels
    out = np.empty((height, new_width, 3), dtype=np.uint8)

    def resize(start: int, end: int) -> None:
        strip = Image.fromarray(pixels[start:end])  # with `box` instead, Pillow would make both passes
        out[start:end] = np.asarray(strip.resize((new_width, end - start), Image.Resampling.BICUBIC))

    _for_strips(resize, height, num_strips)
    return out


def _resize_rows(pixels: Pixels, new_height: int, num_strips: int) -> Pixels:
    """The vertical pass, over strips of columns."""
    height, width = pixels.shape[:2]
    if height == new_height:
        return pixels
    out = np.empty((new_height, width, 3), dtype=np.uint8)

    def resize(start: int, end: int) -> None:
        strip = Image.fromarray(np.ascontiguousarray(pixels[:, start:end]))
        out[:, start:end] = np.asarray(strip.resize((end - start, new_height), Image.Resampling.BICUBIC))

    _for_strips(resize, width, num_strips)
    return out


def _for_strips(resize: Callable[[int, int], None], length: int, num_strips: int) -> None:
    num_strips = min(num_strips, length)
    bounds = pairwise([length * index // num_strips for index in range(num_strips + 1)])
    for done in [_threads(os.getpid()).submit(resize, *bound) for bound in bounds]:
        done.result()


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """The threads of this process: a forked process has the object, but not the threads."""
    return ThreadPoolExecutor(_MAX_THREADS, f"saccade-resize-{pid}")
