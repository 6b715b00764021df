"""Compressing block by block: what each method gains, what a killed run leaves, what calibration reaches."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from compress.stored import dequantized
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from model import llava_next
from model.hugging_face import make_checkpoint
from safetensors.torch import load_file, save_file

from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.scheme import Rule, Scheme
from saccade.compress.verify import Reference, memory_bytes
from saccade.errors import CheckpointError, ConfigError, DataError
from saccade.model import load_model
from saccade.model.families import named_sizes
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor


@pytest.fixture(scope="module")
def calibration(shards):
    return CalibrationConfig(shards=(str(shards / "large"), str(shards / "small")), num_samples=24, max_tokens=256)


@pytest.fixture(scope="module")
def reports(checkpoint, calibration, tmp_path_factory):
    """Reports of every 4-bit method on the same samples."""
    folder = tmp_path_factory.mktemp("methods")
    names = ("w4a16-rtn", "w4a16-gptq", "w4a16-awq")
    return {
        name: (folder / name, compress(checkpoint, folder / name, scheme=name, calibration=calibration, device="cpu"))
        for name in names
    }


@pytest.mark.parametrize("name", ["w4a16-gptq", "w4a16-awq"])
def test_a_method_beats_rounding_to_nearest_on_every_layer(reports, name):
    layers = reports[name][1].layers
    assert len(layers) == 24
    for layer in layers:
        assert layer.error < layer.rtn_error, layer


def test_methods_beat_rounding_to_nearest_on_the_output(reports, checkpoint, calibration):
    model = load_model(checkpoint, device="cpu")
    batches = load_batches(calibration, Processor.load(checkpoint), 320, skip=24)
    reference = Reference(model, batches)
    kl = {name: reference.compare(load_model(folder, device="cpu")).kl for name, (folder, _) in reports.items()}
    assert kl["w4a16-gptq"] < kl["w4a16-rtn"]
    assert kl["w4a16-awq"] < kl["w4a16-rtn"]
    same = reference.compare(model)
    assert same.kl == pytest.approx(0, abs=1e-9)
    assert same.agreement == 1.0


@pytest.mark.parametrize(("name", "order"), [("w4a16-gptq", "weight"), ("w4a16-awq", None)])
def test_the_order_that_gptq_rounds_inputs_in_is_stated(reports, name, order):
    """The package defines it so: groups stay in a row, and no g_idx is stored."""
    folder, _ = reports[name]
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = list(QuantizationConfig.model_validate(stated).config_groups.values())
    assert {group.weights.actorder for group in groups} == {order}
    tensors = load_file(folder / "model.safetensors")
    assert not any(tensor.endswith("g_idx") for tensor in tensors)
    stem = next(tensor for tensor in tensors if tensor.endswith(".weight_packed")).removesuffix("_packed")
    [group] = [one for one in groups if stem.removesuffix(".weight") in one.targets]
    own = {key.rpartition(".")[2]: tensors[key] for key in tensors if key.startswith(f"{stem}_")}
    weight = BaseCompressor.get_value_from_registry(group.format).decompress(own, group)["weight"]
    assert torch.equal(weight, dequantized(folder)[stem])


def test_memory_is_as_small_as_the_files(reports, checkpoint):
    folder, report = reports["w4a16-rtn"]
    before, after = (memory_bytes(load_model(one, device="cpu")) for one in (checkpoint, folder))
    assert after / before < report.ratio + 0.03
    assert report.bytes_before == (checkpoint / "model.safetensors").stat().st_size
    assert report.bytes_after == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(checkpoint, tmp_path, name):
    """NaN is refused in projections that are rounded, and in tensors that are kept."""
    shutil.copytree(checkpoint, tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"NaN or infinity in {name}"):
        compress(tmp_path / "source", tmp_path / "out", scheme="w4a16-rtn", device="cpu")
    assert not (tmp_path / "out").exists()


TINY = [size for size in named_sizes() if size.endswith("/tiny")]


@pytest.mark.parametrize("size", TINY)
def test_calibration_reaches_every_block_of_every_family(size, shards, tmp_path):
    """If a tower's output is read before its last blocks, these are excepted: they never run, and round to nearest."""
    initialize_random(tmp_path / "source", named_size(size))
    config = CalibrationConfig(shards=(str(shards / "small"),), num_samples=4)
    report = compress(tmp_path / "source", tmp_path / "out", scheme="w4a16-gptq", calibration=config, device="cpu")
    reached = [layer for layer in report.layers if layer.error is not None]
    assert all(layer.error < layer.rtn_error for layer in reached)
    tower = load_model(tmp_path / "out", device="cpu").vision
    num_run = getattr(tower.config, "num_run_layers", len(tower.blocks))
    unused = {f"vision.blocks.{i}" for i in range(num_run, len(tower.blocks))}
    assert {".".join(layer.name.split(".")[:3]) for layer in report.layers if layer.error is None} == unused


