import pytest
import torch
from closeness import BOUNDS, assert_close, compare_with_reference, perturbed

from saccade.kernels import launch
from saccade.kernels import swiglu as module
from saccade.kernels.quantize_activation import quantize_activation
from saccade.kernels.swiglu import (
    swiglu,
    swiglu_linear,
    swiglu_linear_reference,
    swiglu_quant,
    swiglu_quant_reference,
    swiglu_reference,
)

NAMES = ("y", "dgate", "dup")


def expect_equal(gate, up, dtype, d_y=None):
    return compare_with_reference(swiglu, swiglu_reference, (gate, up), NAMES, dtype, None if d_y is None else [d_y])


@pytest.mark.parametrize("shape", [(1,), (7, 129), (3, 5, 48), (3, 2500), (0, 16)], ids=str)
def test_forward_and_gradients_equal_the_reference(shape, device, dtype):
    expect_equal(*(torch.randn(shape, device=device).to(dtype) * 3 for _ in range(2)), dtype)


@pytest.mark.parametrize("dim", [48, 129])
def test_halves_of_a_fused_row_equal_copies(dim, device, dtype):
    gate, up = torch.randn(7, 2 * dim, device=device).to(dtype).chunk(2, dim=1)
    expect_equal(gate, up, dtype)
    expect_equal(gate.T, up.T, dtype)
    expect_equal(gate, up, dtype, d_y=torch.randn(1, dim, device=device).to(dtype).expand(7, dim))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (7, 129), (3, 5, 48)], ids=str)
def test_with_the_linear_layer_after_it_equals_the_reference(shape, has_bias, device, dtype):
    gate, up = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = (torch.randn(33, shape[-1], device=device) / shape[-1] ** 0.5).to(dtype)
    bias = torch.randn(33, device=device).to(dtype) if has_bias else None
    inputs = gate, up, weight, *([bias] if has_bias else [])
    names = ("out", "dgate", "dup", "dweight", "dbias")[: len(inputs) + 1]
    compare_with_reference(swiglu_linear, swiglu_linear_reference, inputs, names, dtype, factor=2.0)


def test_the_linear_layer_after_it_keeps_nothing_but_gate_and_up(device):
    gate, up, weight = (torch.randn(6, 16, device=device, requires_grad=True) for _ in range(3))
    kept = []
    with launch.forced("triton"), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        swiglu_linear(gate * 1.0, up * 1.0, weight)
    shapes = [tuple(x.shape) for x in kept if x.numel() > 1]
    assert len(shapes) == 3, shapes


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of exp(200), in the interpreter
def test_large_gates_saturate(device):
    gate = torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0], device=device)
    expect_equal(gate, torch.ones_like(gate), torch.float32)


def test_shapes_that_differ_are_refused(device):
    with pytest.raises(ValueError, match="do not fit"):
        swiglu(torch.randn(3, device=device), torch.randn(4, device=device))


def test_an_error_of_twice_the_bound_is_noticed(device, dtype):
    gate, up = (torch.randn(9, 64, device=device).to(dtype) for _ in range(2))
    for name, a, e in zip(NAMES, *expect_equal(gate, up, dtype), strict=True):
        with pytest.raises(AssertionError, match=name):
            assert_close(name, perturbed(a, BOUNDS[dtype]), e, BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 11008), (36864, 3420)], ids=str)
def test_real_shapes_equal_the_reference(shape, device, dtype):
    expect_equal(*(torch.randn(shape, device=device).to(dtype) for _ in range(2)), dtype)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_offsets_beyond_32_bits(device):
    gate = torch.zeros(2**31 // 4096 + 8, 4096, device=device, dtype=torch.bfloat16)
    gate[-8:] = torch.randn(8, 4096, device=device)
    with launch.forced("triton"), torch.no_grad():
        y = swiglu(gate, gate)
    assert_close("y", y[-8:], swiglu_reference(gate[-8:].float(), gate[-8:].float()), BOUNDS[torch.bfloat16])


EIGHT_BITS = pytest.mark.parametrize(
    "bits", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.gpu)], ids=["int8", "fp8"]
)


@EIGHT_BITS
@pytest.mark.parametrize("shape", [(1, 16), (7, 129), (2, 3, 300), (0, 16)], ids=str)
def test_eight_bits_equal_the_activation_then_quantized(bits, shape, device, dtype, monkeypatch):
    monkeypatch.setattr(module, "_QUANT_BLOCK", 128)  # rows that are computed twice
    gate, up = (torch.randn(shape, device=device).to(dtype) * 3 for _ in range(2))
    if len(gate):
        gate.view(-1, shape[-1])[0] = 0.0
    with launch.forced("triton"):
        quantized, scale = swiglu_quant(gate, up, bits)
        expected, expected_scale = quantize_activation(swiglu(gate, up).reshape(-1, shape[-1]), bits)
    assert quantized.dtype == bits
    assert scale.dtype == torch.float32
    assert torch.equal(quantized.view(torch.int8), expected.view(shape).view(torch.int8))
    assert torch.equal(scale, expected_scale.view(shape[:-1]))
    quantized, scale = quantized.float() * scale.unsqueeze(-1), swiglu_quant_reference(gate, up, bits)
    assert_close("reference", quantized, scale[0].float() * scale[1].unsqueeze(-1), 0.02)


def test_eight_bits_of_halves_of_a_fused_row_equal_those_of_copies(device, dtype):
    gate, up = torch.randn(7, 256, device=device).to(dtype).chunk(2, dim=1)
    with launch.forced("triton"):
        halves, copies = swiglu_quant(gate, up, torch.int8), swiglu_quant(gate.clone(), up.clone(), torch.int8)
    assert all(torch.equal(half, copy) for half, copy in zip(halves, copies, strict=True))


def test_eight_bits_of_another_kind_are_refused(device):
    with pytest.raises(ValueError, match="int16"):
        swiglu_quant(torch.ones(1, 8, device=device), torch.ones(1, 8, device=device), torch.int16)


@pytest.mark.gpu
@EIGHT_BITS
@pytest.mark.parametrize("num_tokens", [1, 256])
def test_eight_bits_of_real_sizes_equal_the_activation_then_quantized(num_tokens, bits):
    gate, up = torch.randn(num_tokens, 2 * 11008, device="cuda").bfloat16().mul(3).chunk(2, dim=1)
    with launch.forced("triton"):
        quantized, scale = swiglu_quant(gate, up, bits)
        expected, expected_scale = quantize_activation(swiglu(gate, up), bits)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(quantized.view(torch.int8), expected.view(torch.int8))
