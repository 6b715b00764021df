"""Distillation and quantization-aware training give back what pruning and rounding cost (`bench/recover.py`)."""

import pytest
import torch
from train.running import make_checkpoint, read_recipe, write_recipe, write_shards

from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.importance import mean_loss
from saccade.compress.pruning import PruningConfig, prune
from saccade.model import load_model, save_model
from saccade.model.fake_quantized_linear import round_weight
from saccade.model.linear import Linear
from saccade.model.quantization import fitting_group
from saccade.processor import Processor
from saccade.train.stages import train

STEPS = 40
OPTIMIZER = [
    "stages.0.optimizer.kind=muon",
    "stages.0.optimizer.lr=4e-3",
    "stages.0.data.max_seq_len=480",
    "log.every=100",
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recovery")
    make_checkpoint(folder / "start")
    write_shards(folder / "train", 160)
    trained(folder, "original", folder / "start", "stages.0.steps=60")
    return folder


def trained(root, name, start, *settings):
    path = write_recipe(root / f"{name}.toml", run=root / name, checkpoint=start, shards=root / "train")
    train(read_recipe(path, *OPTIMIZER, *settings), device="cpu")
    return max((root / name / "checkpoints").glob("step-*"))


def original(root):
    return max((root / "original" / "checkpoints").glob("step-*"))


def taught(root, name, start, *settings):
    teaching = [
        f"stages.0.objective.distillation.teacher={original(root)}",
        "stages.0.objective.distillation.kl_weight=1.0",
    ]
    return trained(root, name, start, f"stages.0.steps={STEPS}", *teaching, *settings)


def loss_on_samples(root, folder):
    samples = CalibrationConfig(shards=(str(root / "train"),), num_samples=48, max_tokens=1024, seed=7)
    batches = load_batches(samples, Processor.load(folder), 320)
    return mean_loss(load_model(folder, device="cpu", dtype=torch.float32), batches)


def test_distillation_gives_back_half_of_what_pruning_to_70_percent_costs(root):
    samples = CalibrationConfig(shards=(str(root / "train"),), num_samples=32, max_tokens=1024)
    report = prune(original(root), root / "pruned", config=PruningConfig(keep=0.7), calibration=samples, device="cpu")
    assert report.parameters_after / report.parameters_before == pytest.approx(0.7, abs=0.02)
    before, pruned = (loss_on_samples(root, folder) for folder in (original(root), root / "pruned"))
    recovered = loss_on_samples(root, taught(root, "distilled", root / "pruned"))
    assert pruned > before + 0.05
    assert pruned - recovered > 0.5 * (pruned - before), (before, pruned, recovered)


def test_quantization_aware_training_beats_rounding_where_rounding_costs_most(root):
    """Weights have two bits here: with four, nothing is lost on so small a task."""
    model = load_model(original(root), device="cpu")
    with torch.no_grad():
        for name, layer in model.named_modules():
            if type(layer) is Linear and name.startswith(("vision.", "language.")):
                inputs = layer.stored_shape[1]
                part = layer.weight[:, :inputs]
                part.copy_(round_weight(part, "int4", fitting_group(inputs, 128), 2))
    save_model(model, root / "rounded", like=original(root))
    exported = taught(root, "qat", original(root), "stages.0.qat.bits=2")
    compress(exported, root / "stored", scheme="w4a16-rtn", device="cpu")
    before, rounded, stored = (
        loss_on_samples(root, folder) for folder in (original(root), root / "rounded", root / "stored")
    )
    assert rounded > before + 0.05
    assert rounded - stored > 0.25 * (rounded - before), (before, rounded, stored)
    assert stored == pytest.approx(loss_on_samples(root, exported), abs=1e-4), "storing it as int4 changes nothing"
