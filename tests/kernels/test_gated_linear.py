import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import gated_linear as module
from saccade.kernels import launch
from saccade.kernels.gated_linear import gated_linear, gated_linear_reference

SHAPES = [(1, 16, 8), (130, 72, 24), (300, 200, 136)]
"""Tokens, inputs and channels: one tile and many, none of them full."""


@pytest.fixture
def half(device):
    """The interpreter's product of bf16 is wrong."""
    return torch.bfloat16 if device == "cuda" else torch.float16


def inputs(num_tokens, num_inputs, num_channels, device, dtype, *, has_bias=True):
    x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
    weight = (torch.randn(2 * num_channels, num_inputs, device=device) * num_inputs**-0.5).to(dtype)
    return x, weight, torch.randn(2 * num_channels, device=device).to(dtype) if has_bias else None


def expect_equal(arguments, dtype):
    with torch.no_grad(), launch.forced("triton"):
        actual = gated_linear(*arguments)
    expected = gated_linear_reference(*(None if one is None else one.float() for one in arguments))
    assert_close("out", actual, expected, BOUNDS[dtype])
    return actual, expected


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_reference(shape, has_bias, device, half):
    actual, expected = expect_equal(inputs(*shape, device, half, has_bias=has_bias), half)
    with pytest.raises(AssertionError):
        assert_close("out", perturbed(actual, BOUNDS[half]), expected, BOUNDS[half])


def test_programs_that_compute_several_tiles_equal_the_reference(device, half, monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda _: 1)
    monkeypatch.setattr(module, "_GROUP", 2)
    expect_equal(inputs(520, 64, 200, device, half), half)


def test_inputs_may_be_rows_of_a_wider_tensor(device, half):
    x, weight, bias = inputs(40, 64, 16, device, half)
    wide = torch.zeros(40, 96, dtype=half, device=device)
    wide[:, 16:80] = x
    expect_equal((wide[:, 16:80], weight, bias), half)


def test_every_output_is_written_and_nothing_is_read_beyond(device, half):
    """Memory around the tokens, inputs and channels is NaN."""
    x, weight, bias = inputs(33, 40, 24, device, half)
    around = torch.full((64, 40), float("nan"), dtype=half, device=device)
    around[:33] = x
    with torch.no_grad(), launch.forced("triton"):
        out = gated_linear(around[:33], weight, bias)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("shape", [(9, 20, 8), (9, 16, 6), (0, 16, 8)], ids=["inputs", "channels", "no tokens"])
def test_what_the_kernel_does_not_take_is_computed_in_parts(shape, device, half):
    x, weight, bias = inputs(*shape, device, half)
    assert not module._can_run(x, weight, bias)
    expected = gated_linear_reference(x.float(), weight.float(), bias.float())
    with torch.no_grad():
        assert_close("out", gated_linear(x, weight, bias), expected, BOUNDS[half])


@pytest.mark.parametrize("weight", [torch.zeros(8, 15), torch.zeros(7, 16)], ids=["inputs", "no halves"])
def test_weights_that_do_not_fit_are_refused(weight):
    with pytest.raises(ValueError, match="gated_linear"):
        gated_linear(torch.zeros(3, 16), weight)


def test_gradients_pass_through_the_parts(device):
    x, weight, bias = (one.requires_grad_() for one in inputs(20, 16, 8, device, torch.float32))
    gated_linear(x, weight, bias).sum().backward()
    actual = [one.grad.clone() for one in (x, weight, bias)]
    for one in (x, weight, bias):
        one.grad = None
    gated_linear_reference(x, weight, bias).sum().backward()
    for name, got, one in zip(("dx", "dw", "db"), actual, (x, weight, bias), strict=True):
        assert_close(name, got, one.grad, BOUNDS[torch.float32])


def test_few_tokens_and_wide_inputs_are_left_to_the_library(device):
    assert not module._is_faster(torch.zeros(512, 1280, device=device))
    assert not module._is_faster(torch.zeros(4096, 2048, device=device))
    assert module._is_faster(torch.zeros(4096, 1280, device=device))
