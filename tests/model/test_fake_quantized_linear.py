"""Quantization-aware training: products of the quantized form, gradients through rounding, weights on their grid."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from train.running import losses, make_root, read_recipe, recipe_in, run_together

from saccade.errors import ConfigError
from saccade.kernels.dequantize_int4 import dequantize_int4_reference, interleave_int4
from saccade.kernels.linear_w4a16 import linear_w4a16_reference
from saccade.kernels.linear_w8a8 import matmul_w8a8_reference
from saccade.kernels.quantize_activation import quantize_activation_reference
from saccade.model import load_model
from saccade.model.fake_quantized_linear import FakeQuantizedLinear, round_weight
from saccade.model.linear import Linear
from saccade.model.quantization import fitting_group
from saccade.model.weight_rounding import quantize_weight, quantize_weight_int4
from saccade.train.quantization_aware import add_fake_quantization, fake_quantized_layers
from saccade.train.stages import train

DTYPES = (torch.float32, torch.bfloat16)


def layer_of(form, dtype, *, inputs=256, outputs=48, **options):
    torch.manual_seed(0)
    plain = Linear(inputs, outputs, **options).to(dtype)
    return plain, FakeQuantizedLinear(plain, form=form, group_size=64, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_int4_layer_computes_what_the_stored_form_does(dtype):
    plain, layer = layer_of("int4", dtype)
    x = torch.randn(5, 256, dtype=dtype)
    packed, scale, _ = quantize_weight_int4(plain.weight.detach(), 64)
    expected = linear_w4a16_reference(x, interleave_int4(packed), scale, None, plain.bias.detach())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(layer(x).float(), expected.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_int8_layer_computes_what_the_stored_form_does(dtype):
    plain, layer = layer_of("int8", dtype)
    x = torch.randn(5, 256, dtype=dtype)
    weight, scale = quantize_weight(plain.weight.detach(), torch.int8)
    tokens, token_scale = quantize_activation_reference(x, torch.int8)
    expected = matmul_w8a8_reference(tokens, token_scale, weight, scale, plain.bias.detach(), out_dtype=dtype)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(layer(x).float(), expected.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_gradients_pass_the_rounding_straight_through(form):
    plain, layer = layer_of(form, torch.float32, inputs=64, outputs=8)
    x = torch.randn(3, 5, 64, requires_grad=True)
    layer(x).square().sum().backward()
    found = x.grad.clone(), plain.weight.grad.clone(), plain.bias.grad.clone()

    leaf, weight = x.detach().requires_grad_(), plain.weight.detach().requires_grad_()
    bias = plain.bias.detach().requires_grad_()
    rounded = leaf
    if form == "int8":
        values, scale = quantize_activation_reference(x.detach().flatten(0, 1), torch.int8)
        rounded = leaf + ((values.float() * scale[:, None]).view_as(x) - x).detach()
    used = weight + (round_weight(weight, form, 64 if form == "int4" else None) - weight).detach()
    torch.nn.functional.linear(rounded, used, bias).square().sum().backward()
    for gradient, expected in zip(found, (leaf.grad, weight.grad, bias.grad), strict=True):
        assert torch.allclose(gradient, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "group", "bits"),
    [("int4", 16, 4), ("int4", 128, 4), ("int4", None, 4), ("int4", 64, 3), ("int4", 64, 2), ("int8", None, 4)],
)
def test_rounding_a_rounded_weight_changes_nothing(dtype, form, group, bits):
    """Scales come from the largest weight, which rounding moves: the grid has to be recognized."""
    weight = torch.randn(64, 384, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[3] = weight[3].abs()
    weight[5] = -weight[5].abs()
    weight[7, :200] = 0
    rounded = round_weight(weight, form, group, bits)
    if form == "int8":
        values, scale = quantize_weight(rounded, torch.int8)
        again = (values.float() * scale.float()).to(dtype)
    else:
        packed, scale, _ = quantize_weight_int4(rounded, group or 384)
        again = dequantize_int4_reference(interleave_int4(packed), scale, None, dtype)
    assert torch.equal(again, rounded)
    assert not torch.equal(rounded, weight)


def test_weights_that_lie_on_no_grid_have_the_scales_of_compressed_tensors():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    _, scale, _ = quantize_weight_int4(weight, 16)
    assert torch.equal(scale, weight.view(16, 4, 16).abs().amax(2) / 7.5)
    assert torch.equal(quantize_weight(weight, torch.int8)[1], weight.abs().amax(1, keepdim=True) / 127.5)


@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 64), (96, 32), (3420, None)])
def test_groups_that_do_not_divide_a_layer_become_smaller_or_one_per_output(inputs, group):
    assert fitting_group(inputs, 128) == group
    plain = Linear(inputs, 8, aligns_in=True)
    layer = FakeQuantizedLinear(plain, form="int4", group_size=128, dtype=torch.float32)
    expected = round_weight(plain.weight[:, :inputs], "int4", group)
    assert torch.equal(layer.rounded(plain.weight)[:, :inputs], expected)


# ------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("qat"))


def recipe(root, name, *settings):
    return read_recipe(recipe_in(root, name), *settings)


@pytest.mark.parametrize(("form", "dtype"), [("int4", "bf16"), ("int8", "fp32")])
def test_an_exported_checkpoint_is_plain_and_its_weights_are_on_the_grid(root, form, dtype):
    settings = [
        f"stages.0.qat.form={form}",
        "stages.0.qat.group_size=32",
        f"model.dtype={dtype}",
        f"checkpoint.export_dtype={dtype}",
    ]
    config = recipe(root, f"run-{form}", "stages.0.steps=4", *settings)
    train(config, device="cpu")
    found = losses(config.run)
    assert found[-1] < found[0]
    out = config.run / "checkpoints" / "step-00000004"
    model = load_model(out, device="cpu")
    stage = config.stages[0]
    parts = {"vision", "language"} | ({"projector"} if form == "int8" else set())
    plain = {name: module for name, module in model.named_modules() if type(module) is Linear}
    add_fake_quantization(model, stage.qat, model.dtype)
    rounded = fake_quantized_layers(model)
    assert {name.partition(".")[0] for name in rounded} == parts
    for name, layer in rounded.items():
        weight = plain[name].weight.detach()[:, : plain[name].stored_shape[1]]
        if form == "int8":
            values, scale = quantize_weight(weight, torch.int8)
            again = (values.float() * scale.float()).to(weight.dtype)
            assert torch.equal(again, weight), name
        elif layer.group_size is not None and weight.shape[1] % 128 == 0:
            packed, scale, _ = quantize_weight_int4(weight, layer.group_size)
            again = dequantize_int4_reference(interleave_int4(packed), scale, None, weight.dtype)
            assert torch.equal(again, weight), name
        assert len(weight[0].unique()) <= (
            16 * (weight.shape[1] // (layer.group_size or weight.shape[1])) if form == "int4" else 256
        )


def test_a_sharded_run_has_the_losses_of_one_rank(root):
    settings = ["stages.0.steps=3", "stages.0.qat.group_size=32"]
    train(recipe(root, "one", *settings), device="cpu")
    run_together([{"recipe": str(recipe(root, "two").run.with_suffix(".toml")), "set": settings}], root, num_ranks=2)
    assert losses(root / "two") == pytest.approx(losses(root / "one"), rel=1e-4)
    one, two = (load_file(root / name / "checkpoints/step-00000003/model.safetensors") for name in ("one", "two"))
    num_differing = sum(int((one[name] - two[name]).abs().gt(1e-3).sum()) for name in one)
    num_values = sum(tensor.numel() for tensor in one.values())
    assert num_differing < num_values / 200, "a value on the edge between two grid points may fall on either side"


def test_adapters_and_rounding_exclude_each_other(root):
    with pytest.raises(ConfigError, match="lora and qat exclude each other"):
        recipe(root, "both", "stages.0.lora.rank=4", "stages.0.qat.form=int4")
    stage = recipe(root, "default", "stages.0.qat.form=int8").stages[0]
    assert dataclasses.replace(stage.qat, parts=("language",)).rounded_parts == ("language",)
