"""Checkpoint folders: bit-exact round trips, sharding, and one error that names everything wrong."""

import json
import subprocess
import sys

import pytest
import torch
from model.hugging_face import CONVERSATIONS, SHAPES, Oracle, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from saccade.config import override_config
from saccade.errors import CheckpointError, UserError
from saccade.model import load_model, save_model
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor


@pytest.fixture(scope="module", params=[SHAPES[0], SHAPES[1]], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "checkpoint", request.param)


@pytest.fixture
def own(tmp_path):
    initialize_random(tmp_path / "own", named_size("tiny"), dtype=torch.float32)
    return tmp_path / "own"


def tensors_of(model):
    return dict(model.state_dict())


@pytest.mark.parametrize("max_shard_bytes", [2**31, 300_000])
def test_hugging_face_to_saccade_to_hugging_face_is_bit_equal(folder, tmp_path, max_shard_bytes, caplog):
    save_model(load_model(folder, device="cpu"), tmp_path / "saved", like=folder, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (max_shard_bytes < 2**31)
    original = tensors_of(Qwen2_5_VLForConditionalGeneration.from_pretrained(folder))
    loaded, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not [record for record in caplog.records if "key" in record.getMessage().lower()]
    again = tensors_of(loaded)
    assert original.keys() == again.keys()
    for name, tensor in original.items():
        assert torch.equal(tensor, again[name]), name


def test_saved_then_loaded_is_bit_exact_also_in_bf16(folder, tmp_path):
    model = load_model(folder, device="cpu", dtype="bf16")
    save_model(model, tmp_path / "saved", like=folder)
    again = load_model(tmp_path / "saved", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "bfloat16"
    messages = CONVERSATIONS["28x28"]
    assert torch.equal(model(Processor.load(folder)([messages])), again(Processor.load(tmp_path / "saved")([messages])))


def test_sharded_folders_written_by_hugging_face_are_read(tmp_path):
    folder = make_checkpoint(tmp_path / "sharded", SHAPES[1], max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    theirs = Oracle(folder)
    messages = CONVERSATIONS["28x28"]
    ours = load_model(folder, device="cpu")(Processor.load(folder)([messages]))
    assert torch.allclose(ours, theirs.logits(theirs.inputs(messages)), atol=1e-4)


def test_the_published_config_form_and_the_newer_tensor_names_are_read(folder, tmp_path):
    """Decoder fields at the top level of config.json; tensors under model.visual. and model.language_model."""
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    raw |= {k: v for k, v in text.items() if k != "model_type"}
    raw |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("visual."):
            name = "model." + name
        elif name.startswith("model."):
            name = "model.language_model." + name.removeprefix("model.")
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    ours, original = load_model(tmp_path, device="cpu"), load_model(folder, device="cpu")
    assert ours.config == original.config
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), original.parameters(), strict=True))


def test_checkpoints_made_by_saccade_init_load_in_transformers_with_the_same_logits(own):
    oracle = Oracle(own)
    _, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(own, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    messages = CONVERSATIONS["multi-image"]
    ours = load_model(own, device="cpu")(Processor.load(own)([messages]))
    assert torch.allclose(ours, oracle.logits(oracle.inputs(messages)), atol=1e-4)


def test_a_checkpoint_made_by_the_command_loads_in_transformers(command, tmp_path):
    """`saccade init` takes the sizes through the configuration; nothing may change type on the way."""
    assert command("init", tmp_path / "made", "--size", "tiny", "--set", "language.num_layers=3").status == 0
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "made")
    assert loaded.config.text_config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"weight_map": ["a"]}, "no weight_map"),
        ({"weight_map": {"model.norm.weight": 3}}, "no weight_map"),
        ({"weight_map": "drop"}, "does not list there: model.norm.weight"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, damage, message):
    folder = tmp_path / "own"
    initialize_random(folder, named_size("tiny"), max_shard_bytes=200_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    if damage["weight_map"] == "drop":
        del index["weight_map"]["model.norm.weight"]
        damage = index
    (folder / "model.safetensors.index.json").write_text(json.dumps(damage))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int8, "only F32, F16 and BF16"),
        (torch.float64, "only F32"),
        (torch.bfloat16, "together. Choose one with dtype"),
    ],
)
def test_stored_dtypes_we_do_not_read_or_that_are_mixed_are_refused(own, dtype, message):
    tensors = load_file(own / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(dtype)}, own / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(own, device="cpu")
    if dtype == torch.bfloat16:
        assert load_model(own, device="cpu", dtype="fp32").language.norm.weight.dtype == torch.float32


