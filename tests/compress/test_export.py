"""Compressed folders as other libraries read them.

`compressed-tensors` decompresses our weights bit for bit, and `transformers` computes our logits.
"""

import json
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from model.hugging_face import CLASSES, CONVERSATIONS, ORACLES, OTHER_SHAPES, SHAPES, Oracle, make_checkpoint, picture
from safetensors.torch import load_file, save_file

from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig
from saccade.compress.quantizers import QuantizedWeight
from saccade.compress.scheme import Rule, Scheme
from saccade.kernels.dequantize_int4 import unpack_int4
from saccade.model import load_model, save_model
from saccade.model.quantized_linear import QuantizedLinear
from saccade.processor import Processor

MIXED = Scheme(
    name="mixed",
    rules=(
        Rule(part="vision", layers="0", form="int8"),
        Rule(part="vision", form="fp8"),
        Rule(part="language", layers="0", form="int4", group_size=32),
        Rule(part="language", projections=("down_proj", "o_proj"), form="int8"),
        Rule(part="language", form="int4", symmetric=False),
        Rule(part="head", form="int8"),
    ),
)
DECODER_IN_4_BITS = Scheme(name="w4a16-decoder", rules=(Rule(part="language", form="int4"),))
"""`transformers` cannot load packed weights of a SigLIP tower: initializing missing weights, it reads the packed ones.

The built-in scheme has it in int8: `test_a_tower_that_transformers_cannot_load_packed_is_stored_in_int8`."""
SCHEMES = {"w4a16-rtn": "w4a16-rtn", "int8": "int8", "fp8": "fp8", "mixed": MIXED}
ONE_OF_EACH_FAMILY = [
    SHAPES[1],
    *{shape.family: shape for shape in OTHER_SHAPES if not shape.tied}.values(),
    *(module.SHAPES[0] for module in ORACLES.values()),
]


@pytest.fixture(scope="module", params=ONE_OF_EACH_FAMILY, ids=lambda shape: shape.name)
def source(request, tmp_path_factory):
    """Weights as small as trained ones: large ones amplify the rounding of every layer."""
    folder = make_checkpoint(tmp_path_factory.mktemp("source") / "model", request.param)
    tensors = load_file(folder / "model.safetensors")
    calm = {name: tensor * (0.4 if tensor.dim() == 2 else 1.0) for name, tensor in tensors.items()}
    save_file(calm, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=SCHEMES)
def folder(request, source):
    out, scheme = source.with_name(request.param), SCHEMES[request.param]
    if scheme == "w4a16-rtn" and "siglip" in (source / "config.json").read_text():
        scheme = DECODER_IN_4_BITS
    if scheme is MIXED and load_model(source, device="cpu").config.tied_head:
        scheme = replace(MIXED, rules=MIXED.rules[:-1])  # a head that is the embedding has no rule
    compress(source, out, scheme=scheme, device="cpu")
    return out


def ours_on(folder, source, conversation):
    def ours(part):
        return {"type": "image", "image": part["image"]} if part["type"] == "image" else part

    messages = [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [ours(part) for part in message["content"]]}
        for message in conversation
    ]
    with torch.no_grad():
        return load_model(folder, device="cpu")(Processor.load(source)([messages]))


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_folder_and_computes_our_logits(folder, source):
    oracle = Oracle(folder)
    quantized = [m for m in oracle.model.modules() if getattr(m, "quantization_scheme", None) is not None]
    assert len(quantized) == sum(isinstance(m, QuantizedLinear) for m in load_model(folder, device="cpu").modules())
    round_rows_of_two_dimensions(quantized)
    theirs = oracle.logits(oracle.inputs(CONVERSATIONS["multi-image"]))
    with torch.no_grad():
        ours = load_model(folder, device="cpu")(Processor.load(source)([CONVERSATIONS["multi-image"]]))
    error = float((ours - theirs).norm() / theirs.norm())
    assert error < (1e-4 if folder.name == "w4a16-rtn" else 2e-2)


def round_rows_of_two_dimensions(layers):
    """The package rounds activations [batch, tokens, channels] per token, and leaves those of towers as they are.

    Activations of towers are [patches, channels]. Here each layer is given a batch of one, so that all are rounded as
    the config says.
    """
    widened = set()

    def widen(layer, args):
        is_flat = args[0].dim() == 2
        (widened.add if is_flat else widened.discard)(layer)
        return (args[0].unsqueeze(0),) if is_flat else args

    for layer in layers:
        layer.register_forward_pre_hook(widen)
        layer.register_forward_hook(lambda layer, _, out: out[0] if layer in widened else out)


