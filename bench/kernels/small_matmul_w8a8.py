"""Linear layers in int8 and fp8 for one or two tokens, with bf16 for comparison."""

from collections.abc import Iterator

from bench.kernels.quantized import FEW_TOKENS, layer_rows
from bench.kernels.timing import Row, main


def rows() -> Iterator[Row]:
    """One and two tokens."""
    return layer_rows(("int8", "fp8"), FEW_TOKENS)


if __name__ == "__main__":
    main(rows)