def test_two_tensors_for_one_parameter_are_refused(own):
    tensors = load_file(own / "model.safetensors")
    save_file(
        tensors | {"model.language_model.norm.weight": tensors["model.norm.weight"].clone()}, own / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"two tensors for model\.norm\.weight"):
        load_model(own, device="cpu")


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path):
    command = f"ulimit -f 1; exec {sys.executable} -B -m saccade init {tmp_path}/full --size tiny"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "Is the disk full?" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_surplus_and_misshaped_tensors_are_named_in_one_error(own):
    path = own / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"], tensors["visual.blocks.1.attn.qkv.bias"]
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["quite.unknown"] = torch.zeros(1)
    tensors["visual.merger.ln_q.weight"] = torch.zeros(3)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_model(own, device="cpu")
    message = str(caught.value)
    for part in (
        f"{own}: the tensors do not fit", "missing model.norm.weight", "missing visual.blocks.1.attn.qkv.bias",
        "surplus model.layers.7.mlp.up_proj.weight", "surplus quite.unknown",
        "visual.merger.ln_q.weight is [3], expected [64]",
    ):  # fmt: skip
        assert part in message


def test_a_missing_shard_file_is_named(tmp_path):
    initialize_random(tmp_path / "own", named_size("tiny"), max_shard_bytes=200_000)
    lost = sorted((tmp_path / "own").glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"missing: {lost.name}"):
        load_model(tmp_path / "own", device="cpu")


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage"])
def test_a_damaged_shard_is_named(own, damage):
    path = own / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"x" * 1000}[damage])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        load_model(own, device="cpu")


def set_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (raw[section] if section else raw)[name] = value
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "florence2"}, "model_type 'florence2' is not supported. Supported: qwen2_5_vl"),
        ({"model_type": "llama"}, "saccade init OUT --text"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"quantization_config": {}}, "quant_method None is not supported; 'compressed-tensors', 'gptq' and 'awq' are"),
        ({"num_attention_heads": 3}, "must be a multiple"),
        ({"vision_config__hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "128"}, "hidden_size is '128', not a whole number"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"vision_config": "x"}, "vision_config"),
        ({"vision_config__fullatt_block_indexes": 3}, "fullatt_block_indexes"),
    ],
)
def test_a_model_we_cannot_run_is_refused_with_the_reason(own, changes, message):
    set_config(own, **changes)
    with pytest.raises(UserError, match=message):
        load_model(own, device="cpu")


def test_a_tied_checkpoint_may_carry_the_head_only_if_it_is_the_embedding(own):
    path = own / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    load_model(own, device="cpu")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_model(own, device="cpu")


def test_saving_never_touches_a_folder_that_holds_something(own, tmp_path):
    model = load_model(own, device="cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        save_model(model, tmp_path / "full", like=own)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes.txt"]
    save_model(model, tmp_path / "new", like=own)
    assert not list(tmp_path.glob(".*partial*"))


def test_loading_peaks_below_1_2_times_the_weights(tmp_path):
    """A fresh process reads 0.36 GB from one file; its peak memory is compared with the model's size."""
    deep = override_config(
        named_size("tiny"),
        [
            "language.hidden_size=512",
            "language.num_layers=12",
            "language.intermediate_size=4096",
            "language.rope_sections=[16, 24, 24]",
        ],
        "test",
    )
    initialize_random(tmp_path / "deep", deep, dtype=torch.float32)
    script = """
import resource, sys
import saccade.model.weights as weights
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = weights.load_model(sys.argv[1], device="cpu")
print((peak() - before) / sum(p.nbytes for p in model.parameters()))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "deep")]
    ratio = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert ratio < 1.2, f"peak {ratio:.2f}x the weights"


def test_odd_feed_forward_sizes_are_aligned_in_memory_and_stored_as_configured(folder):
    """The vision towers of the tests have 100 intermediate channels, real ones 3420: neither is a multiple of 8."""
    model = load_model(folder, device="cpu", dtype="fp32").train()
    mlp = model.vision.blocks[0].mlp
    assert mlp.gate_proj.weight.shape[0] == mlp.down_proj.weight.shape[1] == 104
    for _ in range(2):  # a step of AdamW leaves the added channels at zero
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(Processor.load(folder)([CONVERSATIONS["28x28"]])).square().mean().backward()
        optimizer.step()
        assert mlp.gate_proj.weight.grad[:100].any()
        added = (mlp.gate_proj.weight[100:], mlp.up_proj.bias[100:], mlp.down_proj.weight[:, 100:])
        assert not any(tensor.any() for tensor in added)
