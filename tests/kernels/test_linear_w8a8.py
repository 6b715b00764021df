import dataclasses

import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed
from kernels.quantized import EIGHT_BITS, eight_bit_case, expect_equal_replays, weights

from saccade.kernels import _split_linear as split_linear
from saccade.kernels import launch
from saccade.kernels import linear_w8a8 as module
from saccade.kernels.linear_w8a8 import linear_w8a8, linear_w8a8_reference, matmul_w8a8, matmul_w8a8_reference
from saccade.kernels.quantize_activation import quantize_activation_reference
from saccade.model.weight_rounding import quantize_weight

TENSOR_CORE_FP8 = 5e-4
"""Hopper's tensor cores sum fp8 products with about 14 bits; rounding to fp8 itself costs 2e-2."""
# Tokens, outputs, inputs: one of everything, odd numbers, and inputs that no tile divides.
SHAPES = [(1, 1, 16), (7, 129, 300), (1, 40, 2048), (17, 33, 64), (33, 64, 128), (65, 40, 256), (129, 130, 48)]


@EIGHT_BITS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_bit_matmul_equals_the_reference(shape, bits, device, dtype):
    case = eight_bit_case(shape, bits, device, dtype)
    for arguments in (case, case[:-1]):
        with launch.forced("triton"):
            actual = matmul_w8a8(*arguments, out_dtype=dtype)
        bound = (
            max(BOUNDS[dtype], TENSOR_CORE_FP8) if bits == torch.float8_e4m3fn and device == "cuda" else BOUNDS[dtype]
        )
        assert_close("y", actual, matmul_w8a8_reference(*arguments, out_dtype=torch.float32), bound)


@EIGHT_BITS
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_any_number_of_splits_gives_the_same_in_8_bits(num_splits, bits, device, one_dtype):
    case = eight_bit_case((7, 40, 600), bits, device, one_dtype)
    tiles = dataclasses.replace(module._W8A8_TILES[16], block_d=64)
    actual = module._matmul_w8a8_triton(*case, one_dtype, tiles, num_splits)
    assert_close("y", actual, matmul_w8a8_reference(*case, out_dtype=torch.float32), BOUNDS[one_dtype])


@EIGHT_BITS
@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_splits_may_be_added_up_by_a_second_kernel(num_splits, bits, device, one_dtype):
    case = eight_bit_case((70, 150, 600), bits, device, one_dtype)
    tiles = dataclasses.replace(module._W8A8_TILES[512], num_warps=4)
    assert tiles.stores_sums
    actual = module._matmul_w8a8_triton(*case, one_dtype, tiles, num_splits)
    assert_close("y", actual, matmul_w8a8_reference(*case, out_dtype=torch.float32), BOUNDS[one_dtype])


def test_eight_bit_linear_is_close_to_the_plain_one(device, dtype):
    weight, bias = weights(64, 512, device, dtype)
    x = torch.randn(9, 512, device=device).to(dtype)
    with launch.forced("triton"):
        actual = linear_w8a8(x, *quantize_weight(weight, torch.int8), bias)
    assert_close(
        "reference", actual, linear_w8a8_reference(x, *quantize_weight(weight, torch.int8), bias), BOUNDS[dtype]
    )
    assert_close("plain", actual, x.float() @ weight.float().T + bias.float(), 0.02)


@EIGHT_BITS
def test_a_token_of_zeros_gives_the_bias(bits, device, dtype):
    weight, bias = weights(33, 64, device, dtype)
    with launch.forced("triton"):
        actual = linear_w8a8(torch.zeros(2, 64, device=device, dtype=dtype), *quantize_weight(weight, bits), bias)
    assert torch.equal(actual, bias.expand(2, -1))


