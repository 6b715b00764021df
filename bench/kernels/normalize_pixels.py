"""Normalising the pixels of patches, at the sizes of passes of the vision encoder."""

import functools
from collections.abc import Iterator

import torch

from bench.kernels.timing import Row, Work, compare, graph_ms, main, through
from saccade.kernels.normalize_pixels import normalize_pixels, normalize_pixels_reference
from saccade.processor.inputs import normalize_patches

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PATCH_DIM = 3 * 2 * 14 * 14

_compiled_reference = torch.compile(normalize_pixels_reference, dynamic=False)


def _parts(x: torch.Tensor) -> torch.Tensor:
    return normalize_patches(x, MEAN, STD).to(torch.bfloat16)


def rows() -> Iterator[Row]:
    """The kernel, the reference compiled, and the operations of the processor."""
    options = {"pixel_mean": MEAN, "pixel_std": STD, "dtype": torch.bfloat16}
    paths = {
        "triton": functools.partial(through("triton", normalize_pixels), **options),
        "torch.compile": functools.partial(_compiled_reference, **options),
        "torch": _parts,
    }
    for num_patches in (1024, 2304, 4992):
        x = torch.randint(256, (num_patches, PATCH_DIM), dtype=torch.uint8, device="cuda")
        work = Work(num_bytes=3.0 * x.numel())
        yield from compare("normalize_pixels", f"{num_patches} patches", paths, (x,), work, clock=graph_ms)


if __name__ == "__main__":
    main(rows)
