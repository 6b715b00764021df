"""Quantized linear layers for one or two tokens: the sweep of their tiles is part of `bench.kernels.quant_linear --sweep`."""

from bench.kernels.quant_linear import main

if __name__ == "__main__":
    main()