@pytest.mark.parametrize("shape", [(1, 896, 896), (7, 129, 1152), (65, 40, 100), (256, 64, 2048)], ids=str)
def test_int8_of_a_cpu_equals_the_reference(shape, dtype):
    """The CPU's own instructions are used if it has them; the largest sums do not overflow."""
    case = eight_bit_case(shape, torch.int8, "cpu", dtype)
    actual = matmul_w8a8(*case, out_dtype=dtype)
    assert actual.dtype == dtype
    assert_close("y", actual, matmul_w8a8_reference(*case, out_dtype=torch.float32), BOUNDS[dtype])
    x8, scale, weight, *rest = case
    extreme = (torch.full_like(x8, -128), scale, torch.full_like(weight, -128), *rest)
    expected = matmul_w8a8_reference(*extreme, out_dtype=torch.float32)
    assert_close("extreme", matmul_w8a8(*extreme, out_dtype=dtype), expected, BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "path"),
    [(torch.int8, "triton"), (torch.float8_e4m3fn, "triton"), (torch.float8_e4m3fn, "library")],
    ids=["int8", "fp8", "fp8 of torch"],
)
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 257, 4096])
@pytest.mark.parametrize("shape", [(2560, 2048), (2048, 11008)], ids=str)
def test_real_sizes_equal_the_reference_in_8_bits(shape, num_tokens, bits, path):
    case = eight_bit_case((num_tokens, *shape), bits, "cuda", torch.bfloat16)
    with launch.forced(path):
        actual = matmul_w8a8(*case, out_dtype=torch.bfloat16)
    assert_close("y", actual, matmul_w8a8_reference(*case, out_dtype=torch.float32), BOUNDS[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_weights_beyond_two_to_the_31_elements_are_found():
    num_inputs = 2048
    num_outputs = 2**31 // num_inputs + 64
    weight = torch.zeros(num_outputs, num_inputs, dtype=torch.int8, device="cuda")
    weight[-64:] = torch.randint(-128, 128, (64, num_inputs), device="cuda").to(torch.int8)
    scale = torch.ones(num_outputs, 1, device="cuda")
    x8, x_scale = quantize_activation_reference(torch.randn(3, num_inputs, device="cuda"), torch.int8)
    with launch.forced("triton"):
        actual = matmul_w8a8(x8, x_scale, weight, scale, out_dtype=torch.bfloat16)
    expected = matmul_w8a8_reference(x8, x_scale, weight[-64:], scale[-64:], out_dtype=torch.float32)
    assert_close("y", actual[:, -64:], expected, BOUNDS[torch.bfloat16])
    assert (actual[:, :-64] == 0).all()


def test_strided_tokens_give_the_same(device, one_dtype):
    weight, _ = weights(33, 256, device, one_dtype)
    wide = torch.randn(5, 512, device=device).to(one_dtype)
    arguments = quantize_weight(weight, torch.int8)
    with launch.forced("triton"):
        expected = linear_w8a8(wide[:, ::2].contiguous(), *arguments)
        assert torch.equal(linear_w8a8(wide[:, ::2], *arguments), expected)


@pytest.mark.parametrize("shape", [(2560, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_few_tokens_are_for_our_kernel_and_thousands_for_the_library_but_in_int8(shape):
    shape_name = split_linear.layer_shape(*shape)
    assert 16 < module._LIBRARY_TOKENS[shape_name] <= 4096
    assert module._SCALED_AFTER_TOKENS[shape_name] < 1024
    x8, weight = (torch.empty(n, shape[1], dtype=torch.int8, device="meta") for n in (4096, shape[0]))
    assert not module._library_takes(x8, weight, torch.bfloat16)


def test_no_tokens_give_no_outputs(device, one_dtype):
    weight, bias = weights(33, 256, device, one_dtype)
    x = torch.empty(0, 256, device=device, dtype=one_dtype)
    with launch.forced("triton"):
        assert linear_w8a8(x, *quantize_weight(weight, torch.int8), bias).shape == (0, 33)


def test_what_does_not_fit_is_refused(device):
    weight, _ = weights(8, 256, device, torch.float32)
    x8, x_scale = quantize_activation_reference(torch.ones(2, 256, device=device), torch.int8)
    with pytest.raises(ValueError, match="do not fit"):
        matmul_w8a8(x8, x_scale, *quantize_weight(weight, torch.float8_e4m3fn), out_dtype=torch.float32)


def test_a_result_off_by_twice_the_bound_is_refused(device, dtype):
    case = eight_bit_case((7, 40, 256), torch.int8, device, dtype)
    with launch.forced("triton"):
        actual = matmul_w8a8(*case, out_dtype=dtype)
    expected = matmul_w8a8_reference(*case, out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close("y", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


@pytest.mark.gpu
def test_a_captured_graph_of_split_layers_replays_the_same():
    weight, _ = weights(2048, 11008, "cuda", torch.bfloat16)
    few, many = (torch.randn(n, 11008, device="cuda").bfloat16() for n in (3, 100))
    eight = quantize_weight(weight, torch.int8)
    expect_equal_replays(lambda: torch.cat([linear_w8a8(few, *eight), linear_w8a8(many, *eight)]))
