"""Pruned folders are ordinary ones: `transformers` loads them and computes our logits; what mattered was kept."""

import json

import pytest
import torch
from model import llava_next, llava_onevision
from model.hugging_face import CONVERSATIONS, OTHER_SHAPES, SHAPES, Oracle, make_checkpoint
from safetensors.torch import load_file, save_file
from train.running import write_shards

from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.importance import input_importance, layer_importance, loss_of, skipped
from saccade.compress.pruning import PruningConfig, prune
from saccade.errors import CheckpointError, ConfigError
from saccade.model import load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor

QWEN3 = next(shape for shape in OTHER_SHAPES if shape.name == "qwen3-vl-tied")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), 24)


def samples(shards):
    return CalibrationConfig(shards=(str(shards),), num_samples=8, max_tokens=1024)


@pytest.mark.parametrize(
    ("shape", "keep", "units", "parts", "expected"),
    [
        (SHAPES[0], 0.8, ("channels",), ("vision", "language"), {"language": {"layers": 2, "heads": 4, "kv_heads": 4}}),
        (
            SHAPES[0],
            0.7,
            ("layers",),
            ("vision", "language"),
            {"vision": {"channels": 100}, "language": {"layers": 1, "channels": 192}},
        ),
        (QWEN3, 0.75, ("channels", "heads"), ("language",), {"language": {"layers": 2, "heads": 2, "kv_heads": 1}}),
        (llava_next.SHAPES[0], 0.8, ("layers", "channels"), ("vision", "language"), {}),
    ],
    ids=["channels", "layers", "heads", "tiles"],
)
def test_transformers_loads_a_pruned_folder_and_computes_our_logits(
    tmp_path, shards, shape, keep, units, parts, expected
):
    folder = make_checkpoint(tmp_path / "model", shape)
    config = PruningConfig(keep=keep, units=units, parts=parts)
    report = prune(folder, tmp_path / "pruned", config=config, calibration=samples(shards), device="cpu")
    for part, sizes in expected.items():
        assert report.kept[part] | sizes == report.kept[part]
    assert report.parameters_after / report.parameters_before == pytest.approx(keep, abs=0.06)
    oracle, model = Oracle(tmp_path / "pruned"), load_model(tmp_path / "pruned", device="cpu")
    conversation = CONVERSATIONS["multi-image"]
    with torch.no_grad():
        ours = model(Processor.load(tmp_path / "pruned")([conversation]))
    assert torch.allclose(ours, oracle.logits(oracle.inputs(conversation)), atol=2e-3)


TILES = [*llava_next.SHAPES[:1], *llava_next.SHAPES[2:], *llava_onevision.SHAPES[2:]]
"""Models that select one output of the tower or two, counted from either end."""


@pytest.mark.parametrize("shape", TILES, ids=lambda shape: shape.name)
def test_a_tower_of_tiles_without_a_layer_selects_the_outputs_that_it_did(tmp_path, shards, shape):
    """The pruned model computes what the original does when the removed layer is skipped."""
    folder = make_checkpoint(tmp_path / "model", shape)
    original = load_model(folder, device="cpu")
    blocks = list(original.vision.blocks)
    share = sum(p.numel() for p in blocks[0].parameters()) / sum(p.numel() for p in original.parameters())
    config = PruningConfig(keep=1 - share, units=("layers",), parts=("vision",))
    prune(folder, tmp_path / "pruned", config=config, calibration=samples(shards), device="cpu")
    pruned, conversation = load_model(tmp_path / "pruned", device="cpu"), CONVERSATIONS["multi-image"]
    kept = [block.mlp.fc1.weight for block in pruned.vision.blocks]
    [removed] = [one for one in blocks if not any(torch.equal(one.mlp.fc1.weight, weight) for weight in kept)]
    inputs = Processor.load(folder)([conversation])
    with torch.no_grad(), skipped(removed):
        ours, expected = pruned(inputs), original(inputs)
    assert torch.allclose(ours, expected, atol=1e-4)
    oracle = Oracle(tmp_path / "pruned")
    assert torch.allclose(ours, oracle.logits(oracle.inputs(conversation)), atol=2e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


def test_channels_without_effect_are_the_first_to_go(checkpoint, shards, tmp_path):
    """Half of the channels of every MLP are dead: with these gone, the model computes what it did."""
    tensors = load_file(checkpoint / "model.safetensors")
    dead = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:128]
    for name, tensor in tensors.items():
        if "mlp.up_proj.weight" in name and name.startswith("model.layers"):
            tensor[dead] = 0
    folder = tmp_path / "half"
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for measure in ("activation", "taylor"):
        config = PruningConfig(keep=0.84, parts=("language",), measure=measure)
        report = prune(folder, tmp_path / measure, config=config, calibration=samples(shards), device="cpu")
        assert 128 <= report.kept["language"]["channels"] < 256
        assert report.loss_after == pytest.approx(report.loss_before, abs=1e-5)


