import dataclasses

import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import launch
from saccade.kernels import quant_linear as module
from saccade.kernels.quant_linear import (
    dequantize_int4,
    interleave_int4,
    linear_w4a16,
    linear_w4a16_reference,
    linear_w8a8,
    linear_w8a8_reference,
    matmul_w8a8,
    matmul_w8a8_reference,
    pack_int4,
    quantize_activation,
    quantize_activation_reference,
    quantize_weight,
    quantize_weight_int4,
    unpack_int4,
)

EIGHT_BITS = pytest.mark.parametrize("bits", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
TENSOR_CORE_FP8 = 5e-4
"""Hopper's tensor cores sum fp8 products with about 14 bits, whatever the output's dtype; rounding to fp8 itself costs 2e-2."""
# Tokens, outputs, inputs: one of everything, odd numbers, and inputs that no tile divides.
SHAPES = [(1, 1, 16), (7, 129, 300), (1, 40, 2048), (17, 33, 64), (33, 64, 128), (65, 40, 256), (129, 130, 48)]


@pytest.fixture
def one_dtype(device):
    """For what does not depend on the dtype: every other one costs a minute of compiling."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def weights(num_outputs, num_inputs, device, dtype):
    weight = torch.randn(num_outputs, num_inputs, device=device) * torch.rand(num_outputs, 1, device=device)
    return weight.to(dtype), torch.randn(num_outputs, device=device).to(dtype)


def eight_bit_case(shape, bits, device, dtype):
    """The arguments of `matmul_w8a8`; the tokens are compressed by the reference."""
    num_tokens, num_outputs, num_inputs = shape
    weight, bias = weights(num_outputs, num_inputs, device, dtype)
    x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
    return *quantize_activation_reference(x, bits), *quantize_weight(weight, bits), bias


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
def test_compressed_tokens_equal_the_reference(shape, bits, device, dtype):
    if bits == torch.float8_e4m3fn and device == "cpu":
        pytest.skip("Triton's interpreter loses the carry when it rounds to fp8")
    x = torch.randn(shape, device=device).to(dtype)
    x[0] = 0
    with launch.forced("triton"):
        values, scale = quantize_activation(x, bits)
    expected_values, expected_scale = quantize_activation_reference(x, bits)
    assert_close("scale", scale, expected_scale, 1e-6)
    # Equal, but for quotients that fall on a boundary between two values and are divided otherwise there.
    assert (values.float() != expected_values.float()).float().mean() < 1e-3
    assert_close("values", values.float(), expected_values.float(), 1e-3)


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


def test_splits_give_every_multiprocessor_the_same_number_of_programs():
    tiles = module._W4A16_TILES[False][16]
    assert tiles.programs_per_sm == 2
    assert module._num_splits(tiles, 32, 11008, num_sms=132) == 8
    assert module._num_splits(tiles, 40, 2048, num_sms=132) == 3  # six would be too short, four are 160 programs
    assert module._num_splits(tiles, 32, 2048, num_sms=132) == 4
    assert module._num_splits(tiles, 500, 2048, num_sms=132) == 1
    assert module._num_splits(tiles, 4, 2048, num_sms=132) == 4  # too few inputs to fill the GPU
    assert module._num_splits(tiles, 4, 128, num_sms=132) == 1


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


def test_strided_tokens_give_the_same(device, one_dtype):
    weight, _ = weights(33, 256, device, one_dtype)
    wide = torch.randn(5, 512, device=device).to(one_dtype)
    words, scale, _ = four_bits(weight, 128)
    with launch.forced("triton"):
        for linear, arguments in ((linear_w8a8, quantize_weight(weight, torch.int8)), (linear_w4a16, (words, scale))):
            expected = linear(wide[:, ::2].contiguous(), *arguments)
            assert torch.equal(linear(wide[:, ::2], *arguments), expected)


def test_four_bits_lie_where_a_checkpoint_has_them():
    words = pack_int4(torch.arange(-8, 8).unsqueeze(0))
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x76543210, 0xFEDCBA98]


@pytest.mark.parametrize("num_values", [1, 7, 8, 129])
def test_unpacked_is_what_was_packed(num_values, device):
    values = torch.randint(-8, 8, (3, num_values), device=device)
    words = pack_int4(values)
    assert words.shape == (3, -(-num_values // 8))
    assert torch.equal(unpack_int4(words, num_values).long(), values)


def test_interleaved_words_hold_neighbours_in_their_halves():
    values = torch.randint(-8, 8, (2, 256))
    words = interleave_int4(pack_int4(values))
    for g, m, p, q, b in ((0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (1, 3, 3, 3, 1), (0, 1, 2, 3, 0), (1, 2, 0, 1, 1)):
        nibbles = (words[:, 16 * g + 4 * q + m] >> (4 * p + 16 * b)) & 15
        assert torch.equal(nibbles.long() - 8, values[:, 128 * g + 32 * m + 8 * p + 2 * q + b])


def test_interleaved_words_stand_for_the_same_weight():
    weight, _ = weights(9, 384, "cpu", torch.float32)
    packed, scale, _ = quantize_weight_int4(weight, 64)
    expected = (unpack_int4(packed, 384).view(9, 6, 64) * scale.unsqueeze(2)).flatten(1)
    assert torch.equal(module.dequantize_int4_reference(interleave_int4(packed), scale, None, torch.float32), expected)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("group_size", [16, 64, 128])
def test_the_kernel_makes_weights_whole_as_the_reference_does(group_size, symmetric, device, dtype):
    weight, _ = weights(70, 384, device, dtype)
    words, scale, zero = four_bits(weight, group_size, symmetric)
    with launch.forced("triton"):
        actual = dequantize_int4(words, scale, zero, dtype)
    assert torch.equal(actual, module.dequantize_int4_reference(words, scale, zero, dtype))


def four_bits(weight, group_size, symmetric=True):
    packed, scale, zero = quantize_weight_int4(weight, group_size, symmetric=symmetric)
    return interleave_int4(packed), scale, zero


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 40, 256, 128),
        (7, 129, 384, 32),
        (17, 24, 256, 64),
        (33, 64, 128, 16),
        (65, 8, 256, 256),
        (129, 33, 128, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["triton", "library"])
def test_four_bit_linear_equals_the_reference(path, shape, symmetric, device, dtype):
    num_tokens, num_outputs, num_inputs, group_size = shape
    weight, bias = weights(num_outputs, num_inputs, device, dtype)
    x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
    words, scale, zero = four_bits(weight, group_size, symmetric)
    assert (zero is None) == symmetric
    with launch.forced(path):
        actual = linear_w4a16(x, words, scale, zero, bias)
    assert_close("y", actual, linear_w4a16_reference(x.float(), words, scale, zero, bias), BOUNDS[dtype])


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_any_number_of_splits_gives_the_same_in_4_bits(num_splits, device, one_dtype):
    weight, bias = weights(40, 640, device, one_dtype)
    x = torch.randn(7, 640, device=device).to(one_dtype)
    words, scale, _ = four_bits(weight, 128)
    actual = module._linear_w4a16_triton(x, words, scale, None, bias, module._W4A16_TILES[False][16], num_splits)
    assert_close("y", actual, linear_w4a16_reference(x.float(), words, scale, None, bias), BOUNDS[one_dtype])


def test_splits_are_summed_in_one_order_and_leave_their_counters_at_zero(device, one_dtype):
    weight, bias = weights(300, 1280, device, one_dtype)
    x = torch.randn(7, 1280, device=device).to(one_dtype)
    words, scale, _ = four_bits(weight, 128)
    first, *others = (
        module._linear_w4a16_triton(x, words, scale, None, bias, module._W4A16_TILES[False][16], 10) for _ in range(4)
    )
    assert all(torch.equal(first, other) for other in others)
    assert all((counters == 0).all() for counters, _ in module._all_counters.values())


def test_four_bits_are_close_to_the_weight(device):
    weight, _ = weights(64, 512, device, torch.float32)
    for symmetric, bound in ((True, 0.12), (False, 0.11)):
        words, scale, zero = four_bits(weight, 128, symmetric)
        assert_close("weight", module.dequantize_int4_reference(words, scale, zero, torch.float32), weight, bound)


@pytest.mark.parametrize("bits", [torch.int8, torch.float8_e4m3fn, torch.int32], ids=["int8", "fp8", "int4"])
@pytest.mark.parametrize("shape", [(2560, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_few_tokens_are_for_our_kernels_and_thousands_for_the_library_but_in_int8(shape, bits):
    assert not module._prefers_library(bits, 16, *shape)
    assert module._prefers_library(bits, 4096, *shape) == (bits != torch.int8)
    assert module._SCALED_AFTER_TOKENS[module._shape_of(*shape)] < 1024


def test_no_tokens_give_no_outputs(device, one_dtype):
    weight, bias = weights(33, 256, device, one_dtype)
    x = torch.empty(0, 256, device=device, dtype=one_dtype)
    with launch.forced("triton"):
        assert linear_w8a8(x, *quantize_weight(weight, torch.int8), bias).shape == (0, 33)
        assert linear_w4a16(x, *four_bits(weight, 128)).shape == (0, 33)


def test_what_does_not_fit_is_refused(device):
    weight, _ = weights(8, 256, device, torch.float32)
    with pytest.raises(ValueError, match="multiple of 128"):
        interleave_int4(pack_int4(torch.zeros(4, 120)))
    words, scale, _ = four_bits(weight, 128)
    with pytest.raises(ValueError, match="do not fit"):
        linear_w4a16(torch.zeros(2, 128, device=device), words, scale)
    x8, x_scale = quantize_activation_reference(torch.ones(2, 256, device=device), torch.int8)
    with pytest.raises(ValueError, match="do not fit"):
        matmul_w8a8(x8, x_scale, *quantize_weight(weight, torch.float8_e4m3fn), out_dtype=torch.float32)


def test_a_result_off_by_twice_the_bound_is_refused(device, dtype):
    case = eight_bit_case((7, 40, 256), torch.int8, device, dtype)
    weight, bias = weights(40, 256, device, dtype)
    x, four = torch.randn(7, 256, device=device).to(dtype), four_bits(weight, 128)
    with launch.forced("triton"):
        results = [
            (matmul_w8a8(*case, out_dtype=dtype), matmul_w8a8_reference(*case, out_dtype=torch.float32)),
            (linear_w4a16(x, *four, bias), linear_w4a16_reference(x.float(), *four, bias)),
        ]
    for actual, expected in results:
        with pytest.raises(AssertionError, match="relative RMS"):
            assert_close("y", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


@pytest.mark.parametrize("shape", [(1, 896, 896), (7, 129, 1152), (65, 40, 100), (256, 64, 2048)], ids=str)
def test_int8_of_a_cpu_equals_the_reference(shape, dtype):
    """By the instructions of the CPU where it has them; the largest sums do not overflow."""
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
@pytest.mark.parametrize("path", ["triton", "library"])
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 257, 4096])
@pytest.mark.parametrize("shape", [(2048, 11008), (22016, 2048)], ids=str)
def test_real_sizes_equal_the_reference_in_4_bits(shape, num_tokens, path):
    weight, bias = weights(*shape, "cuda", torch.bfloat16)
    x = torch.randn(num_tokens, shape[1], device="cuda").bfloat16()
    words, scale, zero = four_bits(weight, 128, symmetric=False)
    with launch.forced(path):
        actual = linear_w4a16(x, words, scale, zero, bias)
    # Through the library the weight itself is rounded to bf16.
    assert_close("y", actual, linear_w4a16_reference(x.float(), words, scale, zero, bias), BOUNDS[torch.bfloat16])


@pytest.mark.gpu
def test_a_captured_graph_of_split_layers_replays_the_same():
    weight, _ = weights(2048, 11008, "cuda", torch.bfloat16)
    x = torch.randn(3, 11008, device="cuda").bfloat16()
    four, eight = four_bits(weight, 128), quantize_weight(weight, torch.int8)
    many = torch.randn(100, 11008, device="cuda").bfloat16()

    def both():
        return torch.cat([linear_w4a16(x, *four), linear_w8a8(x, *eight), linear_w8a8(many, *eight)])

    with launch.forced("triton"):
        expected = both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [both() for _ in range(3)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(result, expected) for result in captured)


@pytest.mark.gpu
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
