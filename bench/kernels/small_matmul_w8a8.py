"""Linear layers in int8 and fp8 for one or two tokens, with bf16 for comparison; `--tune` sweeps the tiles."""

from collections.abc import Iterator
from functools import partial

from bench.kernels.quantized import EIGHT_BITS, FEW_TOKENS, layer_rows, tuned, vector_tiles
from bench.kernels.timing import Row, main
from saccade.kernels import small_matmul_w8a8 as module

TILES = {False: ((4, 2), (4, 4), (8, 2), (8, 4), (16, 4)), True: ((4, 2), (4, 4), (8, 2), (8, 4), (8, 8))}


def rows() -> Iterator[Row]:
    """One and two tokens."""
    return layer_rows(tuple(EIGHT_BITS), FEW_TOKENS)


def tune() -> Iterator[Row]:
    """Tiles for one and two tokens."""
    return tuned(tuple(EIGHT_BITS), FEW_TOKENS, module._TILES, partial(vector_tiles, tiles=TILES))


if __name__ == "__main__":
    main(rows, tune)
