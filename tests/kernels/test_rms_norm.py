import pytest
import torch
from closeness import BOUNDS, assert_close, compare_with_reference, perturbed

from saccade.kernels import launch
from saccade.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_quant,
    add_rms_norm_quant_reference,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_quant,
    rms_norm_quant_reference,
    rms_norm_reference,
)

EPS = 1e-6
SHAPES = [(1, 16), (7, 129), (129, 64), (3, 5, 48), (0, 32)]


def gradients(outputs, inputs, d_outputs):
    return torch.autograd.grad(outputs, inputs, [d.to(y.dtype) for d, y in zip(d_outputs, outputs, strict=True)])


def expect_equal(x, weight, dtype):
    """y, dx and dweight of the kernels against the reference in fp32; returns both."""
    return compare_with_reference(
        lambda x, w: rms_norm(x, w, EPS), lambda x, w: rms_norm_reference(x, w, EPS), (x, weight),
        ("y", "dx", "dweight"), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients_equal_the_reference(shape, device, dtype):
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    expect_equal(x, weight, dtype)


def test_strided_rows_equal_copies(device, dtype):
    wide = torch.randn(9, 3 * 48, device=device).to(dtype)
    weight = torch.randn(48, device=device).to(dtype)
    expect_equal(wide[:, 48:96], weight, dtype)
    expect_equal(wide.view(9, 3, 48).transpose(0, 1), weight, dtype)
    expect_equal(torch.randn(48, 5, device=device).to(dtype).T, weight, dtype)


def test_the_output_rounds_as_hugging_face_does(device, dtype):
    x, weight = torch.randn(5, 64, device=device).to(dtype), torch.randn(64, device=device).to(dtype)
    with launch.forced("triton"):
        y = rms_norm(x, weight, EPS)
    expected = rms_norm_reference(x, weight, EPS)
    assert (y == expected).float().mean() > (0.5 if dtype == torch.float32 else 0.99)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_with_a_residual_equals_the_reference(shape, device, dtype):
    x, residual, d_y, d_sum = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    weight = torch.randn(shape[-1], device=device).to(dtype)
    inputs = [t.detach().requires_grad_() for t in (x, residual, weight)]
    with launch.forced("triton"):
        outputs = add_rms_norm(*inputs, EPS)
        actual = (*outputs, *gradients(outputs, inputs, (d_y, d_sum)))
    # The sum is rounded to the dtype before it is normalised, also for the reference.
    total = (x + residual).float()
    inputs = [
        total.requires_grad_(),
        torch.zeros_like(total).requires_grad_(),
        weight.detach().float().requires_grad_(),
    ]
    outputs = add_rms_norm_reference(*inputs, EPS)
    expected = (*outputs, *gradients(outputs, inputs, (d_y, d_sum)))
    for name, a, e in zip(("y", "sum", "dx", "dresidual", "dweight"), actual, expected, strict=True):
        assert_close(name, a, e, BOUNDS[dtype])


def test_an_unused_sum_has_no_gradient(device):
    x, residual = (torch.randn(3, 16, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(16, device=device)
    with launch.forced("triton"):
        y, _ = add_rms_norm(x, residual, weight, EPS)
        y.sum().backward()
    expected = torch.autograd.grad(rms_norm_reference(x + residual, weight, EPS).sum(), x)[0]
    assert_close("dx", x.grad, expected, BOUNDS[torch.float32])


@pytest.mark.parametrize("eight_bits", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 129), (2, 3, 64)], ids=str)
def test_eight_bits_equal_the_norm_then_quantized(eight_bits, shape, device, dtype):
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    x.view(-1, shape[-1])[0] = 0.0
    with launch.forced("triton"):
        quantized, scale = rms_norm_quant(x, weight, EPS, eight_bits)
    expected, expected_scale = rms_norm_quant_reference(x, weight, EPS, eight_bits)
    assert quantized.dtype == eight_bits
    assert scale.dtype == torch.float32
    assert_close("scale", scale, expected_scale, BOUNDS[dtype])
    step = scale if eight_bits == torch.int8 else scale * 32  # the coarsest step of the format
    difference = (quantized.float() - expected.float()).abs() * scale.unsqueeze(-1)
    assert (difference <= step.unsqueeze(-1) * 1.01).all()
    assert (quantized.float() == expected.float()).float().mean() > 0.98


def test_eight_bits_of_a_sum_equal_the_sum_then_eight_bits(device, dtype):
    x, residual = (torch.randn(7, 129, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(129, device=device).to(dtype)
    with launch.forced("triton"):
        *actual, total = add_rms_norm_quant(x, residual, weight, EPS, torch.int8)
        expected = rms_norm_quant(x + residual, weight, EPS, torch.int8)
    assert torch.equal(total, x + residual)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    quantized, scale, total = add_rms_norm_quant_reference(x, residual, weight, EPS, torch.int8)
    assert_close("out", actual[0] * actual[1][:, None], quantized * scale[:, None], 0.02)
    assert torch.equal(total, x + residual)


def test_a_weight_of_another_size_is_refused(device):
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(torch.randn(3, 16, device=device), torch.randn(8, device=device), EPS)


def test_an_error_of_twice_the_bound_is_noticed(device, dtype):
    x, weight = torch.randn(9, 64, device=device).to(dtype), torch.randn(64, device=device).to(dtype)
    for name, a, e in zip(("y", "dx", "dweight"), *expect_equal(x, weight, dtype), strict=True):
        with pytest.raises(AssertionError, match=name):
            assert_close(name, perturbed(a, BOUNDS[dtype]), e, BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 2048), (4096, 1280), (1000, 8192), (100000, 128)], ids=str)
def test_real_shapes_equal_the_reference(shape, device, dtype):
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    expect_equal(x, weight, dtype)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_offsets_beyond_32_bits(device):
    num_rows, dim = 2**31 // 4096 + 8, 4096
    x = torch.zeros(num_rows, dim, device=device, dtype=torch.bfloat16)
    x[-8:] = torch.randn(8, dim, device=device)
    weight = torch.randn(dim, device=device, dtype=torch.bfloat16)
    d_y = torch.zeros_like(x)
    d_y[-8:] = torch.randn(8, dim, device=device)
    x.requires_grad_()
    with launch.forced("triton"):
        y = rms_norm(x, weight, EPS)
        (d_x,) = torch.autograd.grad(y, x, d_y)
        last = x[-8:].detach().requires_grad_()
        expected = rms_norm(last, weight, EPS)
        (expected_d_x,) = torch.autograd.grad(expected, last, d_y[-8:])
    assert torch.equal(y[-8:], expected)
    assert torch.equal(d_x[-8:], expected_d_x)


def test_without_gradients_a_cpu_gives_the_norm_of_the_reference():
    x, residual, weight = torch.randn(7, 129), torch.randn(7, 129), torch.randn(129)
    with torch.no_grad():
        normed, total = add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert_close("sum", normed, rms_norm_reference(total, weight, 1e-6), BOUNDS[torch.float32])
        assert_close("alone", rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), BOUNDS[torch.float32])
