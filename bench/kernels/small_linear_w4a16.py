"""4-bit linear layers for one or two tokens, with bf16 for comparison; `--tune` sweeps the tiles."""

from collections.abc import Iterator
from functools import partial

from bench.kernels.quantized import FEW_TOKENS, layer_rows, tuned, vector_tiles
from bench.kernels.timing import Row, main
from saccade.kernels import small_linear_w4a16 as module

TILES = {False: ((2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (16, 2)), True: ((4, 2), (4, 4), (8, 2), (8, 4), (16, 4))}


def rows() -> Iterator[Row]:
    """One and two tokens."""
    return layer_rows(("int4",), FEW_TOKENS)


def tune() -> Iterator[Row]:
    """Tiles for one and two tokens."""
    return tuned(("int4",), FEW_TOKENS, module._TILES, partial(vector_tiles, tiles=TILES))


if __name__ == "__main__":
    main(rows, tune)
