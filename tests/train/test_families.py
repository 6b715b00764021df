"""Every family in training: loss and gradients of a step are those of `transformers`, and runs train it."""

import pytest
import torch
from closeness import assert_close
from model import llava_onevision
from model.hugging_face import (
    CONVERSATIONS,
    ONE_PER_FAMILY,
    SHAPES,
    Oracle,
    answer,
    ask,
    make_checkpoint,
    picture,
)
from train.running import read_recipe, write_recipe, write_shards

from saccade.model import generate, load_model
from saccade.model.families import DEFAULT_FAMILY, VISION_LANGUAGE, family_of, named_size
from saccade.model.initialize import initialize_random
from saccade.model.vlm import VLM
from saccade.processor import Processor
from saccade.train import train
from saccade.train.loss import ModelWithLoss, count_labels, next_token_labels

BOUND = 1e-4
ROUNDING = 1e-6
"""Gradients below this, relative to the largest, are zero but for rounding."""


@pytest.fixture(scope="module", params=[SHAPES[0], *ONE_PER_FAMILY], ids=lambda shape: shape.name)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("families") / "checkpoint", request.param)


def test_loss_and_gradients_of_a_step_are_those_of_transformers(folder):
    assert_same_step(folder, CONVERSATIONS["multi-turn"])


FRAMES = [picture(60, 80, seed) for seed in range(3)]


@pytest.mark.parametrize(
    "question",
    [ask(picture(644, 364, 1), "Look."), {"role": "user", "content": [{"type": "video", "video": FRAMES}]}],
    ids=["tiles", "video"],
)
def test_gradients_pass_through_interpolated_tiles_and_pooled_frames(question, tmp_path):
    """A single image and a video, where several images are squares without either."""
    folder = make_checkpoint(tmp_path / "checkpoint", llava_onevision.SHAPES[1])
    assert_same_step(folder, [question, answer("A wave.")])


def assert_same_step(folder, messages):
    oracle = Oracle(folder)
    inputs, theirs = Processor.load(folder)([messages]), oracle.inputs(messages)
    labels = next_token_labels(inputs)
    module = ModelWithLoss(load_model(folder, device="cpu").train())
    loss, _ = module(inputs, labels, torch.tensor(float(count_labels(labels))), count_labels(labels))
    loss.backward()
    targets = torch.where(inputs.loss_mask, inputs.token_ids, -100)[None]
    expected = oracle.model.train()(**theirs, labels=targets).loss
    expected.backward()
    assert_close("loss", loss.detach(), expected.detach(), BOUND)
    family, gradients = family_of(folder), dict(oracle.model.named_parameters())
    largest = max(float(theirs.grad.square().mean()) for theirs in gradients.values() if theirs.grad is not None) ** 0.5
    for name, parameter in module.model.named_parameters():
        theirs = gradients[family.name_in_transformers(name)]
        if parameter.grad is None:
            assert theirs.grad is None, f"{name} is after the selected layer"
            continue
        if theirs.grad is not None and theirs.grad.abs().max() < ROUNDING * largest:
            assert parameter.grad.abs().max() < ROUNDING * largest, (
                f"{name}: a bias of keys without positions changes nothing"
            )
            continue
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad  # features for layers there are not
        assert_close(name, parameter.grad[tuple(slice(size) for size in theirs.shape)], expected, BOUND)


@pytest.mark.parametrize("family", VISION_LANGUAGE)
@pytest.mark.parametrize(
    "settings",
    [
        ["parallel.recompute_vision=selective", "parallel.recompute_language=full"],
        ["stages.0.lora={rank=2, targets=['q_proj', 'down_proj', TOWER], parts=['language', 'vision']}"],
    ],
    ids=["full", "lora"],
)
def test_a_run_trains_every_family_and_its_export_is_served(family, settings, tmp_path):
    """Some sequences are text-only and run the dummy image."""
    size = named_size("tiny" if family == DEFAULT_FAMILY.model_type else f"{family}/tiny")
    initialize_random(tmp_path / "checkpoint", size, dtype=torch.float32)
    shards = write_shards(tmp_path / "shards", 16, text_every=3)
    recipe = write_recipe(
        tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=tmp_path / "checkpoint", shards=shards
    )
    with torch.device("meta"):
        has_qkv = any(name.endswith(".qkv") for name, _ in VLM(size).vision.named_modules())
    tower = "'qkv', 'proj'" if has_qkv else "'out_proj', 'fc1'"
    settings = [setting.replace("TOWER", tower) for setting in settings]
    train(read_recipe(recipe, "stages.0.steps=2", "stages.0.schedule.warmup_steps=1", *settings), device="cpu")
    [exported] = (tmp_path / "run" / "checkpoints").iterdir()
    before, after = (load_model(folder, device="cpu") for folder in (tmp_path / "checkpoint", exported))
    changed = {name for name, value in after.named_parameters() if not torch.equal(value, before.get_parameter(name))}
    assert {"vision", "language"} <= {name.partition(".")[0] for name in changed}
    inputs = Processor.load(exported)([CONVERSATIONS["28x28"]], add_generation_prompt=True)
    assert len(generate(after, inputs, max_new_tokens=2)[0]) == 2
