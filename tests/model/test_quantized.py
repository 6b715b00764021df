"""Checkpoints of `compressed-tensors` are read without a dequantized copy, and agree with its decompressed weights."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from closeness import assert_close
from compressed_tensors.quantization.quant_args import QuantizationArgs
from model.compressed import load_decompressed, write_quantized
from model.hugging_face import Oracle, picture
from model.tensor_ranks import assert_ranks_equal_one, run_ranks
from safetensors import safe_open

from saccade.errors import CheckpointError
from saccade.model import load_model, save_model
from saccade.model.initialize import initialize_random, named_size
from saccade.model.linear import projections
from saccade.model.quantization import parse_quantization
from saccade.model.quantized_linear import QuantizedLinear
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import connect
from saccade.processor import Processor

BOUND = 2e-2


def group_of(size):
    return lambda weights: setattr(weights, "group_size", size)


def static_inputs(*, symmetric):
    return QuantizationArgs(num_bits=8, type="int", strategy="tensor", dynamic=False, symmetric=symmetric)


PRESETS = {
    "W8A8": {},
    "FP8_DYNAMIC": {},
    "FP8": {},
    "W4A16": {"change": group_of(64)},
    "W4A16_ASYM": {"change": group_of(32)},
    "W8A8 of all": {"ignore": ("lm_head",)},
    "W8A8 static": {"inputs": static_inputs(symmetric=True)},
    "W8A8 asymmetric": {"inputs": static_inputs(symmetric=False)},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder, size = tmp_path_factory.mktemp("source") / "model", named_size("tiny")
    language = replace(
        size.language, hidden_size=256, num_heads=4, num_kv_heads=2, intermediate_size=384, rope_sections=(8, 12, 12)
    )
    initialize_random(folder, replace(size, language=language, tied_head=False))
    return folder


@pytest.fixture(scope="module", params=PRESETS)
def folder(request, source, tmp_path_factory):
    name, options = request.param, PRESETS[request.param]
    return write_quantized(
        source, tmp_path_factory.mktemp("quantized") / name.replace(" ", "-"), name.split()[0], **options
    )


@pytest.fixture(scope="module")
def inputs(source):
    image = {"type": "image_url", "image_url": picture(120, 84)}
    conversations = [
        [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}],
        [{"role": "user", "content": "Hello, who are you?"}],
    ]
    return Processor.load(source)(conversations, add_generation_prompt=True)


def with_decompressed_weights(folder):
    return folder.with_name(f"{folder.name}-plain")


def error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def test_logits_are_those_of_the_package(folder, source):
    """The package's layers on its decompressed weights, with activations rounded as the scheme says."""
    oracle = Oracle(source)
    inputs = oracle.inputs([{"role": "user", "content": "Hello, who are you?"}])
    oracle.model = load_decompressed(folder)
    model = load_model(folder, device="cpu")
    with torch.no_grad():
        ours = model(Processor.load(source)([[{"role": "user", "content": "Hello, who are you?"}]]))
    assert error(ours, oracle.logits(inputs)) < BOUND


def test_logits_are_those_of_the_decompressed_weights(folder, inputs):
    """They agree up to the rounding of activations.

    It is none with four bits, 0.01 with int8, 0.03 with fp8 (a mantissa of three bits), 0.1 with an uncalibrated static
    scale.
    """
    quantized, plain = (load_model(one, device="cpu") for one in (folder, with_decompressed_weights(folder)))
    with torch.no_grad():
        found = error(quantized(inputs), plain(inputs))
    is_static_int8 = folder.name in ("W8A8-static", "W8A8-asymmetric")
    assert found < (
        1e-5 if "W4" in folder.name else 0.12 if is_static_int8 else 0.05 if "FP8" in folder.name else BOUND
    )


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_computes(folder, inputs):
    """bf16 with the kernels of each form. Uncalibrated static scales amplify the rounding of bf16 on any device."""
    quantized = load_model(folder, device="cuda", dtype="bf16")
    with torch.no_grad():
        expected = load_model(folder, device="cpu")(inputs)
        rounding = error(load_model(folder, device="cpu", dtype="bf16")(inputs).float(), expected)
        assert error(quantized(inputs.to("cuda")).float().cpu(), expected) < max(0.06, 1.1 * rounding)


