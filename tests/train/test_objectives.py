"""Objectives: cross entropy is what it was before there was a seam, and the training loop knows no objective by name."""

import ast
from pathlib import Path

import pytest
import torch
from train.running import losses, make_checkpoint, read_recipe, write_recipe, write_shards

import saccade.train
from saccade.train.batches import BatchIterator, open_stage_stream
from saccade.train.objectives.build import build_objective
from saccade.train.parallelize import parallelize
from saccade.train.stages import train
from saccade.world import World

CPU = World(0, 1, 0, torch.device("cpu"))
SETTINGS = {
    "fp32": [],
    "bf16": ["model.dtype=bf16"],
    "lora": ["stages.0.lora.rank=4"],
    "qlora": ["stages.0.lora.rank=4", "stages.0.lora.quantize_base=int4", "model.dtype=bf16"],
    "recompute": ["parallel.recompute_vision=full", "parallel.recompute_language=selective"],
    "smoothed": ["stages.0.objective.label_smoothing=0.1"],
}
RECORDED = {
    "fp32": [5.676171, 5.248135, 5.012188, 4.599062],
    "bf16": [5.675918, 5.252604, 5.015436, 4.602083],
    "lora": [5.676171, 5.596066, 5.486110, 5.243531],
}
"""Losses of the steps before the objectives had a seam of their own."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")
    make_checkpoint(folder / "checkpoint")
    write_shards(folder / "shards", text_every=3)
    return folder


def recipe(root, name, *settings):
    path = write_recipe(root / f"{name}.toml", run=root / name, checkpoint=root / "checkpoint", shards=root / "shards")
    return read_recipe(path, *settings)


def micro_batches(config, count=2):
    """Packed sequences of the recipe's first step, with their labels."""
    stage = config.stages[0]
    built = parallelize(config.model.folder, stage, config.parallel, CPU, dtype=config.model.dtype, seed=config.seed)
    with open_stage_stream(config, stage) as stream:
        batches = BatchIterator(stream, built.model.config, (), CPU.device, built.module.objective)
        found = list(batches.next(with_sources=False).on_device)
    return built, found[:count]


@pytest.mark.parametrize("name", SETTINGS)
def test_cross_entropy_behind_the_seam_is_that_of_the_head_to_the_last_bit(root, name):
    config = recipe(root, name, *SETTINGS[name])
    built, batches = micro_batches(config)
    smoothing = config.stages[0].objective.label_smoothing
    for batch in batches:
        count = torch.tensor(float(batch.num_loss_tokens))
        found = []
        for is_direct in (True, False):
            built.module.zero_grad()
            if is_direct:
                hidden = built.model.hidden_states(batch.inputs, encode_dummy_image=built.module.encode_dummy_image)
                loss = built.model.head.cross_entropy(
                    hidden, batch.labels, count=count, num_labels=batch.num_loss_tokens, label_smoothing=smoothing
                )
            else:
                loss, _ = built.wrapped(batch.inputs, batch.labels, count, batch.num_loss_tokens)
            loss.backward()
            gradients = {name: p.grad for name, p in built.model.named_parameters() if p.grad is not None}
            found.append((loss.detach(), gradients))
        (direct, direct_gradients), (seam, gradients) = found
        assert torch.equal(direct, seam)
        assert gradients.keys() == direct_gradients.keys()
        assert all(torch.equal(gradients[name], direct_gradients[name]) for name in gradients)


@pytest.mark.parametrize("name", RECORDED)
def test_a_run_has_the_losses_recorded_before_the_seam(root, name):
    """The bits depend on the CPU's matrix products; on one machine they were equal, with 1e-3 for bf16 elsewhere."""
    config = recipe(root, f"recorded-{name}", f"stages.0.steps={len(RECORDED[name])}", *SETTINGS[name])
    train(config, device="cpu")
    assert losses(config.run) == pytest.approx(RECORDED[name], rel=1e-3 if name == "bf16" else 1e-5)


def test_the_training_loop_imports_no_objective_but_the_default_and_its_builder():
    package = Path(saccade.train.__file__).parent
    known = {path.stem for path in (package / "objectives").glob("*.py")} - {"__init__", "objective", "config", "build"}
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saccade.train.objectives."):
                name = node.module.rpartition(".")[2]
                assert name not in known or (path.name, name) == ("loss.py", "cross_entropy"), f"{path.name}: {name}"


def test_every_objective_is_made_by_the_builder(root):
    objective = build_objective(recipe(root, "default").stages[0].objective)
    assert objective.metric_names == ()
