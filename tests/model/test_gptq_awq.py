"""Folders in the layouts of AutoGPTQ and AutoAWQ, and with groups in the order of activity.

The tests write the meaning of the packed numbers one by one, and name what is refused.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from model.tensor_ranks import assert_ranks_equal_one
from safetensors.torch import load_file, save_file

from saccade.errors import CheckpointError
from saccade.model import load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.model.quantization import StoredScheme
from saccade.model.quantized_linear import Linear4bit
from saccade.model.shard import TensorRank
from saccade.processor import Processor

GROUP = 64
CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "gptq_v2": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2",
    },
    "gptq desc_act": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True},
    "actorder group": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*visual.*", "lm_head"],
        "config_groups": {
            "g": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP,
                    "actorder": "group",
                },
            },
        },
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["visual"],
    },
}  # fmt: skip
AWQ_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def words(nibbles):
    """[..., 8] integers 0..15, the first in the lowest bits, as int32."""
    total = (nibbles.astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))).sum(-1)
    return torch.from_numpy(total.astype(np.uint32).view(np.int32).copy())


def along_outputs(values, order=range(8)):
    rows, outputs = values.shape
    return words(values.reshape(rows, outputs // 8, 8)[..., list(order)])


def pack(layout, q, z, s, groups):
    """q [inputs, outputs], z and s [groups, outputs], group of each input."""
    inputs, outputs = q.shape
    groups = torch.from_numpy(groups.astype(np.int32))
    if layout == "actorder group":
        tensors = {"weight_packed": along_outputs(q.T), "weight_zero_point": along_outputs(z).T.contiguous()}
        scale = torch.from_numpy(np.ascontiguousarray(s.T))
        return tensors | {
            "weight_scale": scale,
            "weight_g_idx": groups,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
    if layout == "awq":
        packed, zeros = along_outputs(q, AWQ_OUTPUT_OF_NIBBLE), along_outputs(z, AWQ_OUTPUT_OF_NIBBLE)
    else:
        packed = words(q.reshape(inputs // 8, 8, outputs).transpose(0, 2, 1))
        zeros = along_outputs(z if layout == "gptq_v2" else (z - 1) % 16)
    tensors = {"qweight": packed, "qzeros": zeros, "scales": torch.from_numpy(s).half()}
    return tensors if layout == "awq" else tensors | {"g_idx": groups}


def groups_of_inputs(layout, name, inputs):
    """Groups of consecutive inputs, or in an order that the projections of one input share except in the last layer."""
    groups = np.arange(inputs) // GROUP
    if layout not in ("gptq desc_act", "actorder group"):
        return groups
    shared = name.rpartition("_proj")[0][:-1] if ".layers.0." in name else name
    return np.random.default_rng(list(shared.encode())).permutation(groups)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    initialize_random(folder, named_size("tiny"), dtype=torch.float16)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def folders(request, source, tmp_path_factory):
    """A quantized folder, and one with its dequantized weights."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp(request.param)
    quantized, plain = (shutil.copytree(source, folder / name) for name in ("quantized", "plain"))
    tensors, meant = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    for name in [
        name for name in tensors if ".layers." in name and name.endswith("proj.weight") and "visual" not in name
    ]:
        outputs, inputs = tensors.pop(name).shape
        q = rng.integers(0, 16, (inputs, outputs))
        z = rng.integers(0, 16, (inputs // GROUP, outputs))
        s = rng.uniform(0.001, 0.01, z.shape).astype(np.float16)
        groups = groups_of_inputs(request.param, name, inputs)
        weight = ((q - z[groups]) * s.astype(np.float32)[groups]).T
        meant[name] = torch.from_numpy(np.ascontiguousarray(weight, dtype=np.float32))
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{last}": tensor for last, tensor in pack(request.param, q, z, s, groups).items()}
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    write_config(quantized, CONFIGS[request.param])
    return quantized, plain


def write_config(folder, quantization):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))


def test_logits_are_those_of_the_weights_that_are_meant(folders, source):
    inputs = Processor.load(source)([[{"role": "user", "content": "Hello, who are you?"}]])
    models = [load_model(folder, device="cpu", dtype="fp32") for folder in folders]
    layers = [module for module in models[0].modules() if isinstance(module, Linear4bit)]
    assert len(layers) >= 14
    assert {layer._is_reordered for layer in layers} == {"desc_act" in str(folders[0]) or "actorder" in str(folders[0])}
    with torch.no_grad():
        ours, expected = (model(inputs) for model in models)
    assert (ours - expected).norm() / expected.norm() < 1e-5


def test_tensor_parallel_ranks_compute_the_same_logits_unless_groups_are_out_of_order(folders):
    folder, _ = folders
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    if raw.get("desc_act") or "config_groups" in raw:
        with pytest.raises(CheckpointError, match="groups of inputs in the order of desc_act"):
            load_model(folder, device="cpu", tensor_rank=TensorRank(0, 2))
    else:
        assert_ranks_equal_one(folder, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "gptq with 3 bits"),
        ({"checkpoint_format": "marlin"}, "gptq in the format 'marlin'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message, source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "model")
    write_config(folder, CONFIGS["gptq"] | change)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("groups", [[1] * 64 + [0] * 63 + [1], [-1] + [0] * 63 + [1] * 64, [5] * 64 + [0] * 64])
def test_groups_that_are_not_of_the_stated_size_are_refused(groups):
    layer = Linear4bit(128, 8, StoredScheme("int4", 64, has_group_index=True), bias=False)
    layer.load_tensor("weight_packed", torch.zeros(8, 16, dtype=torch.int32), None)
    with pytest.raises(CheckpointError, match="do not form groups of 64"):
        layer.load_tensor("weight_g_idx", torch.tensor(groups, dtype=torch.int32), None)
