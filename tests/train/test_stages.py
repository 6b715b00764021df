"""Several stages as one run: what is carried over, what restarts, and that it resumes anywhere."""

import json
import logging
import os
import shutil

import pytest
import torch
from train.running import losses, make_checkpoint, read_recipe, records, write_recipe, write_shards

from saccade.config import encode, load_config, write_config
from saccade.errors import CheckpointError, ConfigError
from saccade.model import load_model
from saccade.train import TrainConfig, train
from saccade.train.config import changed_keys
from saccade.train.process import lock_folder
from saccade.train.trainer import Ending

RECIPE = """
run = "{run}"
seed = 5
[model]
folder = "{checkpoint}"
dtype = "fp32"
[checkpoint]
every = 2
keep_last = 20
export_dtype = "fp32"
[log]
every = 1

[[stages]]
name = "align"
steps = 3
[stages.data]
sources = [{{ path = "{shards}" }}]
max_seq_len = 240
num_workers = 0
[stages.optimizer]
lr = 0.0
lrs = {{ projector = 1e-3 }}

[[stages]]
name = "pretrain"
tokens = 960
continue_optimizer = true
[stages.data]
sources = [{{ path = "{shards}" }}]
max_seq_len = 120
global_batch_size = 2
num_workers = 0
[stages.optimizer]
lr = 1e-4

[[stages]]
name = "instruct"
epochs = 1
[stages.data]
sources = [{{ path = "{shards}" }}]
max_seq_len = 240
global_batch_size = 2
num_workers = 0
[stages.optimizer]
lr = 1e-4
lrs = {{ vision = 0 }}
[stages.schedule]
kind = "linear"
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    run_root = tmp_path_factory.mktemp("stages")
    return make_checkpoint(run_root / "checkpoint"), write_shards(run_root / "shards", count=12)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, parts):
    """All three stages without interruption."""
    run_root = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(
        run_root / "recipe.toml", run=run_root / "run", checkpoint=parts[0], shards=parts[1], text=RECIPE
    )
    assert train(read_recipe(recipe), device="cpu") is Ending.FINISHED
    return run_root / "run"


def progress(run, step):
    return json.loads((run / f"state/step-{step:08d}/progress.json").read_text())


def weights(folder):
    return dict(load_model(folder, device="cpu").named_parameters())


def changed_parts(before, after):
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def test_each_stage_trains_its_parts_and_starts_from_the_previous_weights(whole, parts):
    start = weights(parts[0])
    folders = sorted((whole / "checkpoints").iterdir())
    align, pretrain, instruct = (weights(folder) for folder in folders)
    assert [folder.name for folder in folders[:2]] == ["step-00000003", "step-00000007"]
    assert changed_parts(start, align) == {"projector"}
    assert changed_parts(align, pretrain) == {"vision", "projector", "language"}
    assert changed_parts(pretrain, instruct) == {"projector", "language"}
    stages = [record["stage"] for _, record in sorted(records(whole).items())]
    assert stages == ["align"] * 3 + ["pretrain"] * 4 + ["instruct"] * (len(stages) - 7)


def test_run_counters_continue_across_stages_and_stage_counters_restart(whole):
    at_the_end = progress(whole, 3)
    assert (at_the_end["stage"], at_the_end["stage_step"], at_the_end["is_stage_done"]) == (0, 3, True)
    early = progress(whole, 4)
    assert (early["stage"], early["step"], early["stage_step"], early["data"]["batch"]) == (1, 4, 1, 1)
    assert early["samples"] > early["stage_samples"]
    seen = [record["tokens"] for _, record in sorted(records(whole).items())]
    assert seen == sorted(seen)


def test_optimizer_state_is_kept_only_with_continue_optimizer(whole):
    """The second stage takes over the projector's moments after 3 steps; the third starts from zero."""
    assert progress(whole, 4)["optimizer_steps"] == 4
    assert progress(whole, 8)["optimizer_steps"] == 1


