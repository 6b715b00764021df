"""int8 with static activations: one scale per layer from calibration, with a zero point if asymmetric.

Activations are rounded as the `compressed-tensors` package rounds them.
"""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model.hugging_face import CONVERSATIONS, ORACLES, Oracle, make_checkpoint
from safetensors.torch import load_file

from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig
from saccade.compress.input_statistics import InputStatistics
from saccade.compress.quantizers import asymmetric_range, quantize
from saccade.compress.scheme import Rule, Scheme
from saccade.errors import ConfigError
from saccade.kernels.linear_w8a8 import matmul_w8a8_reference
from saccade.model import load_model
from saccade.model.merged_projections import merge_storage
from saccade.model.quantization import StoredScheme
from saccade.model.quantized_linear import Linear8bit
from saccade.processor import Processor

BOUND = 1e-5
PARTS = ("vision", "projector", "language")
ASYMMETRIC = Scheme(
    name="int8-asymmetric",
    rules=tuple(Rule(part=part, form="int8", static=True, symmetric=False) for part in PARTS),
)


@pytest.fixture(scope="module")
def folder(checkpoint, shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("static") / "out"
    samples = CalibrationConfig(shards=(str(shards / "large"),), num_samples=8)
    compress(checkpoint, out, scheme=ASYMMETRIC, calibration=samples, device="cpu")
    return out


def layers_of(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear8bit)}


def stored_tensors(folder):
    """Tensors by layer and the last part of their name."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, last = name.rpartition(".")
        found.setdefault(layer, {})[last] = tensor
    return {layer: own for layer, own in found.items() if "input_zero_point" in own}


def test_a_layer_computes_what_the_package_computes_with_its_own_rounding(folder):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    [group] = config.config_groups.values()
    assert not group.input_activations.symmetric
    stored = stored_tensors(folder)
    assert len(stored) >= 20
    assert sum(int(own["input_zero_point"]) != 0 for own in stored.values()) > len(stored) // 2
    for own in stored.values():
        weight = BaseCompressor.get_value_from_registry(group.format).decompress(dict(own), group)["weight"]
        layer = Linear8bit(*reversed(weight.shape), SCHEME, bias="bias" in own)
        for name, tensor in own.items():
            layer.load_tensor(name, tensor, None)
        x = 20 * float(own["input_scale"]) * torch.randn(30, weight.shape[1])  # some are outside of the range
        rounded = fake_quantize(x, own["input_scale"], own["input_zero_point"], group.input_activations)
        expected = F.linear(rounded, weight, own.get("bias"))
        assert (layer(x) - expected).norm() / expected.norm() < BOUND


SCHEME = StoredScheme("int8", has_input_scale=True, has_input_zero_point=True)


@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_our_logits(folder, checkpoint):
    oracle = Oracle(folder)
    messages = CONVERSATIONS["multi-image"]
    theirs = oracle.logits(oracle.inputs(messages))
    with torch.no_grad():
        ours = load_model(folder, device="cpu")(Processor.load(checkpoint)([messages]))
    assert (ours - theirs).norm() / theirs.norm() < 2e-2


def test_layers_that_read_the_same_input_are_one_product(folder):
    model = load_model(folder, device="cpu")
    attention = model.language.layers[0].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    merged = projections[0].merged
    assert all(part.merged is merged for part in projections)
    x = torch.randn(5, attention.q_proj.in_features)
    parts = [part.linear(x) for part in projections]
    torch.testing.assert_close(merged.whole.linear(x), torch.cat(parts, 1), rtol=1e-6, atol=1e-6)
    merge_storage(model)
    assert len(layers_of(model)) >= 20


def test_the_offset_makes_up_for_the_zero_point():
    """x8 w - z sum(w) is what the kernels give with the offset as their bias."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(9, 48, generator=generator), torch.randn(16, 48, generator=generator)
    statistics = InputStatistics(48, x.device)
    statistics.add(x)
    stored = quantize(
        weight, Rule(part="language", form="int8", static=True, symmetric=False), statistics, weight.dtype
    )
    layer = Linear8bit(48, 16, SCHEME, bias=False)
    for name, tensor in stored.tensors().items():
        layer.load_tensor(name, tensor, None)
    x8, scale = layer._quantize(x)
    assert int(x8.min()) == -128, "inputs from 0 up use all 256 values"
    shifted = (x8.float() - float(stored.input_zero_point)).to(torch.int16)
    expected = (shifted.float() @ stored.values.float().T) * scale[:, None] * stored.scale.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(
        matmul_w8a8_reference(x8, scale, stored.values, stored.scale, out_dtype=x.dtype), expected, atol=0.1
    )


def test_a_zero_point_halves_the_error_of_inputs_of_one_sign():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.rand(200, 64, generator=generator), torch.randn(32, 64, generator=generator)
    statistics = InputStatistics(64, x.device)
    statistics.add(x)
    errors = {}
    for symmetric in (True, False):
        rule = Rule(part="vision", form="int8", static=True, symmetric=symmetric)
        scheme = StoredScheme("int8", has_input_scale=True, has_input_zero_point=not symmetric)
        layer = Linear8bit(64, 32, scheme, bias=False)
        stored = quantize(weight, rule, statistics, weight.dtype)
        for name, tensor in stored.tensors().items():
            layer.load_tensor(name, tensor, None)
        errors[symmetric] = float((layer(x) - x @ stored.dequantize().T).norm())
    assert errors[False] < 0.6 * errors[True]


@pytest.mark.parametrize("bounds", [(-3.0, 1.0), (0.5, 2.0), (-2.0, -1.0), (0.0, 0.0)])
def test_zero_is_stored_exactly(bounds):
    scale, zero_point = asymmetric_range(*map(torch.tensor, bounds))
    assert (torch.zeros(1) / scale + zero_point).round() == zero_point
    assert scale > 0
    assert -128 <= int(zero_point) <= 127


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_computes(folder, checkpoint):
    inputs = Processor.load(checkpoint)([[{"role": "user", "content": "Hello, who are you?"}]])
    with torch.no_grad():
        expected = load_model(folder, device="cpu")(inputs)
        on_cpu = load_model(folder, device="cpu", dtype="bf16")(inputs).float()
        on_gpu = load_model(folder, device="cuda", dtype="bf16")(inputs.to("cuda")).float().cpu()
    assert (on_gpu - expected).norm() < 1.1 * (on_cpu - expected).norm(), (
        "static scales amplify what bf16 rounds, on any device"
    )


def test_a_block_that_the_forward_pass_never_runs_needs_no_calibration(shards, tmp_path):
    """LLaVA-NeXT reads the last tower block but one.

    Without images no block of the tower has a scale, which is refused."""
    source = make_checkpoint(tmp_path / "source", ORACLES["llava_next"].SHAPES[0])
    samples = CalibrationConfig(shards=(str(shards / "large"),), num_samples=2, max_tokens=8192)
    scheme = Scheme(rules=(Rule(part="vision", form="int8", method="gptq", static=True),))
    report = compress(source, tmp_path / "out", scheme=scheme, calibration=samples, device="cpu")
    unread = [layer for layer in report.layers if layer.error is None]
    assert unread
    assert all(layer.method == "rtn" and "no sample" in layer.note for layer in unread)
    assert {layer.method for layer in report.layers if layer.error is not None} == {"gptq"}
    load_model(tmp_path / "out", device="cpu")
    with pytest.raises(ConfigError, match="Use samples with images"):
        compress(source, tmp_path / "text", scheme=scheme, calibration=replace(samples, kind="text"), device="cpu")