def test_compressed_tensors_decompresses_the_weights_bit_for_bit(folder):
    """Weights are decompressed layer by layer, from the tensors and the config of the folder alone."""
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    tensors = load_file(folder / "model.safetensors")
    layers = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    assert layers
    for layer in sorted(layers):
        scheme = scheme_of(layer, config)
        own = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == layer}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        theirs = compressor.decompress(dict(own), scheme)["weight"]
        assert torch.equal(theirs, dequantized(own)), layer


def scheme_of(layer, config) -> QuantizationScheme:
    """The group that names a layer; `Linear` names all."""
    [scheme] = [g for g in config.config_groups.values() if layer in g.targets or g.targets == ["Linear"]]
    return scheme


def dequantized(own):
    """The weight that our own kernels are given, as a plain tensor."""
    if "weight_packed" not in own:
        return QuantizedWeight(None, own["weight"], own["weight_scale"]).dequantize()
    outputs, inputs = own["weight_shape"].tolist()
    zero = own.get("weight_zero_point")
    zero = None if zero is None else unpack_int4(zero.T, outputs).T
    return QuantizedWeight(None, unpack_int4(own["weight_packed"], inputs), own["weight_scale"], zero).dequantize()


def test_layers_that_are_kept_are_ignored_by_both_of_their_names(source):
    out = source.with_name("kept")
    compress(source, out, scheme="w4a16-rtn", device="cpu")
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    model = Oracle(source).model
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    kept = {name for name in linear if "merger" in name or name == "lm_head"}
    assert kept <= set(ignore)
    stored = {
        name.removesuffix(".weight")
        for name in load_file(out / "model.safetensors")
        if "merger" in name and "mlp" in name
    }
    assert {name for name in stored if not name.endswith("bias")} <= set(ignore)


@pytest.mark.filterwarnings("ignore")
def test_a_tower_that_transformers_cannot_load_packed_is_stored_in_int8(tmp_path):
    source = make_checkpoint(tmp_path / "model", ORACLES["llava_onevision"].SHAPES[1])
    report = compress(source, tmp_path / "out", scheme="w4a16-rtn", device="cpu")
    forms = {(layer.name.partition(".")[0], layer.form) for layer in report.layers}
    assert forms == {("vision", "int8"), ("language", "int4")}
    assert all("cannot load this tower" in layer.note for layer in report.layers if layer.form == "int8")
    oracle, conversation = Oracle(tmp_path / "out"), CONVERSATIONS["28x28"]
    with torch.no_grad():
        ours = load_model(tmp_path / "out", device="cpu")(Processor.load(source)([conversation]))
    theirs = oracle.logits(oracle.inputs(conversation))
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
    asked = Scheme(rules=(Rule(part="vision", form="int4"),))
    assert {layer.form for layer in compress(source, tmp_path / "asked", scheme=asked, device="cpu").layers} == {"int4"}


@pytest.mark.filterwarnings("ignore")
def test_a_pooling_head_that_nothing_reads_is_left_out_of_weights_and_config(tmp_path):
    folder = tmp_path / "model"
    with_head = next(shape for shape in ORACLES["llava_onevision"].SHAPES if "pooling-head" in shape.name)
    make_checkpoint(folder, with_head)
    compress(folder, tmp_path / "int8", scheme="int8-rtn", device="cpu")
    save_model(load_model(folder, device="cpu"), tmp_path / "copy", like=folder)
    for out in (tmp_path / "int8", tmp_path / "copy"):
        _, report = CLASSES["llava_onevision"][1].from_pretrained(out, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_order_of_activity_is_stated_of_groups_alone(checkpoint, shards, tmp_path):
    """Releases of compressed-tensors up to 0.15 refuse `actorder` for layers with one scale per output."""
    rules = (Rule(part="vision", form="int8", method="gptq"), Rule(part="language", form="int4", method="gptq"))
    calibration = CalibrationConfig(shards=(str(shards / "small"),), num_samples=2)
    compress(checkpoint, tmp_path / "out", scheme=Scheme(rules=rules), calibration=calibration, device="cpu")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    weights = [group["weights"] for group in config["config_groups"].values()]
    assert {(one["strategy"], one["actorder"]) for one in weights} == {("channel", None), ("group", "weight")}


def test_a_width_that_no_group_divides_gets_one_scale_per_output(source, tmp_path):
    report = compress(source, tmp_path / "out", scheme="w4a16-rtn", device="cpu")
    odd = [layer for layer in report.layers if layer.group_size is None]
    for layer in report.layers:
        assert (layer.note != "") == (layer.group_size != 128), layer
    assert all("one scale per output" in layer.note for layer in odd)
    image = {"type": "image", "image": picture(84, 56)}
    with torch.no_grad():
        logits = load_model(tmp_path / "out", device="cpu")(
            Processor.load(source)([[{"role": "user", "content": [image]}]])
        )
    assert logits.isfinite().all()
