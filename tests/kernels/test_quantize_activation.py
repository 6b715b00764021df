import pytest
import torch
from closeness import assert_close
from kernels.quantized import EIGHT_BITS

from saccade.kernels import launch
from saccade.kernels.quantize_activation import quantize_activation, quantize_activation_reference


@EIGHT_BITS
def test_tokens_are_rounded_as_compressed_tensors_rounds_them(bits):
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = QuantizationArgs(
        num_bits=8, type="int" if bits == torch.int8 else "float", strategy="token", dynamic=True, symmetric=True
    )
    x = torch.randn(64, 40)
    scale, zero_point = compute_dynamic_scales_and_zp(x[None], args, module=None)
    theirs = forward.quantize(x[None], scale, zero_point, args, dtype=bits)[0]
    values, scale_T = quantize_activation_reference(x, bits)
    assert torch.equal(scale_T, scale.flatten())
    assert torch.equal(values.float(), theirs.float())
    assert bits != torch.int8 or {int(values.min()), int(values.max())} == {-128, 127}


@EIGHT_BITS
@pytest.mark.parametrize("shape", [(1, 16), (7, 129), (3, 9000)], ids=str)
def test_quantized_tokens_equal_the_reference(shape, bits, device, dtype):
    if bits == torch.float8_e4m3fn and device == "cpu":
        pytest.skip("Triton's interpreter loses the carry when it rounds to fp8")
    x = torch.randn(shape, device=device).to(dtype)
    x[0] = 0
    with launch.forced("triton"):
        values, scale = quantize_activation(x, bits)
    expected_values, expected_scale = quantize_activation_reference(x, bits)
    assert_close("scale", scale, expected_scale, 1e-6)
    # Quotients on the boundary between two values may be rounded to either.
    assert (values.float() != expected_values.float()).float().mean() < 1e-3
    assert_close("values", values.float(), expected_values.float(), 1e-3)
