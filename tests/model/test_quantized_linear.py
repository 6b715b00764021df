"""Quantized projections compute the same with norm and activation in their kernels as with both before them."""

import pytest
import torch
from torch import nn

from saccade.kernels import launch
from saccade.kernels.swiglu import swiglu
from saccade.model.layers import RMSNorm
from saccade.model.linear import Linear
from saccade.model.quantization import StoredScheme
from saccade.model.quantized_linear import quantized_form
from saccade.model.weight_rounding import quantize_weight, quantize_weight_int4

IS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if IS_GPU else ("cpu", torch.float32)
BOUNDS = {"int8": 1e-2, "fp8": 3e-2, "int4": 1e-2 if IS_GPU else 5e-4}
"""A value on the boundary between two of 8 bits may be rounded to either."""
# Triton's interpreter loses the carry when it rounds to fp8.
CASES = [("int8", "triton"), ("int8", None), ("int4", "triton"), ("int4", None), ("fp8", "triton" if IS_GPU else None)]


def projection(form, num_inputs, num_outputs):
    plain = Linear(num_inputs, num_outputs).to(DEVICE, DTYPE)
    quantized = quantized_form(plain, StoredScheme(form, group_size=128 if form == "int4" else None))
    weight = plain.weight.detach()
    if form == "int4":
        packed, scale, _ = quantize_weight_int4(weight, 128)
        tensors = {"weight_packed": packed, "weight_scale": scale}
    else:
        values, scale = quantize_weight(weight, torch.int8 if form == "int8" else torch.float8_e4m3fn)
        tensors = {"weight": values, "weight_scale": scale}
    for name, tensor in (tensors | {"bias": plain.bias.detach()}).items():
        quantized.load_tensor(name, tensor, DTYPE)
    return quantized


def assert_close(actual, expected, bound):
    error = (actual.float() - expected.float()).square().mean() / expected.float().square().mean()
    assert error.sqrt() <= bound


@pytest.fixture(params=CASES, ids=str)
def case(request):
    torch.manual_seed(0)
    form, path = request.param
    with torch.no_grad(), launch.forced(path) if path else torch.no_grad():
        yield form


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("has_residual", [True, False])
def test_the_norm_of_a_sum_is_the_same_left_to_a_quantized_projection(case, has_residual, num_rows):
    norm, quantized = RMSNorm(256, 1e-6).to(DEVICE, DTYPE), projection(case, 256, 24)
    nn.init.normal_(norm.weight)
    x = torch.randn(num_rows, 256, device=DEVICE, dtype=DTYPE)
    residual = torch.randn_like(x) if has_residual else None
    left, computed = norm.add_norm(x, residual), norm.add_norm(x, residual)
    actual = quantized(left.input)
    assert_close(actual, quantized(computed.normed), BOUNDS[case])
    assert torch.equal(left.total, computed.total)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_gated_activation_is_the_same_left_to_a_quantized_projection(case, num_rows):
    quantized = projection(case, 256, 24)
    gate, up = torch.randn(num_rows, 512, device=DEVICE, dtype=DTYPE).chunk(2, dim=1)
    assert_close(quantized.gated(gate, up), quantized(swiglu(gate, up)), BOUNDS[case])
