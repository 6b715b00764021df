"""Validation changes nothing; traces and out-of-memory errors explain what happened."""

import json
import os
import random
import signal

import numpy as np
import pytest
import torch
from train.running import losses, make_root, read_recipe, recipe_in, run_together

from saccade.config import load_config
from saccade.data.toy import toy_sample
from saccade.errors import ConfigError
from saccade.model.weights import load_model
from saccade.processor import Processor
from saccade.report.page import thumbnail
from saccade.train.config import TrainConfig
from saccade.train.loss import ModelWithLoss, next_token_labels
from saccade.train.saved_state import states
from saccade.train.stages import train
from saccade.train.trainer import Ending
from saccade.train.validation import THUMBNAIL_SIDE, preserve_random_state


@pytest.fixture(scope="module")
def run_root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("validation"), num_held_out=20)


def validating(run_root, *more):
    """Settings of a run with validation every third step."""
    sources = f"validation.sources=[{{path='{run_root / 'held-out'}'}}]"
    return [
        "stages.0.steps=7",
        "validation.every=3",
        sources,
        "validation.num_generations=2",
        "validation.max_new_tokens=4",
        *more,
    ]


def scores(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["validation"] for line in lines if "validation" in line}


@pytest.fixture(scope="module")
def validated(run_root):
    """A run with validation, one without, and two ranks with fsdp and ddp."""
    train(read_recipe(recipe_in(run_root, "validated"), *validating(run_root)), device="cpu")
    train(read_recipe(recipe_in(run_root, "plain"), "stages.0.steps=7"), device="cpu")
    jobs = [
        {"recipe": str(recipe_in(run_root, name)), "set": validating(run_root, f"parallel.strategy={name}")}
        for name in ("fsdp", "ddp")
    ]
    jobs.append({"recipe": str(recipe_in(run_root, "context")), "set": validating(run_root, "parallel.context=2")})
    run_together(jobs, run_root, num_ranks=2)
    return run_root


def test_training_is_the_same_with_and_without_validation(validated):
    assert losses(validated / "validated") == losses(validated / "plain")


def test_validation_loss_is_the_mean_over_all_loss_tokens(validated):
    exported = validated / "validated/checkpoints/step-00000007"
    model, processor = load_model(exported, dtype=torch.float32), Processor.load(exported, resize="torch")
    total = right = count = 0
    for number in range(20):
        sample = toy_sample(number, side=56)
        question = json.loads(sample.members["json"])["questions"][0]
        parts = [{"type": "image", "image": sample.members["png"]}, {"type": "text", "text": question["question"]}]
        talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": question["answer"]}]
        row = processor([talk])
        labels = next_token_labels(row)
        with torch.no_grad():
            logits = model(row)[labels >= 0]
        total += torch.nn.functional.cross_entropy(logits, labels[labels >= 0], reduction="sum").item()
        right += (logits.argmax(1) == labels[labels >= 0]).sum().item()
        count += len(logits)
    found = scores(validated / "validated")[7]
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(right / count)


def test_validation_runs_at_its_interval_and_at_the_end(validated):
    assert list(scores(validated / "validated")) == [3, 6, 7]
    assert scores(validated / "validated")[7]["loss"] < scores(validated / "validated")[3]["loss"]


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "context"])
def test_several_ranks_compute_the_scores_of_one(validated, strategy):
    together, alone = scores(validated / strategy), scores(validated / "validated")
    assert list(together) == list(alone)
    for step, found in alone.items():
        assert together[step]["loss"] == pytest.approx(found["loss"], rel=1e-4)
        assert together[step]["accuracy"] == pytest.approx(found["accuracy"], abs=0.02)


def test_generations_are_written_and_skipped_for_a_sharded_model(validated):
    for run in ("validated", "ddp"):
        lines = [json.loads(line) for line in (validated / run / "samples.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [3, 3, 6, 6, 7, 7]
        assert {line["prompt"] for line in lines} <= {"What colour is it?", "What shape is it?"}
        assert all(line["reference"] and line["image"].startswith("data:image/jpeg;base64,") for line in lines)
        assert "data:image/jpeg" in (validated / run / "report.html").read_text()
    assert not (validated / "fsdp/samples.jsonl").read_text()
    assert "generation is skipped: the model is sharded" in (validated / "jobs-0.log").read_text()


def test_a_resumed_run_drops_generations_beyond_its_step(run_root):
    path, settings = recipe_in(run_root, "again"), validating(run_root, "checkpoint.every=5")
    train(read_recipe(path, *settings, "stages.0.steps=6"), device="cpu")
    for state in sorted((run_root / "again/state").iterdir())[1:]:
        (state / "complete.json").unlink()  # as if it had died before the end
    train(read_recipe(path, *settings), device="cpu")
    lines = [json.loads(line) for line in (run_root / "again/samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 3, 6, 6, 7, 7]


def test_ctrl_c_ends_a_validation_after_its_current_batch(run_root, monkeypatch):
    calls, score = [], ModelWithLoss.score

    def interrupted(self, inputs, labels):
        calls.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        return score(self, inputs, labels)

    monkeypatch.setattr(ModelWithLoss, "score", interrupted)
    file = recipe_in(run_root, "interrupted")
    config = read_recipe(file, *validating(run_root, "stages.0.data.max_seq_len=120"))
    assert train(config, device="cpu") is Ending.STOPPED
    assert len(calls) == 1
    assert scores(run_root / "interrupted") == {}
    assert [state.step for state in states(run_root / "interrupted/state")] == [3]
    assert not (run_root / "interrupted/samples.jsonl").read_text()


def test_validation_preserves_the_random_state():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with preserve_random_state(torch.device("cpu")):
        first = draw()
    assert draw() == first


def test_thumbnails_are_small():
    sample = toy_sample(1, side=640)
    assert len(thumbnail(sample.members["png"], THUMBNAIL_SIDE)) < 8000


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("validation.sources=[{path='x'}]", "validation.every is not"),
        ("validation={every=1, sources=[{path='x', weight=1.0}]}", "Remove the weights"),
        ("validation.num_generations=-1", "give 0 or more"),
        ("log.profile_steps=[3]", "first and the last step"),
        ("log.profile_steps=[3, 2]", "first and the last step"),
    ],
)
def test_invalid_settings_are_refused(run_root, setting, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe_in(run_root, "refused"), setting)


def test_profiled_steps_write_a_trace(run_root):
    settings = ["stages.0.steps=4", "log.profile_steps=[2, 3]"]
    train(read_recipe(recipe_in(run_root, "profiled"), *settings), device="cpu")
    trace = json.loads((run_root / "profiled/trace/steps-2-3-rank0.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum("_foreach_norm" in name for name in names) == 2, "once a step"
    assert load_config(TrainConfig, run_root / "profiled/config.toml").log.profile_steps == (2, 3)


def test_a_memory_snapshot_is_refused_without_a_gpu(run_root):
    with pytest.raises(ConfigError, match="this run is on the CPU"):
        train(read_recipe(recipe_in(run_root, "snapshot"), "log.memory_snapshot=true"), device="cpu")


def test_out_of_memory_prints_the_plan_and_what_to_change(run_root):
    def validate(model, step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    config = read_recipe(recipe_in(run_root, "full"), "validation.every=1")
    with pytest.raises(ConfigError) as caught:
        train(config, device="cpu", validate=validate)
    text = str(caught.value)
    assert text.startswith("stage learn: rank 0 ran out of memory (cpu, ")
    assert "Tried to allocate 2.00 GiB" in text
    assert "activations of the decoder" in text
    assert "the plan fits: look for other processes" in text
