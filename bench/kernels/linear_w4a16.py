"""4-bit linear layers for four tokens and more, with bf16 for comparison."""

from collections.abc import Iterator

from bench.kernels.quantized import MANY_TOKENS, layer_rows
from bench.kernels.timing import Row, main


def rows() -> Iterator[Row]:
    """Four tokens and more."""
    return layer_rows(("int4",), MANY_TOKENS)


if __name__ == "__main__":
    main(rows)
