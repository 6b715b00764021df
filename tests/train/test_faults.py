"""Faults of real processes: killed, signalled, out of disk, hung. The run resumes as if nothing had happened."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
from train.running import (
    RANKS,
    RECIPE,
    environment,
    losses,
    make_checkpoint,
    read_recipe,
    run_together,
    run_with_restarts,
    start,
    write_recipe,
    write_shards,
)

from saccade.train.process import EXIT_STATUS, Watchdog, lock_folder
from saccade.train.saved_state import states
from saccade.train.stages import train

SETTINGS = ["validation.every=1", "checkpoint.every=5", "stages.0.steps=13"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    run_root = tmp_path_factory.mktemp("faults")
    return make_checkpoint(run_root / "checkpoint"), write_shards(run_root / "shards")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, parts):
    run_root = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(run_root / "recipe.toml", run=run_root / "run", checkpoint=parts[0], shards=parts[1])
    train(read_recipe(recipe, *SETTINGS), device="cpu")
    return losses(run_root / "run")


@pytest.fixture
def recipe(tmp_path, parts):
    return write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=parts[0], shards=parts[1])


def do(jobs, tmp_path):
    """Exit status and output of a process that runs these jobs."""
    file = tmp_path / "jobs.json"
    process = start(jobs, file)
    try:
        process.join(300)
        return process.exitcode, file.with_suffix(".log").read_text()
    finally:
        process.kill()


def test_a_killed_rank_is_restarted_and_nothing_is_lost(recipe, tmp_path, whole):
    """kill -9 of one of two ranks after step 7: torchrun's agent restarts both, they resume from step 5."""
    job = {"recipe": str(recipe), "set": SETTINGS, "validate": "kill_rank_1_once"}
    assert 'stage "learn": step 5, fsdp on 2 ranks' in run_with_restarts([job], tmp_path, num_ranks=2)
    assert losses(tmp_path / "run") == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_ranks_killed_in_a_save_and_in_a_load_on_another_layout_lose_nothing(recipe, tmp_path, parts, whole):
    """The first attempt dies in a save of two shards, the second in a load of their other run by two tensor ranks."""
    moved = write_recipe(tmp_path / "moved.toml", run=tmp_path / "moved", checkpoint=parts[0], shards=parts[1])
    train(read_recipe(moved, *SETTINGS, "stages.0.steps=7"), device="cpu")
    jobs = [
        {"recipe": str(recipe), "set": SETTINGS, "validate": "kill_rank_1_in_a_save"},
        {"recipe": str(moved), "set": [*SETTINGS, "parallel.tensor=2"], "before": "die_in_a_load"},
    ]
    log = run_with_restarts(jobs, tmp_path, num_ranks=2, max_restarts=2)
    assert 'stage "learn": step 5, fsdp on 2 ranks' in log
    assert 'stage "learn": step 7, 2 ranks (tensor 2)' in log
    for run in ("run", "moved"):
        assert losses(tmp_path / run) == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_the_rank_that_hangs_is_the_one_in_no_collective(recipe, tmp_path):
    job = {"recipe": str(recipe), "set": [*SETTINGS, "guard.hang_timeout_s=4"], "validate": "hang_on_rank_1"}
    with pytest.raises(AssertionError):
        run_together([job], tmp_path, num_ranks=2)
    logs = [(tmp_path / f"jobs-{rank}.log").read_text() for rank in range(2)]
    report = "rank {}: no step for 4 s: exiting so that torchrun can restart. It is in "
    assert report.format(0) + "the collective all_" in logs[0]
    assert report.format(1) + "hang_in_forward (ranks.py:" in logs[1]
    assert ", in no collective. Stacks: " in logs[1]


