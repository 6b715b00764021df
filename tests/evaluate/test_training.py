"""`saccade train` evaluates the checkpoints it exports."""

import json

import pytest
from train.running import write_recipe

from saccade.config import load_config
from saccade.errors import ConfigError
from saccade.train import TrainConfig, train


@pytest.fixture
def recipe(checkpoint, shards, tmp_path):
    return write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)


def settings(shards, *more):
    words = [
        "stages.0.schedule.warmup_steps=1",
        "stages.0.steps=2",
        "checkpoint.export_every=1",
        f"evaluation.tasks=['vqa={shards}','perplexity={shards}']",
    ]
    return [word for setting in (*words, "evaluation.limit=6", *more) for word in ("--set", setting)]


def test_exported_checkpoints_are_evaluated_and_plotted(command, recipe, shards, tmp_path):
    ended = command("train", recipe, "--device", "cpu", *settings(shards))
    assert ended.status == 0, ended.err
    scores = {}
    for step in ("step-00000001", "step-00000002"):
        folder = tmp_path / "run" / "evaluations" / step
        scores[step] = json.loads((folder / "scores.json").read_text())["tasks"]
        assert scores[step]["vqa"]["num_examples"] == 6
        assert json.loads((folder / "settings.json").read_text())["model"]["checkpoint"].endswith(step)
    first, second = (scores[step]["perplexity"]["metrics"]["perplexity"]["value"] for step in sorted(scores))
    assert first != second
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Evaluation: perplexity, perplexity" in page
    assert 'href="evaluations/step-00000002/report.html"' in page

    # an evaluation that was interrupted is completed by the next start, here while training would wait for it
    missing = tmp_path / "run" / "evaluations" / "step-00000001" / "report.html"
    missing.unlink()
    again = command("train", recipe, "--device", "cpu", *settings(shards, "evaluation.device=same"))
    assert again.status == 0, again.err
    assert missing.exists()


def test_tasks_are_checked_before_training(command, recipe, shards, tmp_path):
    for tasks, message in [
        (f"['vq={shards}']", "no task is called 'vq'"),
        ("['vqa=nowhere']", "nowhere: no such file or folder"),
        ("['vqa']", "'vqa' has no data. Write TASK=PATH"),
    ]:
        ended = command("train", recipe, "--device", "cpu", "--set", f"evaluation.tasks={tasks}")
        assert ended.status == 2
        assert message in ended.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_training_from_python_needs_a_function_for_exports(recipe, shards):
    config = load_config(TrainConfig, recipe, [f"evaluation.tasks=['vqa={shards}']"])
    with pytest.raises(ConfigError, match="pass on_export"):
        train(config, device="cpu")
