import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import launch
from saccade.kernels import small_linear_w4a16 as module
from saccade.kernels._few_tokens import MAX_TOKENS, VectorTiles, max_tokens
from saccade.kernels.dequantize_int4 import interleave_int4
from saccade.kernels.linear_w4a16 import linear_w4a16
from saccade.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from saccade.kernels.small_linear_w4a16 import (
    Weight4bit,
    norm_gated_linear_w4a16,
    norm_gated_linear_w4a16_reference,
    norm_linear_w4a16,
    norm_linear_w4a16_reference,
    small_linear_w4a16,
    small_linear_w4a16_reference,
)
from saccade.kernels.swiglu import swiglu_reference
from saccade.model.weight_rounding import quantize_weight_int4

EPS = 1e-6
FOUR_BITS = {**BOUNDS, torch.float32: 5e-4}
"""A nibble in the mantissa of 2^11 costs fp32 sums 9 bits or more; only tests give fp32 tokens to this kernel."""
# Outputs, inputs: one of everything, odd outputs, several tiles the last of which is partly empty.
SHAPES = [(1, 128), (37, 256), (9, 2176)]


def four_bit_weight(shape, device, dtype, group_size=128, symmetric=True, has_bias=True):
    num_outputs, num_inputs = shape
    weight = (torch.randn(shape, device=device) / num_inputs**0.5).to(dtype)
    packed, scale, zero = quantize_weight_int4(weight, group_size, symmetric=symmetric)
    bias = torch.randn(num_outputs, device=device).to(dtype) if has_bias else None
    return Weight4bit(interleave_int4(packed), scale, zero, bias)


def rows(num_tokens, num_inputs, device, dtype):
    return torch.randn(num_tokens, num_inputs, device=device).to(dtype)


@pytest.fixture
def tiles(monkeypatch):
    """One warp a program, so that small shapes have several tiles."""
    monkeypatch.setattr(module, "_TILES", {key: VectorTiles(block_n=4, num_warps=1) for key in module._TILES})


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_four_bit_products_of_few_tokens_equal_the_reference(shape, num_tokens, symmetric, device, dtype, tiles):
    x, weight = rows(num_tokens, shape[1], device, dtype), four_bit_weight(shape, device, dtype, symmetric=symmetric)
    with launch.forced("triton"):
        actual = small_linear_w4a16(x, weight)
    assert actual.dtype == dtype
    assert_close("out", actual, small_linear_w4a16_reference(x.float(), weight), FOUR_BITS[dtype])


@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_in_the_four_bit_product_equals_one_before_it(shape, num_tokens, has_residual, device, dtype, tiles):
    x, residual = (rows(num_tokens, shape[1], device, dtype) * 3 for _ in range(2))
    norm_weight = (1 + 0.2 * torch.randn(shape[1], device=device)).to(dtype)
    weight = four_bit_weight(shape, device, dtype, has_bias=has_residual)
    with launch.forced("triton"):
        actual, total = norm_linear_w4a16(x, residual if has_residual else None, norm_weight, EPS, weight)
    assert torch.equal(total, x + residual if has_residual else x)
    expected = small_linear_w4a16_reference(rms_norm_reference(total, norm_weight, EPS).float(), weight)
    assert_close("out", actual, expected, FOUR_BITS[dtype])


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("shape", [(2, 128), (38, 256), (10, 2176)], ids=str)
def test_a_gated_activation_in_the_four_bit_product_equals_one_after_it(shape, num_tokens, device, dtype, tiles):
    x, residual = (rows(num_tokens, shape[1], device, dtype) for _ in range(2))
    norm_weight = (1 + 0.2 * torch.randn(shape[1], device=device)).to(dtype)
    weight = four_bit_weight(shape, device, dtype)
    with launch.forced("triton"):
        actual, total = norm_gated_linear_w4a16(x, residual, norm_weight, EPS, weight)
    assert torch.equal(total, x + residual)
    gate_up = small_linear_w4a16_reference(rms_norm_reference(total, norm_weight, EPS).float(), weight)
    expected = swiglu_reference(*gate_up.to(dtype).float().chunk(2, dim=1))  # gate and up are rounded as outputs are
    assert_close("out", actual, expected, 3 * FOUR_BITS[dtype])