class Killed(BaseException):
    pass


def test_a_killed_run_continues_at_the_next_block(checkpoint, calibration, tmp_path):
    def die(name, done, total):
        if done == 4:
            raise Killed

    options = {"scheme": "w4a16-gptq", "calibration": calibration, "device": "cpu"}
    with pytest.raises(Killed):
        compress(checkpoint, tmp_path / "out", on_block=die, **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="other settings"):
        compress(checkpoint, tmp_path / "out", scheme="w4a16-rtn", device="cpu")
    report = compress(checkpoint, tmp_path / "out", **options)
    assert report.num_resumed == 3  # two blocks of the tower and one of the decoder; the projector is kept
    compress(checkpoint, tmp_path / "at-once", **options)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "at-once")]
    assert files[0] == files[1]
    assert not (tmp_path / "out.partial").exists()


def test_one_block_is_in_memory_at_a_time(checkpoint, calibration, tmp_path, monkeypatch):
    from saccade.compress import run

    held = []
    original = run._Run._round_block

    def watched(self, name, *rest):
        loaded = {block for block, module in self.blocks.items() if any(not p.is_meta for p in module.parameters())}
        held.append((name, loaded))
        return original(self, name, *rest)

    monkeypatch.setattr(run._Run, "_round_block", watched)
    compress(checkpoint, tmp_path / "out", scheme="w4a16-gptq", calibration=calibration, device="cpu")
    assert [name for name, loaded in held if loaded] == []
    assert len(held) == 4


def test_text_calibration_does_not_reach_the_tower(checkpoint, shards, tmp_path):
    calibration = CalibrationConfig(shards=(str(shards / "small"),), num_samples=4, kind="text")
    report = compress(checkpoint, tmp_path / "out", scheme="w4a16-gptq", calibration=calibration, device="cpu")
    for layer in report.layers:
        is_tower = layer.name.startswith("vision.")
        assert layer.method == ("rtn" if is_tower else "gptq")
        assert ("no sample of the calibration reaches it" in layer.note) == is_tower


def test_the_weight_of_image_tokens_changes_the_decoder_alone(checkpoint, shards, tmp_path):
    tensors = {}
    for weight in (1.0, "balanced"):
        config = CalibrationConfig(shards=(str(shards / "large"),), num_samples=4, image_weight=weight)
        out = tmp_path / str(weight)
        compress(checkpoint, out, scheme="w4a16-gptq", calibration=config, device="cpu")
        tensors[weight] = dict(load_model(out, device="cpu").named_parameters())
    changed = {name for name, tensor in tensors[1.0].items() if not torch.equal(tensor, tensors["balanced"][name])}
    assert any(name.startswith("language.") for name in changed)
    assert not any(name.startswith("vision.") for name in changed)


def test_an_untied_head_is_compressed_by_its_rule(tmp_path, shards):
    source = tmp_path / "source"
    initialize_random(source, replace(named_size("tiny"), tied_head=False))
    scheme = Scheme(rules=(Rule(part="head", form="int4", method="gptq", group_size=64),))
    config = CalibrationConfig(shards=(str(shards / "small"),), num_samples=4)
    report = compress(source, tmp_path / "out", scheme=scheme, calibration=config, device="cpu")
    [layer] = report.layers
    assert (layer.name, layer.group_size) == ("head", 64)
    assert layer.error < layer.rtn_error
    load_model(tmp_path / "out", device="cpu")


