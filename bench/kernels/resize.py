"""Pillow's bicubic resize of one image, L2 cold; `--tune` sweeps the launch settings."""

import functools
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, gpu_ms, main, sweep, through
from saccade.kernels import resize as module
from saccade.kernels.resize import resize, resize_reference, resize_weights

Size = tuple[int, int]
SIZES: tuple[tuple[Size, Size], ...] = (((1288, 952), (1148, 840)), ((672, 1000), (672, 980)))
"""(width, height) before and after: a photo in both dims, and one pass."""

_compiled = torch.compile(module._weighted_sum, dynamic=False)


def inputs(old: Size) -> tuple[Tensor]:
    """Noise."""
    width, height = old
    return (torch.randint(256, (height, width, 3), dtype=torch.uint8, device="cuda"),)


def work(old: Size, new: Size) -> Work:
    """Each pass reads its input once and writes its output once; columns come first for these sizes."""
    (width, height), (new_width, new_height) = old, new
    horizontal = (width + new_width) * height * 3 if width != new_width else 0
    vertical = (height + new_height) * new_width * 3 if height != new_height else 0
    return Work(horizontal + vertical)


def compiled(old: Size, new: Size) -> Callable[[Tensor], Tensor]:
    """The reference in torch.compile, with weights on the device: it cannot trace how they are made."""
    passes = [(dim, *_weights(old[1 - dim], new[1 - dim])) for dim in (1, 0) if old[1 - dim] != new[1 - dim]]

    def run(pixels: Tensor) -> Tensor:
        for dim, first, weights in passes:
            pixels = _compiled(pixels, dim, first, weights)
        return pixels

    return run


def _weights(old: int, new: int) -> list[Tensor]:
    return [torch.tensor(values, device="cuda") for values in resize_weights(old, new)]


def rows() -> Iterator[Row]:
    """Every size of `SIZES`."""
    for old, new in SIZES:
        size = {"height": new[1], "width": new[0], "rows_first": False}
        paths = {
            "triton": through("triton", resize, **size),
            "torch": functools.partial(resize_reference, **size),
            "torch.compile": compiled(old, new),
        }
        yield from compare("resize", _shape(old, new), paths, inputs(old), work(old, new))


def tune() -> Iterator[Row]:
    """Launch settings for the first of `SIZES`."""
    old, new = SIZES[0]
    run = through("triton", resize, height=new[1], width=new[0], rows_first=False)
    pairs = product((256, 512, 1024, 2048), (2, 4, 8))
    settings = [{"_BLOCK": block, "_NUM_WARPS": num_warps} for block, num_warps in pairs]
    shape, pixels = _shape(old, new), inputs(old)
    yield from sweep("resize", shape, run, vars(module), settings, pixels, work(old, new), clock=gpu_ms)


def _shape(old: Size, new: Size) -> str:
    return f"{old[0]}x{old[1]} to {new[0]}x{new[1]}"


if __name__ == "__main__":
    main(rows, tune)
