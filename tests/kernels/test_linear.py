import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels.linear import can_prepack, linear, linear_reference, prepack


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 129])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (7, 129), (96, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_prepacked_weight_gives_the_products_of_the_plain_one(num_tokens, num_outputs, num_inputs, has_bias, dtype):
    x, weight = torch.randn(num_tokens, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    assert can_prepack(weight)
    actual = linear(x, prepack(weight), bias)
    expected = linear_reference(x.float(), weight.float(), None if bias is None else bias.float())
    assert actual.shape == (num_tokens, num_outputs)
    assert actual.dtype == dtype
    assert_close("out", actual, expected, BOUNDS[dtype])
    assert torch.equal(linear(x, weight, bias), linear_reference(x, weight, bias))


def test_rows_and_weights_may_have_any_stride():
    x, weight = torch.randn(5, 200)[:, 3:67], torch.randn(64, 32).t()
    assert_close("out", linear(x, prepack(weight)), linear_reference(x, weight), BOUNDS[torch.float32])


def test_a_row_does_not_depend_on_the_number_of_rows():
    x, packed = torch.randn(40, 64), prepack(torch.randn(96, 64))
    whole = linear(x, packed)
    assert all(torch.equal(linear(x[:count], packed), whole[:count]) for count in range(1, 40))


def test_a_wrong_result_is_noticed():
    x, weight = torch.randn(7, 64), torch.randn(96, 64)
    bound = BOUNDS[torch.float32]
    with pytest.raises(AssertionError):
        assert_close("out", perturbed(linear(x, prepack(weight)), bound), linear_reference(x, weight), bound)
