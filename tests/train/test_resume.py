"""What is due after a step (validation, export, evaluation) is done exactly once, whatever interrupts the run."""

import json
import logging
import os
import signal
from collections import Counter

import pytest
from safetensors.torch import load_file
from train.running import losses, make_root, read_recipe, recipe_in, skipped, write_recipe, write_shards
from train.test_trainer import damage

from saccade.cli.joins.checkpoint_evaluations import CheckpointEvaluations
from saccade.errors import CheckpointError
from saccade.train.loss import ModelWithLoss
from saccade.train.saved_state import states
from saccade.train.stages import train
from saccade.train.trainer import Ending


class KilledError(Exception):
    """Raised where the process would end."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("resume"), num_held_out=8)


def recipe(root, name, *settings):
    return read_recipe(recipe_in(root, name), *settings)


def held_out(root, every, *more):
    """Settings of a run that validates and exports every so many steps."""
    sources = f"validation.sources=[{{path='{root / 'held-out'}'}}]"
    generations = ["validation.num_generations=2", "validation.max_new_tokens=2", "stages.0.schedule.warmup_steps=1"]
    return [f"validation.every={every}", f"checkpoint.export_every={every}", sources, *generations, *more]


def validations(run):
    """(step, loss) of every validation that is logged, in order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["validation"].get("loss")) for line in lines if "validation" in line]


def sampled_steps(run):
    """Number of generations of each step."""
    return Counter(json.loads(line)["step"] for line in (run / "samples.jsonl").read_text().splitlines())


def exported_steps(run):
    return [int(folder.name.removeprefix("step-")) for folder in sorted((run / "checkpoints").glob("step-*"))]


def die_in_forward(number):
    """Return a validation; after its first call the process dies in forward pass `number` of training."""
    forwards = []

    def die(*_):
        forwards.append(True)
        if len(forwards) == number:
            raise KilledError

    def validate(model, step):
        if not forwards:
            model.register_forward_pre_hook(die)
        return {}

    return validate


def stop_in_forward(number):
    """Return a validation; after its first call Ctrl-C interrupts forward pass `number` of training."""
    forwards = []

    def stop(*_):
        forwards.append(True)
        if len(forwards) == number:
            os.kill(os.getpid(), signal.SIGINT)

    def validate(model, step):
        if not forwards:
            model.register_forward_pre_hook(stop)
        return {}

    return validate


# ------------------------------------------------------------------ killed


@pytest.mark.slow
def test_a_crash_after_the_best_validation_does_not_let_a_worse_checkpoint_replace_it(root):
    """The state of step 3 is saved before its validation, the best: from step 4 on the learning rate is too high."""
    settings = held_out(
        root, 3, "validation.export_best=true", "checkpoint.every=3", "stages.0.steps=6", "guard.spike_sigmas=inf",
    )  # fmt: skip
    too_high = "stages.0.optimizer.lr=1.0"
    config = recipe(root, "best", *settings)
    with pytest.raises(KilledError):
        train(config, device="cpu", validate=die_in_forward(1))
    best = load_file(config.run / "checkpoints/best/model.safetensors")
    train(recipe(root, "best", *settings, too_high), device="cpu")
    (first, low), (last, high) = validations(config.run)
    assert (first, last) == (3, 6)
    assert low < high
    kept = load_file(config.run / "checkpoints/best/model.safetensors")
    assert all(kept[name].equal(tensor) for name, tensor in best.items())


@pytest.mark.parametrize("due", ["validation", "export", "evaluation"])
def test_a_kill_in_the_last_validation_export_or_evaluation_of_a_stage_loses_no_step(root, due, caplog):
    caplog.set_level(logging.INFO, "saccade")
    calls = []
    config = recipe(root, f"killed-{due}", "stages.0.steps=3", "checkpoint.every=100", "validation.every=2")

    def validate(model, step):
        calls.append(f"validation {step}")
        if due == "export":
            (config.run / "checkpoints").touch()  # where the folder should be
        if due == "validation" and calls.count("validation 3") == 1:
            raise KilledError
        return {"score": 1.0}

    def evaluate(folder, step):
        calls.append(f"evaluation {step}")
        if due == "evaluation" and calls.count("evaluation 3") == 1:
            raise KilledError

    with pytest.raises(CheckpointError if due == "export" else KilledError):
        train(config, device="cpu", validate=validate, on_export=evaluate)
    assert [state.step for state in states(config.run / "state")] == [3]
    (config.run / "checkpoints").unlink() if due == "export" else None
    assert train(config, device="cpu", validate=validate, on_export=evaluate) is Ending.FINISHED
    assert 'stage "learn": step 3' in caplog.text, "it resumed after the last step"
    wanted = {"validation 2": 1, "validation 3": 1, "evaluation 3": 1}
    assert Counter(calls) == wanted | ({} if due == "export" else {f"{due} 3": 2})
    assert [step for step, _ in validations(config.run)] == [2, 3]
    assert exported_steps(config.run) == [3]
    assert len(losses(config.run)) == 3
    before = list(calls)
    assert train(config, device="cpu", validate=validate, on_export=evaluate) is Ending.FINISHED
    assert calls == before, "nothing is left to do"


