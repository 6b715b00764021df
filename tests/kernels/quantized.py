"""Inputs of the kernels on quantized weights, and replays of their graphs."""

from collections.abc import Callable

import pytest
import torch

from saccade.kernels import launch
from saccade.kernels.dequantize_int4 import interleave_int4
from saccade.kernels.quantize_activation import quantize_activation_reference
from saccade.model.weight_rounding import quantize_weight, quantize_weight_int4

EIGHT_BITS = pytest.mark.parametrize("bits", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


def weights(num_outputs, num_inputs, device, dtype):
    """A weight whose outputs differ in size, and a bias."""
    weight = torch.randn(num_outputs, num_inputs, device=device) * torch.rand(num_outputs, 1, device=device)
    return weight.to(dtype), torch.randn(num_outputs, device=device).to(dtype)


def eight_bit_case(shape, bits, device, dtype):
    """The arguments of `matmul_w8a8`; the reference quantizes the tokens."""
    num_tokens, num_outputs, num_inputs = shape
    weight, bias = weights(num_outputs, num_inputs, device, dtype)
    x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
    return *quantize_activation_reference(x, bits), *quantize_weight(weight, bits), bias


def four_bits(weight, group_size, symmetric=True):
    """The interleaved words, scales and zero points of a weight."""
    packed, scale, zero = quantize_weight_int4(weight, group_size, symmetric=symmetric)
    return interleave_int4(packed), scale, zero


def expect_equal_replays(run: Callable[[], torch.Tensor]) -> None:
    """Check that three calls in one CUDA graph give the result of a plain call, in every replay."""
    with launch.forced("triton"):
        expected = run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [run() for _ in range(3)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(result, expected) for result in captured)
