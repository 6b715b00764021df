import contextlib

import pytest
import torch
import torch.nn.functional as F
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import launch, small_linear
from saccade.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from saccade.kernels.small_linear import (
    MAX_TOKENS,
    SmallLinearTiles,
    norm_gated_linear,
    norm_gated_linear_reference,
    norm_linear,
    norm_linear_into,
    norm_linear_reference,
    small_linear_reference,
)
from saccade.kernels.swiglu import swiglu, swiglu_reference

EPS = 1e-6


def inputs(num_tokens, shape, device, dtype, has_bias=True):
    """x, residual, the norm's weight, the weight and the bias of one layer."""
    num_outputs, num_inputs = shape
    x, residual = (torch.randn(num_tokens, num_inputs, device=device).to(dtype) for _ in range(2))
    norm_weight = (1 + 0.2 * torch.randn(num_inputs, device=device)).to(dtype)
    weight = (torch.randn(shape, device=device) / num_inputs**0.5).to(dtype)
    bias = torch.randn(num_outputs, device=device).to(dtype) if has_bias else None
    return x, residual, norm_weight, weight, bias


def product(rows, weight, bias):
    """The outputs in fp32, from rows that are rounded already."""
    return F.linear(rows.float(), weight.float(), None if bias is None else bias.float())


def expect_linear(x, weight, bias, dtype):
    with launch.forced("triton"):
        actual = small_linear.small_linear(x, weight, bias)
    assert actual.dtype == dtype
    expected = product(x, weight, bias)
    assert_close("out", actual, expected, BOUNDS[dtype])
    return actual, expected


def expect_norm_linear(x, residual, norm_weight, weight, bias, dtype):
    with launch.forced("triton"):
        actual, total = norm_linear(x, residual, norm_weight, EPS, weight, bias)
    expected_total = x if residual is None else x + residual
    assert torch.equal(total, expected_total)
    expected = product(rms_norm_reference(expected_total, norm_weight, EPS), weight, bias)
    assert_close("out", actual, expected, BOUNDS[dtype])
    return actual


def expect_norm_gated_linear(x, residual, norm_weight, weight, bias, dtype):
    """The rows of `weight` are halves for gate and up: an odd last one is left out."""
    weight = weight[: len(weight) // 2 * 2]
    bias = None if bias is None else bias[: len(weight)]
    with launch.forced("triton"):
        actual, total = norm_gated_linear(x, residual, norm_weight, EPS, weight, bias)
    expected_total = x if residual is None else x + residual
    assert torch.equal(total, expected_total)
    gate_up = product(rms_norm_reference(expected_total, norm_weight, EPS), weight, bias)
    # Gate and up are rounded as the outputs of a layer are, and each may be off by its bound.
    expected = swiglu_reference(*gate_up.to(dtype).float().chunk(2, dim=1))
    assert_close("out", actual, expected, 3 * BOUNDS[dtype])
    return actual


def expect_layers(x, residual, norm_weight, weight, bias, dtype):
    expect_linear(x, weight, bias, dtype)
    expect_norm_linear(x, residual, norm_weight, weight, bias, dtype)
    if len(weight) > 1:
        expect_norm_gated_linear(x, residual, norm_weight, weight, bias, dtype)


@pytest.mark.parametrize("num_tokens", range(1, MAX_TOKENS + 1))
def test_every_number_of_tokens_equals_the_reference(num_tokens, device, dtype):
    expect_layers(*inputs(num_tokens, (7, 129), device, dtype), dtype)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (9, 64), (5, 2500), (3, 4999)], ids=str)  # outputs, inputs
def test_every_shape_equals_the_reference(shape, has_bias, device, dtype):
    x, residual, norm_weight, weight, bias = inputs(2, shape, device, dtype, has_bias)
    expect_layers(x, residual, norm_weight, weight, bias, dtype)
    expect_norm_linear(x, None, norm_weight, weight, bias, dtype)
    if len(weight) > 1:
        expect_norm_gated_linear(x, None, norm_weight, weight, bias, dtype)


