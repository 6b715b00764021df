"""A probe sees the model as it is and changes nothing; traces and a full memory say what happened."""

import json
import random

import numpy as np
import pytest
import torch
from train.running import losses, make_checkpoint, read_recipe, run_together, write_recipe, write_shards

from saccade.config import load_config
from saccade.data.toy import toy_sample
from saccade.errors import ConfigError
from saccade.model.weights import load_model
from saccade.processor import Processor
from saccade.train.config import TrainConfig
from saccade.train.loss import row_labels
from saccade.train.probe import random_numbers_kept, thumbnail
from saccade.train.stages import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    make_checkpoint(folder / "checkpoint")
    write_shards(folder / "shards")
    write_shards(folder / "held-out", count=20)
    return folder


def recipe(place, name):
    return write_recipe(
        place / f"{name}.toml", run=place / name, checkpoint=place / "checkpoint", shards=place / "shards"
    )


def looking(place, *more):
    """Settings of a run that looks at held-out samples every third step."""
    sources = f"probe.sources=[{{path='{place / 'held-out'}'}}]"
    return ["stages.0.steps=7", "probe.every=3", sources, "probe.num_generations=2", "probe.max_new_tokens=4", *more]


def scores(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["probe"] for line in lines if "probe" in line}


@pytest.fixture(scope="module")
def looked(place):
    """A run with a probe, one without, and two ranks that share the model."""
    train(read_recipe(recipe(place, "looked"), *looking(place)), device="cpu")
    train(read_recipe(recipe(place, "blind"), "stages.0.steps=7"), device="cpu")
    jobs = [
        {"recipe": str(recipe(place, name)), "set": looking(place, f"parallel.strategy={name}")}
        for name in ("fsdp", "ddp")
    ]
    run_together(jobs, place, num_ranks=2)
    return place


def test_training_is_the_same_with_and_without_a_probe(looked):
    assert losses(looked / "looked") == losses(looked / "blind")


def test_held_out_loss_is_the_mean_over_all_learned_tokens(looked):
    exported = looked / "looked/checkpoints/step-00000007"
    model, processor = load_model(exported, dtype=torch.float32), Processor.load(exported, resize="torch")
    total = right = count = 0
    for number in range(20):
        sample = toy_sample(number, side=56)
        question = json.loads(sample.members["json"])["questions"][0]
        parts = [{"type": "image", "image": sample.members["png"]}, {"type": "text", "text": question["question"]}]
        talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": question["answer"]}]
        row = processor([talk])
        labels = row_labels(row)
        with torch.no_grad():
            logits = model(row)[labels >= 0]
        total += torch.nn.functional.cross_entropy(logits, labels[labels >= 0], reduction="sum").item()
        right += (logits.argmax(1) == labels[labels >= 0]).sum().item()
        count += len(logits)
    found = scores(looked / "looked")[7]
    assert found["val_loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["val_accuracy"] == pytest.approx(right / count)


def test_a_probe_looks_every_so_often_and_at_the_end(looked):
    assert list(scores(looked / "looked")) == [3, 6, 7]
    assert scores(looked / "looked")[7]["val_loss"] < scores(looked / "looked")[3]["val_loss"]


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_ranks_find_the_scores_of_one(looked, strategy):
    together, alone = scores(looked / strategy), scores(looked / "looked")
    assert list(together) == list(alone)
    for step, found in alone.items():
        assert together[step]["val_loss"] == pytest.approx(found["val_loss"], rel=1e-4)
        assert together[step]["val_accuracy"] == pytest.approx(found["val_accuracy"], abs=0.02)


def test_answers_are_written_where_the_model_is_whole_and_left_out_where_it_is_sharded(looked):
    for run in ("looked", "ddp"):
        lines = [json.loads(line) for line in (looked / run / "samples.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [3, 3, 6, 6, 7, 7]
        assert {line["prompt"] for line in lines} <= {"What colour is it?", "What shape is it?"}
        assert all(line["reference"] and line["image"].startswith("data:image/jpeg;base64,") for line in lines)
        assert "data:image/jpeg" in (looked / run / "report.html").read_text()
    assert not (looked / "fsdp/samples.jsonl").read_text()
    assert "sample answers are left out" in (looked / "jobs-0.log").read_text()


def test_a_run_that_goes_on_forgets_answers_it_will_give_again(place):
    path, settings = recipe(place, "again"), looking(place, "checkpoint.every=5")
    train(read_recipe(path, *settings, "stages.0.steps=6"), device="cpu")
    for state in sorted((place / "again/state").iterdir())[1:]:
        (state / "complete.json").unlink()  # as if it had died before the end
    train(read_recipe(path, *settings), device="cpu")
    lines = [json.loads(line) for line in (place / "again/samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 3, 6, 6, 7, 7]


def test_random_numbers_drawn_by_a_probe_are_as_if_not_drawn():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with random_numbers_kept(torch.device("cpu")):
        first = draw()
    assert draw() == first


def test_thumbnails_are_small():
    sample = toy_sample(1, side=640)
    assert len(thumbnail(sample.members["png"])) < 8000


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("probe.sources=[{path='x'}]", "every is not given"),
        ("probe={every=1, sources=[{path='x', weight=1.0}]}", "Remove the weights"),
        ("probe.num_generations=-1", "give 0 or more"),
        ("log.profile_steps=[3]", "first and the last step"),
        ("log.profile_steps=[3, 2]", "first and the last step"),
    ],
)
def test_settings_that_cannot_be_are_refused(place, setting, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe(place, "refused"), setting)


def test_profiled_steps_leave_a_trace(place):
    settings = ["stages.0.steps=4", "log.profile_steps=[2, 3]"]
    train(read_recipe(recipe(place, "profiled"), *settings), device="cpu")
    trace = json.loads((place / "profiled/trace/steps-2-3-rank0.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum("_foreach_norm" in name for name in names) == 2, "once a step"
    assert load_config(TrainConfig, place / "profiled/config.toml").log.profile_steps == (2, 3)


def test_a_memory_snapshot_is_refused_without_a_gpu(place):
    with pytest.raises(ConfigError, match="this run is on the CPU"):
        train(read_recipe(recipe(place, "snapshot"), "log.memory_snapshot=true"), device="cpu")


def test_running_out_of_memory_ends_with_the_plan_and_what_to_change(place):
    def probe(trained, step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    config = read_recipe(recipe(place, "full"), "probe.every=1")
    with pytest.raises(ConfigError) as caught:
        train(config, device="cpu", probe=probe)
    text = str(caught.value)
    assert text.startswith("stage learn: rank 0 ran out of memory (cpu, ")
    assert "Tried to allocate 2.00 GiB" in text
    assert "activations of the decoder" in text
    assert "by this plan it should have fit" in text