def test_a_weight_takes_the_bytes_it_has_on_disk(folder):
    model = load_model(folder, device="cpu")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(layers) == (14 if "all" not in folder.name else len(list(projections(model))) - 2)
    tensors = [p for name, layer in layers.items() if name.startswith("language") for p in layer.parameters()]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in tensors}
    with safe_open(folder / "model.safetensors", "pt") as stored:
        on_disk = sum(
            stored.get_tensor(name).nbytes
            for name in stored.keys()  # noqa: SIM118
            if "layers" in name and "norm" not in name and not name.endswith("_shape")
        )
    # One scale of a layer becomes one for each output; a zero point becomes a number for each output.
    slack = 4 * 14 * 384 if folder.name in ("FP8", "W8A8-asymmetric") else 0
    assert on_disk <= sum(storages.values()) <= on_disk + slack


def test_layers_that_read_the_same_input_share_their_storage(folder):
    attention = load_model(folder, device="cpu").language.layers[0].self_attn
    scales = (attention.q_proj.weight_scale, attention.v_proj.weight_scale)
    assert len({scale.untyped_storage().data_ptr() for scale in scales}) == 1


def test_a_quantized_model_is_not_saved_as_a_plain_one(folder, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be saved"):
        save_model(load_model(folder, device="cpu"), tmp_path / "out", like=folder)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_compute_the_same_logits(folder, size):
    """Sums in another order round a few activations of later layers to the neighbouring value of 8 bits."""
    assert_ranks_equal_one(folder, size, 1e-5 if "W4" in folder.name else 5e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_a_tensor_parallel_mlp_rounds_tokens_by_the_largest_channel_of_all_ranks(folder, size):
    """Its inputs are equal, so 8-bit activations are equal too, and only the order of fp32 sums differs."""
    x_TD = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))

    def run(rank, exchange, *, is_damaged=False):
        model = load_model(folder, device="cpu", tensor_rank=TensorRank(rank, size))
        exchange.maximum = (lambda x: x) if is_damaged else exchange.maximum
        connect(model, exchange)
        with torch.no_grad():
            return model.language.layers[0].mlp(x_TD)

    with torch.no_grad():
        whole = load_model(folder, device="cpu").language.layers[0].mlp(x_TD)
    for found in run_ranks(size, run):
        assert_close("MLP", found, whole, 1e-5)
    if folder.name in ("W8A8", "FP8_DYNAMIC"):
        assert error(run_ranks(size, partial(run, is_damaged=True))[0], whole) > 1e-4, "the comparison has power"


WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"format": "marlin-24"}, "format 'marlin-24'"),
        ({"weights": WEIGHTS | {"num_bits": 3}}, "int3 weights"),
        ({"weights": WEIGHTS | {"symmetric": False}}, "asymmetric"),
        ({"weights": WEIGHTS | {"strategy": "block"}}, "per block"),
        ({"input_activations": INPUTS | {"symmetric": False}}, "per token, asymmetric"),
        ({"input_activations": INPUTS | {"num_bits": 4}}, "activations of 'g': 4 bits"),
        ({"input_activations": None}, "16-bit activations"),
        ({"config_groups": {}}, "config_groups"),
        ({"input_activations": 8}, "input_activations 8 of 'g'"),
        (
            {"weights": WEIGHTS | {"num_bits": 4, "strategy": "group", "group_size": "x"}, "input_activations": None},
            "group_size 'x'",
        ),
        ({"ignore": 3}, "ignore 3"),
        ({"ignore": ["re:*"]}, "'re:\\*' in ignore .* no regular expression"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
    group |= {name: changes.pop(name) for name in ("weights", "input_activations") if name in changes}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    with pytest.raises(CheckpointError, match=message):
        parse_quantization({"quantization_config": config | changes})


def test_targets_and_ignored_layers_are_names_or_regular_expressions():
    group = {"targets": ["re:.*self_attn.*", "lm_head"], "weights": WEIGHTS, "input_activations": INPUTS}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    parsed = parse_quantization({"quantization_config": config | {"ignore": ["re:.*layers\\.0\\..*"]}})
    assert parsed.scheme(["model.layers.1.self_attn.q_proj"]) is not None
    assert parsed.scheme(["model.layers.0.self_attn.q_proj"]) is None
    assert parsed.scheme(["model.layers.1.mlp.up_proj"]) is None
    assert parsed.scheme(["lm_head"]) is not None


def test_a_damaged_folder_is_refused(source, tmp_path):
    folder = write_quantized(source, tmp_path / "W8A8", "W8A8")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"missing .*weight_scale"):
        load_model(folder, device="cpu")
