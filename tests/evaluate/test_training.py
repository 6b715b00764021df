"""`saccade train` evaluates the checkpoints it exports."""

import json

import pytest
from train.running import write_recipe

from saccade.config import load_config
from saccade.errors import ConfigError
from saccade.train import TrainConfig, train
from saccade.train.report import write_report


@pytest.fixture
def recipe(checkpoint, shards, tmp_path):
    return write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)


def settings(shards, *more):
    tasks = f"evaluation.tasks=['vqa={shards}','perplexity={shards}']"
    words = ["stages.0.schedule.warmup_steps=1", "stages.0.steps=1", tasks, "evaluation.limit=6", *more]
    return [word for setting in words for word in ("--set", setting)]


def test_exported_checkpoints_are_evaluated_and_plotted(command, recipe, shards, tmp_path):
    ended = command("train", recipe, "--device", "cpu", *settings(shards))
    assert ended.status == 0, ended.err
    folder = tmp_path / "run" / "evaluations" / "step-00000001"
    scores = json.loads((folder / "scores.json").read_text())["tasks"]
    assert scores["vqa"]["num_examples"] == scores["perplexity"]["num_examples"] == 6
    assert json.loads((folder / "settings.json").read_text())["model"]["checkpoint"].endswith(
        "checkpoints/step-00000001"
    )
    assert "Evaluation: perplexity, perplexity" in (tmp_path / "run" / "report.html").read_text()

    # an evaluation that was interrupted is completed by the next start, here while training would wait for it
    (folder / "report.html").unlink()
    again = command("train", recipe, "--device", "cpu", *settings(shards, "evaluation.device=same"))
    assert again.status == 0, again.err
    assert (folder / "report.html").exists()


def test_a_failed_evaluation_is_a_warning_and_training_goes_on(command, recipe, shards, tmp_path):
    """Here its results folder is taken by something else."""
    blocked = tmp_path / "run" / "evaluations" / "step-00000001"
    blocked.mkdir(parents=True)
    (blocked / "thesis.tex").write_text("x")
    ended = command("train", recipe, "--device", "cpu", *settings(shards))
    assert ended.status == 0, ended.err
    assert "the evaluation of step-00000001 failed (exit status 2)" in ended.err
    assert "is not empty and has no results" in ended.err


def test_the_report_of_a_run_draws_the_scores_of_its_checkpoints(tmp_path):
    for step, value in ((100, 0.25), (200, 0.5)):
        folder = tmp_path / "evaluations" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        scores = {"value": value, "low": value - 0.1, "high": value + 0.1, "higher_is_better": True}
        content = {"tasks": {"vqa": {"num_examples": 9, "metrics": {"vqa_accuracy": scores, "exact_match": scores}}}}
        (folder / "scores.json").write_text(json.dumps(content))
    page = write_report(tmp_path).read_text()
    assert "Evaluation: vqa, vqa_accuracy" in page
    assert page.count("<polyline") == 1
    assert 'href="evaluations/step-00000200/report.html"' in page
    assert "0.500 [0.400, 0.600]" in page


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


def test_a_checkpoint_that_is_evaluated_on_its_training_data_is_noticed(command, recipe, shards, tmp_path):
    """The run's config names the shards it was trained on."""
    overrides = ["stages.0.schedule.warmup_steps=1", "stages.0.steps=1"]
    train(load_config(TrainConfig, recipe, overrides), device="cpu")
    exported = tmp_path / "run" / "checkpoints" / "step-00000001"
    words = ["--tasks", "vqa", "--data", shards, "--limit", 4, "--max-tokens", 2, "--device", "cpu", "--json"]
    ended = command("evaluate", exported, *words, "-o", tmp_path / "seen")
    assert ended.status == 0, ended.err
    [result] = json.loads(ended.out)["results"].values()
    assert result["tasks"]["vqa"]["contamination"]["num_exact"] == 4
    assert "possible contamination: 4 of 4 examples" in result["tasks"]["vqa"]["contamination"]["text"]
    ended = command("evaluate", exported, *words, "-o", tmp_path / "unsearched", "--no-contamination")
    [result] = json.loads(ended.out)["results"].values()
    assert "contamination" not in result["tasks"]["vqa"]
