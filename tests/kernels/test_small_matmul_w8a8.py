import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed
from kernels.quantized import EIGHT_BITS

from saccade.kernels import launch
from saccade.kernels import small_matmul_w8a8 as module
from saccade.kernels._few_tokens import MAX_TOKENS, VectorTiles, max_tokens
from saccade.kernels.quantize_activation import quantize_activation_reference
from saccade.kernels.small_matmul_w8a8 import small_matmul_w8a8, small_matmul_w8a8_reference
from saccade.model.weight_rounding import quantize_weight


def product(shape, num_tokens, bits, device, dtype):
    """The arguments of a product, without a bias."""
    x = torch.randn(num_tokens, shape[1], device=device).to(dtype)
    weight = (torch.randn(shape, device=device) / shape[1] ** 0.5).to(dtype)
    return *quantize_activation_reference(x, bits), *quantize_weight(weight, bits)


@pytest.fixture
def tiles(monkeypatch):
    """One warp a program, so that small shapes have several tiles."""
    monkeypatch.setattr(module, "_TILES", {key: VectorTiles(block_n=4, num_warps=1) for key in module._TILES})


@EIGHT_BITS
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("shape", [(1, 16), (37, 256), (9, 1072)], ids=str)
def test_eight_bit_products_of_few_tokens_equal_the_reference(shape, num_tokens, bits, device, dtype, tiles):
    case, bias = product(shape, num_tokens, bits, device, dtype), torch.randn(shape[0], device=device).to(dtype)
    for arguments in ((*case, bias), case):
        with launch.forced("triton"):
            actual = small_matmul_w8a8(*arguments, out_dtype=dtype)
        expected = small_matmul_w8a8_reference(*arguments, out_dtype=torch.float32)
        assert_close("out", actual, expected, BOUNDS[dtype])


@EIGHT_BITS
@pytest.mark.parametrize("shape", [(2560, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_three_tokens_are_not_for_the_kernel(shape, bits):
    assert max_tokens(bits, *shape) <= MAX_TOKENS


@EIGHT_BITS
def test_a_result_off_by_twice_the_bound_is_refused(bits, device, dtype):
    case = product((40, 256), 1, bits, device, dtype)
    with launch.forced("triton"):
        actual = small_matmul_w8a8(*case, out_dtype=dtype)
    expected = small_matmul_w8a8_reference(*case, out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close("y", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


@pytest.mark.gpu
@EIGHT_BITS
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("shape", [(2560, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_real_sizes_equal_the_reference(shape, num_tokens, bits):
    case = product(shape, num_tokens, bits, "cuda", torch.bfloat16)
    with launch.forced("triton"):
        actual = small_matmul_w8a8(*case, out_dtype=torch.bfloat16)
    expected = small_matmul_w8a8_reference(*case, out_dtype=torch.float32)
    assert_close("out", actual, expected, BOUNDS[torch.bfloat16])