def test_the_references_are_the_layers_one_after_the_other(device):
    x, residual, norm_weight, weight, bias = inputs(3, (8, 16), device, torch.float32)
    normalized, total = add_rms_norm(x, residual, norm_weight, EPS)
    for actual, expected in zip(
        norm_linear_reference(x, residual, norm_weight, EPS, weight, bias),
        (F.linear(normalized, weight, bias), total),
        strict=True,
    ):
        assert_close("out", actual, expected, 1e-6)
    gated, total = norm_gated_linear_reference(x, residual, norm_weight, EPS, weight, bias)
    assert_close("gated", gated, swiglu(*F.linear(normalized, weight, bias).chunk(2, dim=1)), 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(small_linear_reference(x, weight, bias), F.linear(x, weight, bias))


def test_without_a_residual_the_sum_is_the_input_itself(device):
    x, _, norm_weight, weight, bias = inputs(2, (7, 16), device, torch.float32)
    for path in ("triton", "reference"):
        with launch.forced(path):
            assert norm_linear(x, None, norm_weight, EPS, weight, bias)[1] is x


@pytest.mark.parametrize(
    ("tiles", "num_inputs"),
    [
        (SmallLinearTiles(2, 256, 1, 1), 700),
        (SmallLinearTiles(4, 256, 1, 3), 1100),
        (SmallLinearTiles(16, 256, 4, 2), 1024),  # warps side by side along the outputs
        (SmallLinearTiles(8, 512, 2, 5), 1100),  # more steps at once than the row has
        (SmallLinearTiles(8, 512, 2, 4), 2048),  # as many
        (SmallLinearTiles(32, 2048, 8, 1), 2048),
    ],
    ids=str,
)
def test_any_tiles_give_the_same_layer(tiles, num_inputs, device, dtype, monkeypatch):
    monkeypatch.setattr(small_linear, "_tiles_for", lambda num_outputs, num_inputs: tiles)
    expect_layers(*inputs(2, (9, num_inputs), device, dtype), dtype)


def test_rows_apart_equal_copies(device, dtype):
    _, _, norm_weight, weight, bias = inputs(1, (9, 48), device, dtype)
    wide = torch.randn(5, 4 * 48 + 1, device=device).to(dtype)
    x, residual = wide[:, 48:96], wide[:, 97:145]
    wide_weight = torch.cat([weight, weight], dim=1)[:, :48]
    for w in (weight, wide_weight):
        assert torch.equal(expect_linear(x, w, bias, dtype)[0], expect_linear(x.clone(), w, bias, dtype)[0])
        expect_norm_linear(x, residual, norm_weight, w, bias, dtype)
        expect_norm_gated_linear(x, residual, norm_weight, w, bias, dtype)


def test_a_token_does_not_depend_on_the_others(device, dtype):
    """The outputs of a row have the same bits alone and in every batch up to the largest."""
    shape = (1040, 2048) if device == "cuda" else (6, 300)
    x, residual, norm_weight, weight, bias = inputs(MAX_TOKENS, shape, device, dtype)

    def layers(rows):
        with launch.forced("triton"):
            gated, _ = norm_gated_linear(x[rows], residual[rows], norm_weight, EPS, weight, bias)
            plain = small_linear.small_linear(x[rows], weight, bias)
            return gated, plain, *norm_linear(x[rows], residual[rows], norm_weight, EPS, weight, bias)

    for token in (0, 1):
        alone = layers(slice(token, token + 1))
        for num_tokens in (2, 3, 4, 8) if device == "cuda" else (3, 8):
            for one, many in zip(alone, layers(slice(0, num_tokens)), strict=True):
                if device == "cuda":
                    assert torch.equal(one[0], many[token]), num_tokens
                else:  # the interpreter adds in numpy's order, which follows the shape
                    assert_close("out", one[0], many[token], BOUNDS[dtype] / 10)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_an_activation_of_extreme_gates_is_finite(device, dtype):
    gates = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4, 0.5], device=device).to(dtype)
    bias = torch.cat([gates, torch.ones_like(gates)])
    x, residual, norm_weight, weight, _ = inputs(1, (16, 64), device, dtype)
    with launch.forced("triton"):
        actual, _ = norm_gated_linear(x, residual, norm_weight, EPS, 0 * weight, bias)
    assert_close("out", actual[0], swiglu_reference(gates.float(), torch.ones_like(gates).float()), BOUNDS[dtype])


def test_more_tokens_and_training_are_served_in_parts(device):
    dtype = torch.float32
    for num_tokens in (0, MAX_TOKENS + 1):
        expect_layers(*inputs(num_tokens, (7, 64), device, dtype), dtype)
    leaves = x, residual, norm_weight, weight, bias = [t.requires_grad_() for t in inputs(2, (8, 64), device, dtype)]
    with launch.forced("triton"):
        out, total = norm_linear(x, residual, norm_weight, EPS, weight, bias)
        gated, _ = norm_gated_linear(x, residual, norm_weight, EPS, weight, bias)
        (out.sum() + gated.sum() + total.sum()).backward()
    actual = [leaf.grad for leaf in leaves]
    out, total = norm_linear_reference(x, residual, norm_weight, EPS, weight, bias)
    gated, _ = norm_gated_linear_reference(x, residual, norm_weight, EPS, weight, bias)
    loss = out.sum() + gated.sum() + total.sum()
    for name, a, e in zip(
        ("x", "residual", "norm", "weight", "bias"), actual, torch.autograd.grad(loss, leaves), strict=True
    ):
        assert_close(f"d{name}", a, e, BOUNDS[dtype])


def test_columns_apart_and_other_dtypes_are_served_in_parts(device):
    x, residual, norm_weight, weight, bias = inputs(3, (7, 64), device, torch.float16)
    expect_linear(x.T.contiguous().T, weight, bias, torch.float16)
    with launch.forced("triton"):
        _, total = norm_linear(x.double(), residual.double(), norm_weight.double(), EPS, weight.double())
    assert total.dtype == torch.float64