def test_a_validation_that_was_killed_while_it_generated_is_repeated_and_logged_once(root, monkeypatch):
    settings = held_out(root, 2, "stages.0.steps=4", "checkpoint.every=2")
    config = recipe(root, "generated", *settings)
    from saccade.train.validation import HeldOutValidation

    generate = HeldOutValidation._generate

    def killed(self, model, step):
        generate(self, model, step)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(HeldOutValidation, "_generate", killed)
        with pytest.raises(KilledError):
            train(config, device="cpu")
    assert sampled_steps(config.run) == {2: 2}
    train(config, device="cpu")
    assert [step for step, _ in validations(config.run)] == [2, 4]
    assert sampled_steps(config.run) == {2: 2, 4: 2}


# ------------------------------------------------------------------ stopped


@pytest.mark.parametrize("stop_at", [4, 6])
def test_a_stop_at_a_step_with_validation_and_export_postpones_both(root, stop_at):
    """The signal comes in the last micro-batch of the step, which is finished; step 6 is the last one."""
    exports = []
    settings = held_out(root, 2, "stages.0.steps=6", "checkpoint.every=100")
    config = recipe(root, f"stopped-{stop_at}", *settings)
    stop = stop_in_forward(2 * (stop_at - 2))
    on_export = lambda folder, step: exports.append(step)  # noqa: E731
    assert train(config, device="cpu", validate=stop, on_export=on_export) is Ending.STOPPED
    assert [state.step for state in states(config.run / "state")] == [stop_at]
    done = list(range(2, stop_at, 2))
    assert [step for step, _ in validations(config.run)] == exported_steps(config.run) == exports == done
    assert train(config, device="cpu", on_export=on_export) is Ending.FINISHED
    whole = recipe(root, "not-stopped", *settings)
    if not whole.run.exists():
        train(whole, device="cpu")
    assert validations(config.run) == validations(whole.run)
    assert exported_steps(config.run) == exports == [2, 4, 6]
    assert sampled_steps(config.run) == sampled_steps(whole.run)
    assert losses(config.run) == losses(whole.run)


@pytest.mark.parametrize("last", [2, 4])
def test_an_interrupted_validation_is_repeated_when_the_run_resumes(root, monkeypatch, last):
    """This includes the validation that closes a stage."""
    settings = held_out(root, 2, f"stages.0.steps={last}", "checkpoint.every=2")
    config = recipe(root, f"interrupted-{last}", *settings)
    score = ModelWithLoss.score

    def interrupted(self, inputs, labels):
        os.kill(os.getpid(), signal.SIGINT)
        return score(self, inputs, labels)

    with monkeypatch.context() as patch:
        patch.setattr(ModelWithLoss, "score", interrupted)
        assert train(config, device="cpu") is Ending.STOPPED
    assert validations(config.run) == []
    assert exported_steps(config.run) == []
    assert train(config, device="cpu") is Ending.FINISHED
    due = list(range(2, last + 1, 2))
    assert [step for step, _ in validations(config.run)] == exported_steps(config.run) == due
    assert sampled_steps(config.run) == dict.fromkeys(due, 2)


def test_an_evaluation_that_the_resumed_run_asks_for_again_is_not_repeated(root):
    """The command evaluates at its start what an earlier one left out; training then names the checkpoint again."""
    tasks = f"evaluation.tasks=['vqa={root / 'held-out'}']"
    config = recipe(root, "evaluated", tasks)
    checkpoint, results = config.run / "checkpoints/step-00000003", config.run / "evaluations/step-00000003"
    for file in (checkpoint / "config.json", results / "report.html"):
        file.parent.mkdir(parents=True)
        file.touch()
    with CheckpointEvaluations(config, "cpu") as evaluations:
        evaluations.start(checkpoint, 3)
        evaluations.finish()
    assert not results.with_suffix(".log").exists(), "no process was started"


# ------------------------------------------------------------------ logs


def test_skipped_steps_and_bad_samples_are_listed_once_after_a_crash(root, tmp_path):
    """Every step is skipped, and a sample that every epoch reads is damaged."""
    shards = write_shards(tmp_path / "shards", count=8)
    damage(shards, root / "checkpoint", row=5)
    guard = ["guard.max_grad_norm=1e-9", "guard.max_skips=1000", "validation.every=3"]
    path = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=root / "checkpoint", shards=shards)
    train(read_recipe(path, *guard, "stages.0.steps=3"), device="cpu", validate=lambda model, step: {})
    longer = read_recipe(path, *guard, "stages.0.steps=8")
    with pytest.raises(KilledError):
        train(longer, device="cpu", validate=die_in_forward(3))  # hooked in after step 6
    assert [step["step"] for step in skipped(tmp_path / "run")] == list(range(1, 8))
    train(longer, device="cpu")
    assert [step["step"] for step in skipped(tmp_path / "run")] == list(range(1, 9))
    bad = [json.loads(line)["sample_id"] for line in (tmp_path / "run/bad_samples.jsonl").read_text().splitlines()]
    assert bad == ["shards/00000/00000005"]
