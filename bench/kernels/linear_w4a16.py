"""4-bit linear layers for four tokens and more, with bf16 for comparison; `--tune` sweeps the tiles."""

from collections.abc import Iterator

from bench.kernels.quantized import MANY_TOKENS, Case, layer_rows, split_tiles, tuned
from bench.kernels.timing import Row, main
from saccade.kernels import linear_w4a16 as module

TILES = {
    16: ((64, 128, 4, 6), (64, 128, 4, 4), (128, 128, 4, 5), (128, 128, 8, 5)),
    32: ((64, 128, 4, 5), (128, 128, 4, 5), (128, 128, 8, 5)),
    64: ((64, 128, 4, 4), (128, 128, 8, 4), (128, 128, 4, 4), (256, 128, 8, 3)),
}


def rows() -> Iterator[Row]:
    """Four tokens and more."""
    return layer_rows(("int4",), MANY_TOKENS)


def tune() -> Iterator[Row]:
    """Tiles for 8 to 64 tokens."""

    def entries(case: Case) -> Iterator[dict[bool, object]]:
        return ({is_wide: {2**62: one} for is_wide in (False, True)} for one in split_tiles(case, TILES))

    return tuned(("int4",), (8, 16, 32, 64), module._TILES, entries)


if __name__ == "__main__":
    main(rows, tune)
