"""Rounding as functions of a weight and the statistics of its input."""

import pytest
import torch

from saccade.compress.input_statistics import InputStatistics
from saccade.compress.quantizers import Grid, gptq, quantize, relative_error, stored_scheme
from saccade.compress.scaling import awq_scale, fold_scales
from saccade.compress.scheme import Rule
from saccade.kernels.dequantize_int4 import unpack_int4
from saccade.model.attention import PackedAttention
from saccade.model.initialize import named_size
from saccade.model.language import DecoderLayer
from saccade.model.weight_rounding import quantize_weight, quantize_weight_int4

INT4 = Rule(part="language", form="int4", group_size=64)
CORRELATED = torch.randn(96, 192, generator=torch.Generator().manual_seed(1))


def statistics_of(x_TD):
    statistics = InputStatistics(x_TD.shape[1], x_TD.device)
    for part in x_TD.split(50):
        statistics.add(part)
    return statistics


def make_inputs(num_rows=400, seed=0):
    """Correlated inputs of sizes that differ by two orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, 96, generator=generator) @ CORRELATED
    return rows * torch.logspace(-1, 1, 192)


def make_weight(seed=2):
    return torch.randn(40, 192, generator=torch.Generator().manual_seed(seed))


def test_rounding_to_nearest_is_that_of_the_kernels():
    weight = make_weight()
    packed, scale, _ = quantize_weight_int4(weight, 64)
    ours = quantize(weight, INT4, None, torch.float32)
    assert torch.equal(ours.values, unpack_int4(packed, 192))
    assert torch.equal(ours.scale, scale)
    for form, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        values, scale = quantize_weight(weight, dtype)
        ours = quantize(weight, Rule(part="language", form=form), None, torch.float32)
        assert torch.equal(ours.values.float(), values.float())
        assert torch.equal(ours.scale, scale)


def test_statistics_are_sums_over_weighted_rows():
    x, weight = make_inputs(100), torch.rand(100)
    statistics = InputStatistics(192, x.device)
    statistics.add(x[:30], weight[:30])
    statistics.add(x[30:], weight[30:])
    assert torch.allclose(statistics.gram_DD, x.T @ (x * weight[:, None]), rtol=1e-4, atol=1e-2)
    assert torch.allclose(statistics.magnitude_D, (x.abs() * weight[:, None]).sum(0), rtol=1e-4)
    assert torch.equal(statistics.largest_D, x.abs().amax(0))
    assert len(statistics.rows_TD) <= 256


def test_the_error_from_the_gram_matrix_is_that_of_the_outputs():
    x, weight = make_inputs(), make_weight()
    quantized = quantize(weight, INT4, None, torch.float32)
    expected = (x @ (quantized.dequantize() - weight).T).norm() / (x @ weight.T).norm()
    assert relative_error(weight, quantized, statistics_of(x)) == pytest.approx(float(expected), rel=1e-3)


def test_gptq_on_uncorrelated_inputs_is_rounding_to_nearest():
    weight = make_weight()
    grid = Grid.of(weight, stored_scheme(INT4, 192), torch.float32)
    assert torch.equal(gptq(weight, grid, torch.eye(192)), grid.round(weight))


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_gptq_loses_less_on_inputs_it_has_not_seen(form):
    weight, unseen = make_weight(), statistics_of(make_inputs(seed=5))
    rule = Rule(part="language", form=form, method="gptq")
    ours = quantize(weight, rule, statistics_of(make_inputs()), torch.float32)
    plain = quantize(weight, Rule(part="language", form=form), None, torch.float32)
    assert relative_error(weight, ours, unseen) < 0.7 * relative_error(weight, plain, unseen)


def test_gptq_copes_with_inputs_that_are_always_zero():
    x = make_inputs()
    x[:, 10:20] = 0
    quantized = quantize(
        make_weight(), Rule(part="language", form="int4", method="gptq"), statistics_of(x), torch.float32
    )
    assert quantized.dequantize().isfinite().all()


def test_awq_scales_and_clips_for_a_lower_error():
    weight, statistics = make_weight(), statistics_of(make_inputs())
    rule = Rule(part="language", form="int4", group_size=64, method="awq")
    scale = awq_scale([weight], [rule], statistics, torch.float32)
    assert scale.max() / scale.min() > 2
    plain = relative_error(weight, quantize(weight, INT4, None, torch.float32), statistics)
    clipped = relative_error(weight, quantize(weight, rule, statistics, torch.float32), statistics)
    scaled = relative_error(
        weight * scale,
        quantize(weight * scale, rule, statistics.scaled(scale), torch.float32),
        statistics.scaled(scale),
    )
    assert scaled < clipped < plain


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_scales_that_are_moved_out_do_not_change_what_a_block_computes(method):
    torch.manual_seed(0)
    config = named_size("tiny").language
    layer = DecoderLayer(config, 0).requires_grad_(False)
    for parameter in layer.parameters():
        if parameter.dim() == 2:  # few large weights, as trained ones are; scales gain nothing on uniform ones
            parameter.copy_(0.02 * torch.randn_like(parameter) ** 3)
    form = "int4" if method == "awq" else "int8"
    rule = Rule(part="language", form=form, method=method)
    weights = {f"block.{name}": tensor.detach().clone() for name, tensor in layer.named_parameters()}
    rules = {name.removesuffix(".weight"): rule for name in weights if name.endswith("proj.weight")}
    shapes = {name: weights[f"{name}.weight"].shape[1] for name in rules}
    statistics = {
        name: statistics_of(torch.randn(64, size) * torch.logspace(-1, 1, size)[torch.randperm(size)])
        for name, size in shapes.items()
    }
    groups = {"q": ("q_proj", "k_proj", "v_proj"), "g": ("gate_proj", "up_proj")}
    for names in groups.values():
        shared = next(statistics[name] for name in rules if name.endswith(names[0]))
        statistics |= {name: shared for name in rules if name.endswith(names)}
    stored = dict(weights)
    exact = {f"{name}.weight": weights[f"{name}.weight"].clone() for name in rules}
    scales = fold_scales(layer, "block", exact, stored, rules, statistics)
    assert len(scales.inputs) == 6  # all but the output of attention
    x, angles = torch.randn(12, config.hidden_size), torch.zeros(12, config.head_dim // 2)
    attend = PackedAttention((angles.cos(), angles.sin()), torch.tensor([0, 12], dtype=torch.int32), 12)
    before = layer(x, None, attend)
    for name, tensor in (stored | exact).items():
        layer.get_parameter(name.removeprefix("block.")).copy_(tensor)
    after = layer(x, None, attend)
    assert any(not torch.equal(weights[name], stored[name]) for name in weights if "layernorm" in name)
    total = [a if b is None else a + b for a, b in (before, after)]
    assert torch.allclose(*total, rtol=1e-3, atol=1e-4)