def test_unforced_the_device_decides(device):
    x, residual, norm_weight, weight, bias = inputs(3, (7, 64), device, torch.float32)
    out, _ = norm_linear(x, residual, norm_weight, EPS, weight, bias)
    expected, _ = norm_linear_reference(x, residual, norm_weight, EPS, weight, bias)
    assert_close("out", out, expected, 1e-5)
    assert_close("out", small_linear.small_linear(x, weight), x @ weight.T, 1e-5)


def test_shapes_that_do_not_fit_are_refused(device):
    x, residual, norm_weight, weight, bias = inputs(2, (7, 16), device, torch.float32)
    for wrong in (
        lambda: small_linear.small_linear(x, weight[:, 1:]),
        lambda: small_linear.small_linear(x, weight, bias[1:]),
        lambda: norm_linear(x, residual[:1], norm_weight, EPS, weight),
        lambda: norm_linear(x, None, norm_weight[1:], EPS, weight),
        lambda: norm_gated_linear(x, residual[:1], norm_weight, EPS, weight[:6]),
        lambda: norm_gated_linear(x, None, norm_weight[1:], EPS, weight[:6]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            wrong()
    with pytest.raises(ValueError, match="no halves"):
        norm_gated_linear(x, None, norm_weight, EPS, weight)


def test_an_error_of_twice_the_bound_is_noticed(device, dtype):
    x, _, _, weight, bias = inputs(5, (9, 64), device, dtype)
    actual, expected = expect_linear(x, weight, bias, dtype)
    with pytest.raises(AssertionError, match="out"):
        assert_close("out", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("shape", [(2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)], ids=str)
def test_real_shapes_equal_the_reference(shape, num_tokens, device, dtype):
    expect_layers(*inputs(num_tokens, shape, device, dtype), dtype)


@pytest.mark.gpu
def test_a_chain_of_layers_started_early_gives_what_layers_one_by_one_give(device, monkeypatch):
    """Each launch starts before the one it reads from has ended; repetitions would show a race."""
    monkeypatch.undo()  # memory is not poisoned here: its filling would come between the launches
    dtype = torch.bfloat16
    x, residual, norm_weight, first, bias = inputs(1, (2048, 2048), device, dtype)
    gate_up, down = (inputs(1, shape, device, dtype)[3] for shape in ((22016, 2048), (2048, 11008)))

    def chain(wait):
        out, total = x, residual
        for _ in range(6):
            out = wait(small_linear.small_linear(rms_norm(out, norm_weight, EPS), first, bias))
            middle, total = wait(norm_gated_linear(out, total, norm_weight, EPS, gate_up))
            out = wait(small_linear.small_linear(middle, down))
        return out, total

    def synchronized(result):
        torch.cuda.synchronize()
        return result

    with launch.forced("triton"):
        expected = chain(synchronized)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(lambda result: result)
        for _ in range(50):
            graph.replay()
            for result in (captured, chain(lambda result: result)):
                for a, e in zip(result, expected, strict=True):
                    assert torch.equal(a, e)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_offsets_beyond_32_bits(device):
    num_outputs = 2**31 // 4096 + 8
    weight = torch.zeros(num_outputs, 4096, device=device, dtype=torch.bfloat16)
    weight[-8:] = torch.randn(8, 4096, device=device)
    x = torch.randn(2, 4096, device=device, dtype=torch.bfloat16)
    with launch.forced("triton"):
        out = small_linear.small_linear(x, weight)
        tiles = small_linear._tiles_for(*weight.shape)  # tiles of few rows add up in another order
        assert torch.equal(out[:, -8:], small_linear._run(x, weight[-8:], None, tiles=tiles)[0])
    assert not out[:, :-8].any()


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
@pytest.mark.parametrize("has_residual", [True, False], ids=["sum", "alone"])
def test_the_norm_and_the_head_write_into_given_memory(num_tokens, has_residual, device, dtype):
    x, residual = (torch.randn(num_tokens, 64, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(100, 64, device=device, dtype=dtype) / 8
    norm_weight = torch.rand(64, device=device, dtype=dtype) + 0.5
    out = torch.full((num_tokens, 100), float("nan"), device=device, dtype=dtype)
    arguments = (x, residual if has_residual else None, norm_weight, 1e-6, weight)
    with torch.no_grad(), launch.forced("triton") if num_tokens <= 8 else contextlib.nullcontext():
        given = norm_linear_into(*arguments, out)
    expected, _ = norm_linear_reference(*(a.float() if isinstance(a, torch.Tensor) else a for a in arguments))
    assert given.data_ptr() == out.data_ptr()
    torch.testing.assert_close(
        out.float(),
        expected,
        rtol=2e-2 if dtype != torch.float32 else 1e-5,
        atol=2e-2 if dtype != torch.float32 else 1e-5,
    )