def test_importance_is_the_change_of_the_loss_that_autograd_gives(checkpoint, shards):
    model = load_model(checkpoint, device="cpu").requires_grad_(False)
    [batch, *_] = load_batches(samples(shards), Processor.load(checkpoint), 320)
    name = "language.layers.1.mlp.down_proj"
    found = input_importance(model, [name], [batch], "taylor")[name]
    seen = {}
    layer = model.get_submodule(name)

    def linear(x):
        seen["x"] = x.detach().requires_grad_()
        return torch.nn.functional.linear(seen["x"], layer.weight)

    layer.gated = lambda gate, up, *, saves_activation=False: linear(torch.nn.functional.silu(gate) * up)
    loss, _ = loss_of(model, batch)
    loss.backward()
    expected = (seen["x"] * seen["x"].grad).detach().square().sum(0)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-9)


def test_a_protected_layer_is_never_removed_and_the_model_is_unchanged_by_measuring(checkpoint, shards):
    model = load_model(checkpoint, device="cpu")
    batches = load_batches(samples(shards), Processor.load(checkpoint), 320)
    before = float(loss_of(model, batches[0])[0].detach())
    losses = layer_importance(model, list(model.language.layers), batches, protected={0})
    assert losses[0] == float("inf")
    assert losses[1] < float("inf")
    assert float(loss_of(model, batches[0])[0].detach()) == before


@pytest.mark.parametrize(("kind", "keep"), [("unstructured", 0.6), ("2:4", 0.5)])
def test_a_mask_leaves_the_size_and_says_that_it_brings_no_speed(checkpoint, shards, tmp_path, kind, keep):
    config = PruningConfig(keep=keep, kind=kind)
    report = prune(checkpoint, tmp_path / "masked", config=config, calibration=samples(shards), device="cpu")
    assert report.parameters_after == report.parameters_before
    assert report.speed.startswith("none")
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "masked"))
    masked = {name: tensor for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {name.split(".")[0] for name in masked} == {"model", "visual"}
    assert "model.embed_tokens.weight" not in masked
    for name, tensor in masked.items():
        kept = tensor != 0
        assert torch.equal(tensor[kept], before[name][kept])
        assert float(kept.float().mean()) == pytest.approx(keep, abs=0.02)
        if kind == "2:4":
            assert int(kept.unflatten(1, (-1, 4)).sum(2).max()) <= 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": 1.2}, "keep is 1.2"),
        ({"kind": "2:4"}, "keeps two weights of every four"),
        ({"units": ("heads",)}, "heads cannot be removed from this family"),
        ({"keep": 0.1}, "of the parameters; without them"),
        ({"keep": 0.9, "units": ("layers",)}, "no whole unit fits"),
        ({"keep": 0.4}, "add units|Raise --keep"),
    ],
)
def test_what_cannot_be_removed_is_refused_with_a_remedy(checkpoint, shards, tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        prune(checkpoint, tmp_path / "out", config=PruningConfig(**settings), calibration=samples(shards), device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_not_overwritten(checkpoint, shards):
    with pytest.raises(CheckpointError, match="not empty"):
        prune(checkpoint, checkpoint, config=PruningConfig(), calibration=samples(shards), device="cpu")


def test_the_command_reports_sizes_and_losses(checkpoint, shards, tmp_path):
    from typer.testing import CliRunner

    from saccade.cli import app

    options = ["--keep", "0.8", "--calibration", str(shards), "--num-samples", "8", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, ["prune", str(checkpoint), "-o", str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["parameters_after"] < 0.85 * report["parameters_before"]
