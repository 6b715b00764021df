"""Options against overfitting.

These are averaged weights, augmentation, label smoothing, stochastic depth, token dropout, and the checkpoint with the
lowest validation loss.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from train.running import losses, make_root, read_recipe, recipe_in, run_together

from saccade.config import load_config
from saccade.errors import ConfigError
from saccade.model.config import ModelConfig
from saccade.model.initialize import named_size
from saccade.train.config import TrainConfig
from saccade.train.dry_run import MicroBatchSize
from saccade.train.loss import empty_micro_batch
from saccade.train.memory import MemoryPlanner
from saccade.train.stages import train

DECAY = 0.6
STEPS = 6
AUGMENT = "stages.0.data.augment={crop_scale=[0.4, 1.0], crop_ratio=[0.75, 1.333], flip=0.5, brightness=0.3, erase=0.5}"
DROPPED = ["stages.0.drop_path=0.5", "stages.0.data.token_dropout=0.2"]


@pytest.fixture(scope="module")
def run_root(tmp_path_factory):
    """Train and export every step: plain, with an average, and averaged on two fsdp ranks, also with drop path."""
    folder = make_root(tmp_path_factory.mktemp("overfitting"), num_held_out=12)
    train(read_recipe(recipe_in(folder, "plain"), f"stages.0.steps={STEPS}", "checkpoint.export_every=1"), device="cpu")
    train(read_recipe(recipe_in(folder, "averaged"), *averaging(folder)), device="cpu")
    dropped = [*averaging(folder), *DROPPED, "parallel.recompute_vision=full"]
    run_together(
        [
            {"recipe": str(recipe_in(folder, "fsdp")), "set": averaging(folder)},
            {"recipe": str(recipe_in(folder, "fsdp-dropped")), "set": dropped},
        ],
        folder,
        num_ranks=2,
    )
    return folder


def averaging(folder, *more):
    sources = f"validation.sources=[{{path='{folder / 'held-out'}'}}]"
    return [
        f"stages.0.steps={STEPS}", f"stages.0.ema_decay={DECAY}", "checkpoint.every=2", "checkpoint.keep_last=20",
        "validation.every=3", sources, "validation.num_generations=0", *more,
    ]  # fmt: skip


def exported(run, step=STEPS):
    return load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")


def validations(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["validation"]["loss"] for line in lines if "validation" in line}


def assert_same_weights(actual, expected, atol=0.0):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(actual[name], tensor, rtol=0.0, atol=atol), name


# ------------------------------------------------------------------ average


def test_the_average_is_exported_and_training_is_the_same_without_it(run_root):
    assert losses(run_root / "averaged") == losses(run_root / "plain")
    average = load_file(run_root / "checkpoint/model.safetensors")
    for step in range(1, STEPS + 1):
        decay = min(DECAY, step / (9 + step))
        weights = exported(run_root / "plain", step)
        average = {name: decay * x + (1 - decay) * weights[name] for name, x in average.items()}
    assert_same_weights(exported(run_root / "averaged"), average, atol=1e-6)


def test_the_average_is_what_is_validated(run_root):
    settings = [
        f"model.folder={run_root / 'averaged/checkpoints' / f'step-{STEPS:08d}'}",
        "stages.0.optimizer.lr=1e-15",
    ]
    again = averaging(run_root, *settings, "stages.0.steps=4")
    train(read_recipe(recipe_in(run_root, "again"), *again), device="cpu")
    assert validations(run_root / "averaged")[STEPS] == pytest.approx(validations(run_root / "again")[4], rel=1e-6)


@pytest.mark.slow
def test_sharded_averages_are_those_of_a_single_device(run_root):
    assert_same_weights(exported(run_root / "fsdp"), exported(run_root / "averaged"), atol=1e-5)
    for step, loss in validations(run_root / "averaged").items():
        assert validations(run_root / "fsdp")[step] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    ("is_custom", "reshard"),
    [
        (False, "false"), (True, "true"), pytest.param(False, "true", marks=pytest.mark.slow),
        pytest.param(True, "false", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_validating_the_average_of_a_sharded_run_does_not_change_its_training(run_root, reshard, is_custom):
    """Parameters that a forward pass without backward has gathered are gathered again for the next step."""
    name = f"resharded-{reshard}-{is_custom}"
    settings = averaging(run_root, "parallel.strategy=fsdp", f"parallel.reshard_after_forward={reshard}")

    def validate(model, step):
        inputs = empty_micro_batch(model.model.config.vision)
        model.score(inputs, torch.zeros(inputs.num_tokens, dtype=torch.int64))
        return {}

    if is_custom:
        train(
            read_recipe(recipe_in(run_root, name), *settings, "validation.sources=[]"), device="cpu", validate=validate
        )
    else:
        train(read_recipe(recipe_in(run_root, name), *settings), device="cpu")
    assert losses(run_root / name) == pytest.approx(losses(run_root / "plain"), abs=1e-5)


def test_the_next_stage_starts_from_the_average(run_root, tmp_path):
    shutil.copytree(run_root / "averaged", tmp_path / "run")
    text = recipe_in(run_root, "two-stages").read_text() + (
        f'[[stages]]\nname = "more"\nsteps = 2\n'
        f'data = {{ sources = [{{ path = "{run_root / "shards"}" }}], num_workers = 0 }}\n'
        "optimizer = { lr = 0.0, lrs = { projector = 1e-3 } }\n"
    )
    (tmp_path / "recipe.toml").write_text(text)
    train(read_recipe(tmp_path / "recipe.toml", f"run={tmp_path / 'run'}", *averaging(run_root)), device="cpu")
    before, after = exported(run_root / "averaged"), exported(tmp_path / "run", STEPS + 2)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("merger" in name for name in changed), "the frozen parts are the averages that were exported"


def test_an_average_takes_four_bytes_per_trained_parameter_in_the_plan():
    config: ModelConfig = named_size("tiny")
    size = MicroBatchSize(tokens=64, patches=64)
    plain, averaged = (
        MemoryPlanner(config=config, has_average=has_average).plan(size).parts for has_average in (False, True)
    )
    assert averaged["averages"] == averaged["masters"] == plain["masters"]
    assert "averages" not in plain


# ------------------------------------------------------------------ all of them, resumed


@pytest.mark.parametrize("kept", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_with_all_options_equals_an_uninterrupted_one(run_root, tmp_path, kept):
    options = averaging(
        run_root, AUGMENT, *DROPPED, "stages.0.objective.label_smoothing=0.1", "validation.export_best=true"
    )
    whole = run_root / "all-options"
    if not whole.exists():
        train(read_recipe(recipe_in(run_root, "all-options"), *options), device="cpu")
    shutil.copytree(whole, tmp_path / "run", ignore=lambda _, names: {name for name in names if name == "checkpoints"})
    for state in (tmp_path / "run/state").glob("step-*"):
        if int(state.name.removeprefix("step-")) > kept:
            shutil.rmtree(state)
    train(read_recipe(run_root / "all-options.toml", f"run={tmp_path / 'run'}", *options), device="cpu")
    assert losses(tmp_path / "run") == losses(whole)
    assert validations(tmp_path / "run") == validations(whole)
    assert_same_weights(exported(tmp_path / "run"), exported(whole))


def test_smoothed_labels_change_the_loss_of_training_and_not_of_validation(run_root):
    settings = [
        "stages.0.steps=1",
        "stages.0.schedule.warmup_steps=0",
        "stages.0.optimizer.lr=1e-15",
        "validation.every=1",
    ]
    found = {}
    for smoothing in (0.0, 0.2):
        name = f"smoothed-{smoothing}"
        config = averaging(run_root, *settings, f"stages.0.objective.label_smoothing={smoothing}")
        train(read_recipe(recipe_in(run_root, name), *config), device="cpu")
        found[smoothing] = losses(run_root / name)[0], validations(run_root / name)[1]
    assert found[0.0][0] != pytest.approx(found[0.2][0], rel=1e-4)
    assert found[0.0][1] == pytest.approx(found[0.2][1], rel=1e-6)


# ------------------------------------------------------------------ dropped paths and tokens


def test_activation_checkpointing_repeats_the_dropped_paths(run_root):
    for recompute in ("none", "full"):
        settings = [*DROPPED, "stages.0.steps=4", f"parallel.recompute_vision={recompute}"]
        train(read_recipe(recipe_in(run_root, f"dropped-{recompute}"), *settings), device="cpu")
    assert losses(run_root / "dropped-full") == losses(run_root / "dropped-none")
    assert losses(run_root / "dropped-none") != losses(run_root / "plain")[:4]


def test_a_sharded_run_drops_paths_and_learns(run_root):
    found = losses(run_root / "fsdp-dropped")
    assert len(found) == STEPS
    assert found != losses(run_root / "fsdp")
    assert found[-1] < found[0]


@pytest.mark.parametrize("setting", DROPPED)
def test_what_is_dropped_changes_the_loss_of_training_and_not_of_validation(run_root, setting):
    still = [
        "stages.0.steps=1",
        "stages.0.schedule.warmup_steps=0",
        "stages.0.optimizer.lr=1e-15",
        "validation.every=1",
    ]
    name = setting.split("=")[0]
    for run, more in ((name, [setting]), ("still", [])):
        train(read_recipe(recipe_in(run_root, run), *averaging(run_root, *still, *more)), device="cpu")
    assert losses(run_root / name)[0] != losses(run_root / "still")[0]
    assert validations(run_root / name)[1] == pytest.approx(validations(run_root / "still")[1], rel=1e-6)


# ------------------------------------------------------------------ best checkpoint


def test_the_checkpoint_with_the_lowest_validation_loss_is_kept(run_root):
    """The learning rate is far too high after a warm-up: the loss falls, then rises."""
    config = averaging(
        run_root, "validation.every=1", "validation.export_best=true", "checkpoint.export_every=1",
        "stages.0.schedule.warmup_steps=6", "stages.0.optimizer.lr=0.3", "guard.spike_sigmas=inf",
    )  # fmt: skip
    train(read_recipe(recipe_in(run_root, "best"), *config), device="cpu")
    found = validations(run_root / "best")
    best = min(found, key=found.get)
    assert best < STEPS
    kept = load_file(run_root / "best/checkpoints/best/model.safetensors")
    assert_same_weights(kept, exported(run_root / "best", best))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.0.ema_decay=1.0", "ema_decay is 1.0"),
        ("stages.0.objective.label_smoothing=1.0", "label_smoothing is 1.0"),
        ("validation.export_best=true", "needs validation.sources"),
        ("stages.0.data.augment={crop_scale=[0.0, 1.0]}", "crop_scale is"),
        ("stages.0.drop_path=1.0", "drop_path is 1.0"),
        ("stages.0.data.token_dropout=-0.1", "token_dropout is -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(run_root, override, words):
    with pytest.raises(ConfigError, match=words):
        load_config(TrainConfig, recipe_in(run_root, "refused"), [override])


@pytest.mark.parametrize("setting", DROPPED)
def test_preference_pairs_are_not_compared_with_a_reference_that_drops_nothing(run_root, setting):
    with pytest.raises(ConfigError, match=r"Remove drop_path and data\.token_dropout"):
        load_config(TrainConfig, recipe_in(run_root, "refused"), ["stages.0.objective.dpo={}", setting])


def test_dropout_of_adapters_is_refused_with_preference_pairs_and_may_differ_between_stages(run_root):
    with pytest.raises(ConfigError, match=r"stage learn: preference pairs .* drops nothing\. Remove lora\.dropout"):
        load_config(
            TrainConfig, recipe_in(run_root, "refused"), ["stages.0.objective.dpo={}", "stages.0.lora.dropout=0.1"]
        )
    text = recipe_in(run_root, "two-dropouts").read_text()
    stage = text[text.index("[[stages]]") :].replace("learn", "prefer")
    (run_root / "two-dropouts.toml").write_text(text + stage)
    lora = ["stages.learn.lora={rank=4, dropout=0.1}", "stages.prefer.lora={rank=4}", "stages.prefer.objective.dpo={}"]
    assert load_config(TrainConfig, run_root / "two-dropouts.toml", lora).stages[1].lora.dropout == 0.0
    with pytest.raises(ConfigError, match="the lora sections of stages learn and prefer differ"):
        load_config(TrainConfig, run_root / "two-dropouts.toml", [*lora, "stages.prefer.lora.rank=8"])