@pytest.mark.parametrize("kept", [pytest.param(2, marks=pytest.mark.slow), 3, 5, 7])
def test_a_run_resumed_anywhere_equals_an_uninterrupted_one(tmp_path, whole, parts, kept):
    """In the middle of a stage, at its end, in the next one: all states after the `kept` step are lost."""
    run = shutil.copytree(whole, tmp_path / "run")
    for state in (run / "state").iterdir():
        if int(state.name.removeprefix("step-")) > kept:
            shutil.rmtree(state)
    recipe = write_recipe(tmp_path / "recipe.toml", run=run, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    train(read_recipe(recipe), device="cpu")
    assert losses(run) == losses(whole)
    last = sorted(path.name for path in (whole / "checkpoints").iterdir())[-1]
    ours, theirs = weights(run / "checkpoints" / last), weights(whole / "checkpoints" / last)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ------------------------------------------------------------------ settings


def test_the_resolved_config_in_the_run_folder_loads_back_equal(whole, parts, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.toml", run=whole, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    config = read_recipe(recipe, "stages.align.clip_norm=inf", "log.trackers.tensorboard=true")
    write_config(config, tmp_path / "again.toml")
    assert load_config(TrainConfig, tmp_path / "again.toml") == config
    assert load_config(TrainConfig, whole / "config.toml") == read_recipe(recipe)
    assert config.fingerprint != read_recipe(recipe).fingerprint
    assert read_recipe(recipe, "log.every=7", "parallel.strategy=fsdp").fingerprint == read_recipe(recipe).fingerprint


def test_changed_settings_are_logged_on_resume(whole, parts, tmp_path, caplog):
    recipe = write_recipe(tmp_path / "recipe.toml", run=whole, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    config, other = read_recipe(recipe), read_recipe(recipe, "stages.instruct.optimizer.lr=2e-4", "seed=6")
    assert changed_keys(config, other) == ["seed 5 -> 6", "stages.2.optimizer.lr 0.0001 -> 0.0002"]
    assert changed_keys(config, config) == []
    with caplog.at_level(logging.INFO):
        train(read_recipe(recipe, "log.every=2"), device="cpu")
    assert "settings changed since the last start: log.every 1 -> 2" in caplog.text
    assert "every stage of this run is done" in caplog.text
    train(config, device="cpu")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stages=[]"], "stages is empty"),
        (["stages.align.name=pretrain"], "each must be unique"),
        (["stages.align.name=a b"], "use letters, digits"),
        (["stages.align.steps=0"], "steps is 0; it must be above 0"),
        (["stages.align.clip_norm=-1"], "clip_norm is -1.0"),
        (["stages.align.data.sources=[]"], "sources is empty"),
        (["stages.align.data.num_workers=-1"], "workers is -1"),
        (['stages.instruct.data.sources=[{path="a", weight=1}]'], "a weighted mixture has no epochs"),
        (["stages.align.optimzer.lr=1"], "unknown key stages[0].optimzer. Did you mean optimizer?"),
        (["checkpoint.keep_last=0"], "keep_last is 0"),
        (["log.every=0"], "every is 0"),
        (["stages.align.schedule.warmup_steps=4"], "stage align: schedule: 4 steps of warm-up do not fit in 3"),
        (["stages.pretrain.schedule.warmup_steps=5"], "stage pretrain: schedule: 5 steps of warm-up do not fit in 4"),
        (
            ["stages.instruct.schedule={kind='wsd', decay_steps=3}"],
            "stage instruct: decay_steps counts back from the last step",
        ),
        (["validation.every=0"], "every is 0"),
        (["seed=-1"], "seed is -1"),
        (["model.dtype=fp64"], "model.dtype = 'fp64' is not one of"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, overrides, words):
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path, checkpoint=tmp_path, shards=tmp_path, text=RECIPE)
    with pytest.raises(ConfigError) as caught:
        read_recipe(recipe, *overrides)
    assert words in str(caught.value)


def test_a_recipe_with_two_lengths_of_a_stage_is_refused(tmp_path):
    text = RECIPE.replace('name = "align"', 'name = "align"\nepochs = 1', 1)
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path, checkpoint=tmp_path, shards=tmp_path, text=text)
    with pytest.raises(ConfigError, match="give exactly one of steps, epochs and tokens"):
        read_recipe(recipe)


def test_a_run_folder_with_more_stages_than_the_recipe_is_refused(whole, parts, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    recipe = write_recipe(tmp_path / "recipe.toml", run=run, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    config = read_recipe(recipe)
    fewer = encode(config) | {"stages": encode(config)["stages"][:1]}
    from saccade.config import decode

    with pytest.raises(ConfigError, match="is in stage 2, the recipe has 1"):
        train(decode(TrainConfig, fewer), device="cpu")


def test_more_epochs_extend_a_finished_stage_and_fewer_do_not(whole, parts, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    recipe = write_recipe(tmp_path / "recipe.toml", run=run, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    last = max(records(run))
    before = records(run)[last]["samples"]
    assert train(read_recipe(recipe, "stages.instruct.epochs=2"), device="cpu") is Ending.FINISHED
    assert records(run)[max(records(run))]["samples"] == before + 12, "every sample once more"
    steps = max(records(run))
    assert train(read_recipe(recipe), device="cpu") is Ending.FINISHED
    assert max(records(run)) == steps


def test_sequence_length_and_batch_size_may_change_on_a_resume(parts, tmp_path):
    recipe = write_recipe(
        tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=parts[0], shards=parts[1], text=RECIPE
    )
    short = ["stages.align.steps=2", "stages.pretrain.tokens=240", "stages.instruct.schedule.kind=constant"]
    train(read_recipe(recipe, *short, "stages.instruct.epochs=1"), device="cpu")
    for step in range(5, 20):
        shutil.rmtree(tmp_path / f"run/state/step-{step:08d}", ignore_errors=True)
    changed = ["stages.instruct.data.max_seq_len=120", "stages.instruct.data.global_batch_size=3"]
    assert train(read_recipe(recipe, *short, *changed), device="cpu") is Ending.FINISHED
    found = records(tmp_path / "run")
    stage = [record for record in found.values() if record["stage"] == "instruct"]
    before = [record["samples"] for record in found.values() if record["stage"] == "pretrain"][-1]
    assert stage[-1]["samples"] - before == 12, "one epoch: every sample exactly once"


def test_an_unreadable_config_in_the_run_folder_does_not_prevent_a_resume(whole, parts, tmp_path, caplog):
    run = shutil.copytree(whole, tmp_path / "run")
    for step in range(6, 20):
        shutil.rmtree(run / f"state/step-{step:08d}", ignore_errors=True)
    (run / "config.toml").write_text("run = 'broken off")
    recipe = write_recipe(tmp_path / "recipe.toml", run=run, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    assert train(read_recipe(recipe), device="cpu") is Ending.FINISHED
    assert "cannot be read and will be overwritten" in caplog.text
    assert load_config(TrainConfig, run / "config.toml") == read_recipe(recipe)
    assert losses(run) == losses(whole)


def test_a_run_folder_that_cannot_be_created_is_refused(parts, tmp_path):
    (tmp_path / "file").write_text("in the way")
    run = tmp_path / "file" / "run"
    recipe = write_recipe(tmp_path / "recipe.toml", run=run, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    with pytest.raises(ConfigError, match=r"file/run cannot be the run folder: Not a directory\. .*--set run=NAME"):
        train(read_recipe(recipe), device="cpu")


def test_a_locked_run_folder_is_refused_with_its_owner(parts, tmp_path):
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.toml", run=run, checkpoint=parts[0], shards=parts[1], text=RECIPE)
    with (
        lock_folder(run),
        pytest.raises(ConfigError, match=rf"run is in use by another process \(pid {os.getpid()} on "),
    ):
        train(read_recipe(recipe), device="cpu")
    with lock_folder(run):
        pass


def test_a_missing_checkpoint_folder_is_named(tmp_path, parts):
    nowhere = tmp_path / "nowhere"
    recipe = write_recipe(
        tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=nowhere, shards=parts[1], text=RECIPE
    )
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder"):
        train(read_recipe(recipe), device="cpu")


def test_the_config_needs_no_torch():
    import subprocess
    import sys

    script = "import sys, saccade.train, saccade.train.config, saccade.train.guard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