@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_the_command_torchrun(recipe, tmp_path, whole):
    (tmp_path / "jobs.json").write_text(
        json.dumps([{"recipe": str(recipe), "set": SETTINGS, "validate": "kill_rank_1_once"}])
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    run = subprocess.run(
        [*torchrun, "--monitor-interval=0.1", str(RANKS), str(tmp_path / "jobs.json")],
        env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-9000:]
    assert 'stage "learn": step 5, fsdp on 2 ranks' in run.stderr
    assert losses(tmp_path / "run") == pytest.approx(whole, abs=1e-5)


def test_a_process_killed_while_saving_leaves_the_previous_state(recipe, tmp_path, whole):
    status, output = do([{"recipe": str(recipe), "set": SETTINGS, "validate": "die_while_saving"}], tmp_path)
    assert status == -signal.SIGKILL, output
    folder = tmp_path / "run/state"
    assert [state.step for state in states(folder)] == [5]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".step-00000010.partial"]
    train(read_recipe(recipe, *SETTINGS), device="cpu")
    assert losses(tmp_path / "run") == whole
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000010", "step-00000013"]


def test_a_process_killed_in_the_last_validation_has_no_step_to_repeat(recipe, tmp_path, whole, caplog):
    job = {"recipe": str(recipe), "set": SETTINGS, "validate": "die_in_the_last_validation"}
    status, output = do([job], tmp_path)
    assert status == -signal.SIGKILL, output
    assert [state.step for state in states(tmp_path / "run/state")] == [10, 13]
    caplog.set_level(logging.INFO, "saccade")
    train(read_recipe(recipe, *SETTINGS), device="cpu")
    assert 'stage "learn": step 13' in caplog.text
    assert losses(tmp_path / "run") == whole
    assert (tmp_path / "run/checkpoints/step-00000013").is_dir()


def test_sigterm_saves_and_stops_and_a_full_disk_does_not_end_a_run(recipe, tmp_path, parts, whole):
    full = write_recipe(tmp_path / "full.toml", run=tmp_path / "full", checkpoint=parts[0], shards=parts[1])
    strict = write_recipe(tmp_path / "strict.toml", run=tmp_path / "strict", checkpoint=parts[0], shards=parts[1])
    on_failure = "checkpoint.on_failure=stop"
    jobs = [
        {"recipe": str(recipe), "set": SETTINGS, "validate": "terminate", "ending": "stopped"},
        {"recipe": str(full), "set": SETTINGS, "validate": "fill_the_disk"},
        {
            "recipe": str(strict),
            "set": [*SETTINGS, on_failure],
            "validate": "fill_the_disk",
            "ending": "CheckpointError",
        },
    ]
    status, output = do(jobs, tmp_path)
    assert status == 0, output[-4000:]
    # SIGTERM in the validation after step 7: no further step is made.
    assert [state.step for state in states(tmp_path / "run/state")] == [5, 7]
    assert losses(tmp_path / "run") == whole[:7]
    train(read_recipe(recipe, *SETTINGS), device="cpu")
    assert losses(tmp_path / "run") == whole, "bit for bit"
    # Disk full at step 10: reported, and training continued to the end.
    assert (
        output.count(
            "step-00000010: the state was not saved: rank 0: a write failed part way, as on a full disk. Free space"
        )
        == 2
    )
    assert losses(tmp_path / "full") == whole
    assert [state.step for state in states(tmp_path / "full/state")] == [5, 13]
    # The strict run stopped, with the previous state intact.
    assert [state.step for state in states(tmp_path / "strict/state")] == [5]
    assert len(losses(tmp_path / "strict")) < 13