@pytest.mark.parametrize(
    "head", [Rule(part="head", form="int8"), Rule(part="head", form="int4", projections=("head",))]
)
def test_a_rule_for_a_head_that_is_the_embedding_is_refused(head, checkpoint, tmp_path):
    language, kept = Rule(part="language", form="int8"), Rule(part="head", form="keep")
    with pytest.raises(ConfigError, match=r"the head in int\d, but .* the embedding .* is kept\. Remove the rule"):
        compress(checkpoint, tmp_path / "out", scheme=Scheme(rules=(language, head)), device="cpu")
    assert not list(tmp_path.iterdir()), "it is refused before anything is computed"
    compress(checkpoint, tmp_path / "out", scheme=Scheme(rules=(kept, head, language)), device="cpu")


def test_a_rule_for_the_patch_embedding_alone_is_refused(tmp_path):
    """The projection is kept, so the rule would have no effect."""
    source = make_checkpoint(tmp_path / "source", llava_next.SHAPES[0])
    rules = (Rule(part="language", form="int8"), Rule(part="vision", form="int8", projections=("proj",)))
    with pytest.raises(
        ConfigError, match=r"projections proj matches no projection\. .* its projections fc1, fc2, k_proj"
    ):
        compress(source, tmp_path / "out", scheme=Scheme(rules=rules), device="cpu")


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_activations_may_have_one_scale_from_calibration(form, checkpoint, calibration, tmp_path):
    rules = tuple(Rule(part=part, form=form, static=True) for part in ("vision", "projector", "language"))
    compress(checkpoint, tmp_path / "out", scheme=Scheme(rules=rules), calibration=calibration, device="cpu")
    model = load_model(tmp_path / "out", device="cpu")
    assert model.language.layers[0].mlp.down_proj.input_scale > 0
    batches = load_batches(calibration, Processor.load(checkpoint), 320, skip=24)
    assert Reference(load_model(checkpoint, device="cpu"), batches).compare(model).kl < 1e-2
    with pytest.raises(ConfigError, match="--calibration SHARDS"):
        compress(checkpoint, tmp_path / "other", scheme=Scheme(rules=rules), device="cpu")


def test_what_cannot_be_done_is_refused_first(checkpoint, reports, tmp_path):
    with pytest.raises(ConfigError, match="--calibration SHARDS"):
        compress(checkpoint, tmp_path / "out", scheme="w4a16-gptq", device="cpu")
    with pytest.raises(CheckpointError, match="is quantized already"):
        compress(reports["w4a16-rtn"][0], tmp_path / "out", scheme="int8", device="cpu")
    with pytest.raises(ConfigError, match="keeps every projection"):
        compress(checkpoint, tmp_path / "out", scheme=Scheme(rules=(Rule(part="vision", form="keep"),)), device="cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        compress(checkpoint, tmp_path / "full", scheme="int8", device="cpu")


def test_samples_are_spread_over_folders_and_none_is_used_twice(checkpoint, shards):
    config = CalibrationConfig(shards=(str(shards / "large"), str(shards / "small")), num_samples=12, max_tokens=128)
    processor = Processor.load(checkpoint)
    first, second = (load_batches(config, processor, 320, skip=skip) for skip in (0, 12))
    sizes = sorted(int(grid.prod()) for batch in first for grid in batch.image_grids)
    assert sizes == [16] * 6 + [36] * 6
    drawn = [{bytes(batch.patches.numpy()) for batch in batches} for batches in (first, second)]
    assert not drawn[0] & drawn[1]
    again = load_batches(config, processor, 320)
    assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True))
    with pytest.raises(DataError, match="no sample can be used"):
        load_batches(config, processor, 320, skip=48)


def test_the_report_of_a_folder_names_every_projection(reports):
    folder, report = reports["w4a16-awq"]
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert report.kept == ["vision.patch_embed.proj", "projector.mlp.0", "projector.mlp.2", "head"]
    assert {"lm_head", "visual.merger.mlp.0", "model.visual.merger.mlp.0", "visual.patch_embed.proj"} <= set(ignored)
