import pytest
import torch
from closeness import assert_close
from kernels.quantized import four_bits, weights

from saccade.kernels import launch
from saccade.kernels.dequantize_int4 import (
    dequantize_int4,
    dequantize_int4_reference,
    interleave_int4,
    pack_int4,
    unpack_int4,
)
from saccade.model.weight_rounding import quantize_weight_int4


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
    assert torch.equal(dequantize_int4_reference(interleave_int4(packed), scale, None, torch.float32), expected)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("group_size", [16, 64, 128])
def test_the_kernel_dequantizes_as_the_reference_does(group_size, symmetric, device, dtype):
    weight, _ = weights(70, 384, device, dtype)
    words, scale, zero = four_bits(weight, group_size, symmetric)
    with launch.forced("triton"):
        actual = dequantize_int4(words, scale, zero, dtype)
    assert torch.equal(actual, dequantize_int4_reference(words, scale, zero, dtype))


def test_four_bits_are_close_to_the_weight(device):
    weight, _ = weights(64, 512, device, torch.float32)
    for symmetric, bound in ((True, 0.12), (False, 0.11)):
        words, scale, zero = four_bits(weight, 128, symmetric)
        assert_close("weight", dequantize_int4_reference(words, scale, zero, torch.float32), weight, bound)
