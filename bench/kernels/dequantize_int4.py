"""Dequantizing 4-bit weights at the shapes of a 3B decoder: bytes of words, scales and the weight in bf16."""

from collections.abc import Iterator

from bench.kernels.quantized import LAYERS, quantized, random_weight
from bench.kernels.timing import Row, Work, compare, main, through
from saccade.kernels.dequantize_int4 import dequantize_int4, dequantize_int4_reference


def rows() -> Iterator[Row]:
    """Every layer, groups of 128 inputs."""
    paths = {"triton": through("triton", dequantize_int4), "reference": dequantize_int4_reference}
    for layer, (num_outputs, num_inputs) in LAYERS.items():
        weight = random_weight(layer)
        words, scale = quantized("int4", weight)
        work = Work(words.nbytes + scale.nbytes + weight.nbytes)
        runs = {name: lambda words, scale, run=run: run(words, scale, None, scale.dtype) for name, run in paths.items()}
        yield from compare("dequantize_int4", f"{layer} {num_inputs} -> {num_outputs}", runs, (words, scale), work)


if __name__ == "__main__":
    main(rows)