def test_what_the_kernels_do_not_support_runs_in_parts(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for num_tokens, group_size in ((MAX_TOKENS + 1, 128), (1, 64), (0, 128)):
        weight = four_bit_weight((16, 256), device, dtype, group_size)
        x, residual = (rows(num_tokens, 256, device, dtype) for _ in range(2))
        norm_weight = torch.ones(256, device=device, dtype=dtype)
        with launch.forced("triton"):
            assert torch.equal(small_linear_w4a16(x, weight), linear_w4a16(x, *weight))
            actual, total = norm_linear_w4a16(x, residual, norm_weight, EPS, weight)
            gated, _ = norm_gated_linear_w4a16(x, residual, norm_weight, EPS, weight)
        expected, expected_total = norm_linear_w4a16_reference(x, residual, norm_weight, EPS, weight)
        assert torch.equal(total, expected_total)
        assert_close("normed", actual, expected.float(), 2 * BOUNDS[dtype])
        expected, _ = norm_gated_linear_w4a16_reference(x, residual, norm_weight, EPS, weight)
        assert_close("gated", gated, expected.float(), 3 * BOUNDS[dtype])


@pytest.mark.parametrize("shape", [(2560, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_every_layer_of_one_token_in_4_bits_is_for_the_fused_kernel_and_none_of_three(shape):
    assert max_tokens(torch.int32, *shape, is_fused=True) == 1
    assert max_tokens(torch.int32, *shape) <= MAX_TOKENS


def test_what_does_not_fit_is_refused(device):
    weight = four_bit_weight((8, 256), device, torch.float32)
    x = torch.zeros(1, 256, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        norm_linear_w4a16(x, x[:, :128], torch.ones(256, device=device), EPS, weight)
    with pytest.raises(ValueError, match="do not fit"):
        norm_gated_linear_w4a16(x, x[:, :128], torch.ones(256, device=device), EPS, weight)
    odd = four_bit_weight((7, 256), device, torch.float32)
    with pytest.raises(ValueError, match="no halves"):
        norm_gated_linear_w4a16(x, x, torch.ones(256, device=device), EPS, odd)
    with pytest.raises(ValueError, match="do not fit"):
        small_linear_w4a16(x[:, :128], weight)


def test_a_result_off_by_twice_the_bound_is_refused(device, dtype):
    x, weight = rows(1, 256, device, dtype), four_bit_weight((40, 256), device, dtype)
    with launch.forced("triton"):
        actual = small_linear_w4a16(x, weight)
    expected, bound = small_linear_w4a16_reference(x.float(), weight), FOUR_BITS[dtype]
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close("y", perturbed(actual, bound), expected, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("shape", [(2560, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_real_sizes_equal_the_references(shape, num_tokens):
    dtype = torch.bfloat16
    x, residual = (rows(num_tokens, shape[1], "cuda", dtype) for _ in range(2))
    weight = four_bit_weight(shape, "cuda", dtype)
    norm_weight = torch.rand(shape[1], device="cuda").to(dtype)
    with launch.forced("triton"):
        assert_close(
            "plain", small_linear_w4a16(x, weight), small_linear_w4a16_reference(x.float(), weight), BOUNDS[dtype]
        )
        gated, _ = norm_gated_linear_w4a16(x, residual, norm_weight, EPS, weight)
        normed, total = norm_linear_w4a16(x, residual, norm_weight, EPS, weight)
    rounded, expected_total = add_rms_norm_reference(x, residual, norm_weight, EPS)
    assert torch.equal(total, expected_total)
    gate_up = small_linear_w4a16_reference(rounded.float(), weight)
    assert_close("normed", normed, gate_up, BOUNDS[dtype])
    expected = swiglu_reference(*gate_up.to(dtype).float().chunk(2, dim=1))
    assert_close("gated", gated, expected, 3 * BOUNDS[dtype])


@pytest.mark.gpu
def test_a_captured_chain_of_layers_replays_the_same():
    """Each kernel starts before the previous one has ended; its inputs must be complete when it reads them."""
    dtype, size = torch.bfloat16, 2048
    weights = [four_bit_weight((2 * size, size), "cuda", dtype, has_bias=False) for _ in range(8)]
    norm_weight, x = torch.ones(size, device="cuda", dtype=dtype), rows(1, size, "cuda", dtype)

    def chain():
        update, total = torch.zeros_like(x), x
        for weight in weights:
            update, total = norm_gated_linear_w4a16(update, total, norm_weight, EPS, weight)
            update = small_linear_w4a16(update, weight)[:, :size]
        return update + total

    with torch.no_grad(), launch.forced("triton"):
        expected = chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [chain() for _ in range(3)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(result, expected) for result in captured)
