import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed
from kernels.quantized import expect_equal_replays, four_bits, weights

from saccade.kernels import _split_linear as split_linear
from saccade.kernels import launch
from saccade.kernels import linear_w4a16 as module
from saccade.kernels.dequantize_int4 import interleave_int4, pack_int4
from saccade.kernels.linear_w4a16 import linear_w4a16, linear_w4a16_reference


def test_splits_give_every_multiprocessor_the_same_number_of_programs():
    tiles = module._TILES[False][16]
    assert tiles.programs_per_sm == 2
    assert split_linear._num_splits(tiles, 32, 11008, num_sms=132) == 8
    assert split_linear._num_splits(tiles, 40, 2048, num_sms=132) == 3  # six would be too short, four are 160 programs
    assert split_linear._num_splits(tiles, 32, 2048, num_sms=132) == 4
    assert split_linear._num_splits(tiles, 500, 2048, num_sms=132) == 1
    assert split_linear._num_splits(tiles, 4, 2048, num_sms=132) == 4  # too few inputs to fill the GPU
    assert split_linear._num_splits(tiles, 4, 128, num_sms=132) == 1


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
    actual = module._linear_w4a16_triton(x, words, scale, None, bias, module._TILES[False][16], num_splits)
    assert_close("y", actual, linear_w4a16_reference(x.float(), words, scale, None, bias), BOUNDS[one_dtype])


def test_splits_are_summed_in_one_order_and_leave_their_counters_at_zero(device, one_dtype):
    weight, bias = weights(300, 1280, device, one_dtype)
    x = torch.randn(7, 1280, device=device).to(one_dtype)
    words, scale, _ = four_bits(weight, 128)
    first, *others = (
        module._linear_w4a16_triton(x, words, scale, None, bias, module._TILES[False][16], 10) for _ in range(4)
    )
    assert all(torch.equal(first, other) for other in others)
    assert all((counters == 0).all() for counters, _ in split_linear._all_counters.values())


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


def test_strided_tokens_give_the_same(device, one_dtype):
    weight, _ = weights(33, 256, device, one_dtype)
    wide = torch.randn(5, 512, device=device).to(one_dtype)
    words, scale, _ = four_bits(weight, 128)
    with launch.forced("triton"):
        expected = linear_w4a16(wide[:, ::2].contiguous(), words, scale)
        assert torch.equal(linear_w4a16(wide[:, ::2], words, scale), expected)


@pytest.mark.parametrize("shape", [(2560, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_few_tokens_are_for_our_kernel_and_thousands_for_the_library(shape):
    assert 16 < module._LIBRARY_TOKENS[split_linear.layer_shape(*shape)] <= 4096


def test_no_tokens_give_no_outputs(device, one_dtype):
    weight, _ = weights(33, 256, device, one_dtype)
    x = torch.empty(0, 256, device=device, dtype=one_dtype)
    with launch.forced("triton"):
        assert linear_w4a16(x, *four_bits(weight, 128)).shape == (0, 33)


def test_what_does_not_fit_is_refused(device):
    weight, _ = weights(8, 256, device, torch.float32)
    with pytest.raises(ValueError, match="multiple of 128"):
        interleave_int4(pack_int4(torch.zeros(4, 120)))
    words, scale, _ = four_bits(weight, 128)
    with pytest.raises(ValueError, match="do not fit"):
        linear_w4a16(torch.zeros(2, 128, device=device), words, scale)


def test_a_result_off_by_twice_the_bound_is_refused(device, dtype):
    weight, bias = weights(40, 256, device, dtype)
    x, four = torch.randn(7, 256, device=device).to(dtype), four_bits(weight, 128)
    with launch.forced("triton"):
        actual = linear_w4a16(x, *four, bias)
    expected = linear_w4a16_reference(x.float(), *four, bias)
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close("y", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


@pytest.mark.gpu
def test_a_captured_graph_of_split_layers_replays_the_same():
    weight, _ = weights(2048, 11008, "cuda", torch.bfloat16)
    x, four = torch.randn(3, 11008, device="cuda").bfloat16(), four_bits(weight, 128)
    expect_equal_replays(lambda: linear_w4a16(x, *four))