@pytest.mark.slow
def test_sigterm_at_the_end_of_a_stage_starts_no_next_stage_and_a_locked_folder_is_refused_on_all_ranks(
    tmp_path, parts
):
    """SIGTERM to one of two ranks: in the last step of the first stage, and in the validation that closes it.

    In the same launch: a rank with another recipe is refused, and one whose data is late is named.
    """
    text = RECIPE + RECIPE[RECIPE.index("[[stages]]") :].replace("learn", "more")
    recipes = {
        name: write_recipe(
            tmp_path / f"{name}.toml", run=tmp_path / name, checkpoint=parts[0], shards=parts[1], text=text
        )
        for name in ("last-step", "closing-validation", "in-use", "unlike", "late")
    }
    settings = ["validation.every=1", "stages.more.steps=3"]
    in_last_step = {"recipe": str(recipes["last-step"]), "set": [*settings, "stages.learn.steps=8"]}
    in_validation = {"recipe": str(recipes["closing-validation"]), "set": [*settings, "stages.learn.steps=7"]}
    stopped = {"validate": "terminate_rank_1", "ending": "stopped"}
    refused = f"ConfigError: {tmp_path / 'in-use'} is in use by another process (pid {os.getpid()} on "
    jobs = [
        in_last_step | stopped | {"validate": "terminate_rank_1_in_forward"},
        in_validation | stopped,
        {"recipe": str(recipes["in-use"]), "ending": refused},
        {"recipe": str(recipes["unlike"]), "set_of_rank": {"1": ["seed=4"]}, "ending": "ConfigError: rank 1 on host "},
        {"recipe": str(recipes["late"]), "set": [*settings, "stages.more.steps=6"], "validate": "late_data_on_rank_1"},
    ]
    with lock_folder(tmp_path / "in-use"):
        run_together(jobs, tmp_path, num_ranks=2)
    for rank in range(2):
        log = (tmp_path / f"jobs-{rank}.log").read_text()
        assert ("rank 1 on host " in log and " holds up the others: it waits for data " in log) == (rank == 0)
    assert len(losses(tmp_path / "last-step")) == 8
    assert [state.step for state in states(tmp_path / "last-step/state")] == [8]
    assert len(losses(tmp_path / "closing-validation")) == 7
    train(read_recipe(recipes["closing-validation"], *in_validation["set"]), device="cpu")
    assert len(losses(tmp_path / "closing-validation")) == 10
    # What was due after the last step is done by the run that resumes, here on one rank.
    assert not (tmp_path / "last-step/checkpoints").exists()
    validated = []
    train(
        read_recipe(recipes["last-step"], *in_last_step["set"]),
        device="cpu",
        validate=lambda model, step: validated.append(step) or {},
    )
    assert validated == [8, 9, 10, 11]
    assert sorted(path.name for path in (tmp_path / "last-step/checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000011",
    ]


def test_sigterm_during_start_up_stops_cleanly(recipe, tmp_path):
    file = tmp_path / "jobs.json"
    process = start([{"recipe": str(recipe), "set": ["stages.0.steps=100000"], "ending": "stopped"}], file)
    try:
        end = time.monotonic() + 180
        while "; run " not in file.with_suffix(".log").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        process.terminate()
        process.join(180)
        assert process.exitcode == 0, file.with_suffix(".log").read_text()[-3000:]
    finally:
        process.kill()
    assert "SIGTERM: finishing this step and saving; send it again to quit now" in file.with_suffix(".log").read_text()


@pytest.mark.slow
def test_a_hung_process_dumps_its_stacks_and_exits(recipe, tmp_path):
    settings = [*SETTINGS, "guard.hang_timeout_s=4"]
    status, output = do([{"recipe": str(recipe), "set": settings, "validate": "hang"}], tmp_path)
    assert status == EXIT_STATUS, output[-3000:]
    stacks = (tmp_path / "run/hang/stacks-rank0.txt").read_text()
    assert "in hang_in_forward" in stacks
    assert "in _accumulate" in stacks
    assert (
        "rank 0: no step for 4 s: exiting so that torchrun can restart. It is in hang_in_forward (ranks.py:" in output
    )


def test_a_long_validation_is_not_a_hang(recipe, tmp_path):
    settings = [*SETTINGS, "guard.hang_timeout_s=4", "stages.0.steps=4"]
    status, output = do([{"recipe": str(recipe), "set": settings, "validate": "validate_for_long"}], tmp_path)
    assert status == 0, output[-3000:]
    assert not (tmp_path / "run/hang").exists()
    assert len(losses(tmp_path / "run")) == 4


def test_a_watchdog_that_is_fed_does_nothing(tmp_path):
    hung = []
    with Watchdog(tmp_path, 1.5, on_hang=lambda: hung.append(True)) as watchdog:
        for _ in range(40):
            time.sleep(0.05)
            watchdog.feed()
        assert not hung
        end = time.monotonic() + 60
        while not hung and time.monotonic() < end:
            time.sleep(0.05)
    assert hung == [True]
    assert (tmp_path / "stacks-rank0.txt").exists()
