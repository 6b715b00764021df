import json
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from saccade.train.trackers import (
    JsonLines,
    Trackers,
    TrackersConfig,
    WandbConfig,
    flat_numbers,
    open_trackers,
    read_records,
)


def record_of(step, **more):
    return {"step": step, "loss": 1.0 / step, "source_loss": {"a": 2.0}, "mfu": None, **more}


def steps_in(path):
    return [record["step"] for record in read_records(path)]


def test_records_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    with open_trackers(TrackersConfig(), tmp_path / "run", step=0, settings={}) as trackers:
        trackers.log(record_of(10))
        [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line) == record_of(10)


def test_a_resumed_run_drops_what_was_written_beyond_its_step(tmp_path):
    for step, logged in ((0, [10, 20, 30]), (20, [30, 40])):
        with open_trackers(TrackersConfig(), tmp_path, step=step, settings={}) as trackers:
            for number in logged:
                trackers.log(record_of(number, attempt=step))
    assert steps_in(tmp_path / "metrics.jsonl") == [10, 20, 30, 40]
    assert [record["attempt"] for record in read_records(tmp_path / "metrics.jsonl")] == [0, 0, 20, 20]


def test_a_restarted_run_starts_with_an_empty_file(tmp_path):
    for _ in range(2):
        with open_trackers(TrackersConfig(), tmp_path, step=0, settings={}) as trackers:
            trackers.log(record_of(10))
    assert steps_in(tmp_path / "metrics.jsonl") == [10]


def test_lines_truncated_by_a_crash_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10, "loss": 1.0}\n{"step": 20, "lo\n[]\n{"step": 30}\n\xff{"step": 4')
    assert steps_in(path) == [10, 30]
    tracker = JsonLines(path, 20)
    tracker.log(record_of(20))
    tracker.close()
    assert steps_in(path) == [10, 20]


def test_non_finite_numbers_are_null(tmp_path):
    with open_trackers(TrackersConfig(), tmp_path, step=0, settings={}) as trackers:
        trackers.log(record_of(1, loss=math.nan, nested={"x": [math.inf, 1.0]}))
    [record] = read_records(tmp_path / "metrics.jsonl")
    assert record["loss"] is None
    assert record["nested"]["x"] == [None, 1.0]


def test_nested_numbers_are_named_by_their_path():
    record = record_of(2, stage="align", flag=True, lr={"vision": 1e-5})
    assert flat_numbers(record) == {"loss": 0.5, "source_loss/a": 2.0, "lr/vision": 1e-5}


class Unreachable:
    """A tracker whose network is down, always or for some records."""

    def __init__(self, failing=lambda record: True):
        self.failing, self.seen = failing, []

    def log(self, record):
        if self.failing(record):
            raise ConnectionError("no route to host")
        self.seen.append(record["step"])

    def close(self):
        raise ConnectionError("no route to host")


def test_a_failing_tracker_is_reported_once_and_training_continues(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "saccade")
    down, shaky = Unreachable(), Unreachable(lambda record: record["step"] == 2)
    makers = {"remote": lambda: down, "shaky": lambda: shaky, "file": lambda: JsonLines(tmp_path / "a.jsonl", 0)}
    with Trackers(makers) as trackers:
        for step in (1, 2, 3):
            trackers.log(record_of(step))
    assert [record.message for record in caplog.records] == [
        "remote: ConnectionError: no route to host. Training continues without it",
        "shaky: ConnectionError: no route to host. Training continues without it",
    ]
    assert shaky.seen == [1, 3], "one that comes back is used again"
    assert steps_in(tmp_path / "a.jsonl") == [1, 2, 3]


def test_a_tracker_that_cannot_be_opened_does_not_stop_the_others(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "saccade")

    def refuse():
        raise OSError("quota exceeded")

    with Trackers({"remote": refuse, "file": lambda: JsonLines(tmp_path / "a.jsonl", 0)}) as trackers:
        trackers.log(record_of(1))
    assert [record.message for record in caplog.records] == [
        "remote: OSError: quota exceeded. Training continues without it"
    ]
    assert steps_in(tmp_path / "a.jsonl") == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_records_but_not_the_run(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "saccade")
    path = tmp_path / "a.jsonl"
    with Trackers({"file": lambda: JsonLines(path, 0)}) as trackers:
        path.unlink()
        path.symlink_to("/dev/full")
        trackers.log(record_of(1))
        path.unlink()
        path.write_text('{"step": 1, "lo')  # what had room
        trackers.log(record_of(2))
        trackers.log(record_of(3))
    assert "No space left" in caplog.text
    assert steps_in(path) == [2, 3]


def test_tensorboard_shows_a_resumed_run_without_what_was_dropped(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step, logged in ((0, [10, 20, 30]), (20, [30])):
        with open_trackers(TrackersConfig(tensorboard=True), tmp_path, step=step, settings={}) as trackers:
            for number in logged:
                trackers.log(record_of(number, loss=float(number + step)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 10.0), (20, 20.0), (30, 50.0)]
    assert "source_loss/a" in events.Tags()["scalars"]


@pytest.mark.parametrize(("variable", "mode"), [(None, "online"), ("offline", "offline"), ("disabled", "disabled")])
def test_the_wandb_mode_of_the_environment_takes_precedence(tmp_path, monkeypatch, variable, mode):
    """The client is a fake: only what it is started with matters here."""
    started = {}
    run = SimpleNamespace(define_metric=lambda *_, **__: None, url=None, finish=lambda: None, log=lambda record: None)
    fake = SimpleNamespace(
        init=lambda **settings: started.update(settings) or run, Settings=lambda **settings: settings
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    with open_trackers(TrackersConfig(wandb=WandbConfig()), tmp_path, step=0, settings={}) as trackers:
        trackers.log(record_of(1))
    assert started["mode"] == mode


def test_weights_and_biases_runs_offline_and_resumes_under_its_id(tmp_path):
    pytest.importorskip("wandb")
    config = TrackersConfig(wandb=WandbConfig(mode="offline"))
    ids = []
    for step in (0, 10):
        with open_trackers(config, tmp_path, step=step, settings={"seed": 0}) as trackers:
            assert "Weights & Biases" in trackers._trackers
            ids.append(trackers._trackers["Weights & Biases"]._run.id)
            trackers.log(record_of(step + 10))
    assert ids[0] == ids[1] == (tmp_path / "wandb" / "run-id").read_text()
    files = list((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    assert files
    assert all(file.stat().st_size > 0 for file in files)
