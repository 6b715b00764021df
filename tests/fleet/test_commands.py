"""The commands of a fleet, over a controller whose cluster is simulated: no Ray."""

import json
import threading
import time

import pytest
from fleet.test_control_loop import Front, Machine

from saccade.config import load_config
from saccade.fleet.cluster.control_loop import NotReadyError
from saccade.fleet.config import FleetConfig
from saccade.fleet.operations import with_absolute_paths

FILE = """
name = "photos"
state = "{state}"
server = {{ port = {port} }}

[[models]]
name = "tiny"
rollout = {{ ramp = [50, 100], hold_s = 0, min_requests = 0, settle_s = 0 }}
{model}
{versions}
"""
VERSION = """
[[models.versions]]
name = "{name}"
checkpoint = "{folder}"
traffic = {traffic}
gpus_per_replica = 0
"""


class RunningFleet:
    """A controller in a thread, a front that reports to it, and the file that commands are given."""

    def __init__(self, folder):
        self.folder, self.file, self.state = folder, folder / "FLEET.toml", folder / "state"
        self.machine = Machine(self.state)
        self.thread = threading.Thread(target=self._run)
        self.must_end = threading.Event()

    def write(self, *versions, model="", port=8000):
        described = "".join(
            VERSION.format(name=name, folder=self.folder / name, traffic=traffic) for name, traffic in versions
        )
        self.file.write_text(FILE.format(state=self.state, port=port, model=model, versions=described))

    def _run(self):
        """A second of the simulation takes 10 ms."""
        controller, front = self.machine.controller(), Front()
        while not self.must_end.wait(0.01) and not controller.has_ended:
            self.machine.now += 1
            controller.tick()
            try:
                front.report(controller)
            except NotReadyError:
                continue

    def start(self, config):
        self.machine.change(config, "up")
        self.thread.start()

    def stop(self):
        self.must_end.set()
        self.thread.join()


@pytest.fixture
def fleet(tmp_path):
    running = RunningFleet(tmp_path)
    running.write(("may", 100))
    running.start(with_absolute_paths(load_config(FleetConfig, running.file)))
    yield running
    running.stop()


def wait_until_ready(command, fleet):
    deadline = time.monotonic() + 30
    while '"progress": "done"' not in (out := command("fleet", "status", fleet.file, "--json").out):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return json.loads(out)


def test_status_says_what_runs_by_the_file_or_the_folder(command, fleet):
    status = wait_until_ready(command, fleet)
    assert status["is_up"]
    assert status["models"][0]["versions"][0]["share"] == 1.0
    text = command("fleet", "status", fleet.state)
    assert text.status == 0
    lines = text.out.splitlines()
    assert lines[0].startswith("fleet photos  up  generation 1 (up)  controller 1 of Ray a")
    assert lines[1] == "fronts  1 ready  http://127.0.0.1:8000"
    assert "may  ready  100 %" in text.out
    assert "tiny may: ready (replicas are ready)" in text.out


def test_update_follows_the_ramp_to_its_end_and_rollback_goes_back(command, fleet):
    wait_until_ready(command, fleet)
    fleet.write(("june", 100))
    updated = command("fleet", "update", fleet.file)
    assert updated.status == 0, updated
    for line in ("tiny june: starts", "tiny june: ramping 50 %", "tiny june: done 100 %"):
        assert line in updated.out
    back = command("fleet", "rollback", "tiny", fleet.file)
    assert back.status == 0, back
    assert back.out.startswith("tiny goes back to may 100 %\n")
    status = json.loads(command("fleet", "status", fleet.file, "--json").out)
    assert {one["name"]: one["share"] for one in status["models"][0]["versions"]}["may"] == 1.0
    assert status["desired"]["command"] == "rollback"


def test_an_update_that_is_rolled_back_ends_with_1_and_the_reason(command, fleet):
    wait_until_ready(command, fleet)
    fleet.machine.broken["june"] = "there is no such checkpoint"
    fleet.write(("june", 100))
    updated = command("fleet", "update", fleet.file, "--json")
    assert updated.status == 1
    lines = [json.loads(line) for line in updated.out.splitlines()]
    assert lines[-1] == {"rolled_back": "tiny: june: there is no such checkpoint"}
    assert [line["what"] for line in lines[:-1] if line["version"] == "june"][:2] == ["starts", "rolled back"]


def test_down_ends_the_fleet_and_may_be_repeated(command, fleet):
    wait_until_ready(command, fleet)
    ended = command("fleet", "down", fleet.file)
    assert ended.status == 0, ended
    assert ended.out.splitlines()[-1] == "the fleet is down"
    assert (fleet.machine.engines, fleet.machine.front) == ({}, None)
    assert command("fleet", "down", fleet.file).out == "the fleet is down already\n"
    assert command("fleet", "status", fleet.file).out.startswith("fleet photos  down")
    refused = command("fleet", "update", fleet.file)
    assert (refused.status, "saccade fleet up FLEET.toml" in refused.err) == (2, True)


def refused_by(command, *words):
    ended = command("fleet", *words)
    assert ended.status == 2, ended
    lines = [line for line in ended.err.splitlines() if " fleet     " not in line]  # else the controller's own log
    assert (len(lines), ended.out) == (1, ""), ended
    return lines[0]


def test_changes_that_cannot_be_followed_are_refused_before_anything_changes(command, fleet):
    wait_until_ready(command, fleet)
    fleet.file.write_text(fleet.file.read_text() + "adapters = { a = 'b' }\nengine = { max_adapters = 1 }\n")
    assert "version may of model tiny runs with other settings" in refused_by(command, "update", fleet.file)
    fleet.write(("may", 100))
    fleet.file.write_text(fleet.file.read_text().replace('"photos"', '"videos"'))
    assert "has the state of fleet photos, not of videos" in refused_by(command, "update", fleet.file)
    assert "there is nothing to go back to" in refused_by(command, "rollback", "tiny", fleet.state)
    assert "has no model 'large'. Its models: tiny" in refused_by(command, "rollback", "large", fleet.state)
    assert fleet.machine.state.newest_generation() == 1


def test_a_second_up_is_refused_and_names_the_first(command, fleet):
    wait_until_ready(command, fleet)
    (fleet.folder / "may").mkdir()
    assert "fleet photos is up already, by Ray a (process" in refused_by(command, "up", fleet.file)


def test_a_folder_without_a_fleet_is_one_line(command, tmp_path):
    assert "no fleet has its state there" in refused_by(command, "status", tmp_path)
    assert "no fleet has its state there" in refused_by(command, "down", tmp_path / "nothing")


def test_up_refuses_folders_that_are_missing(command, tmp_path):
    running = RunningFleet(tmp_path)
    running.write(("may", 100))
    assert "/may: no such file or folder" in refused_by(command, "up", running.file)
    assert not running.state.exists()


def test_a_damaged_state_is_one_line(command, fleet):
    wait_until_ready(command, fleet)
    fleet.stop()
    [snapshot] = (fleet.state / "snapshot").iterdir()
    snapshot.write_bytes(b"{")
    assert "is damaged. Remove it" in refused_by(command, "status", fleet.file)


def test_a_fleet_whose_controller_was_killed_is_called_down_after_a_while(command, fleet, monkeypatch):
    wait_until_ready(command, fleet)
    fleet.stop()
    monkeypatch.setattr("saccade.fleet.status._ALIVE_S", 0.0)
    assert command("fleet", "status", fleet.file).out.startswith("fleet photos  down")
    assert "no controller of this fleet is running" in refused_by(command, "update", fleet.file)
