"""The controller's loop: what it stores before it acts, and what another one continues after it was killed."""

import contextlib
import itertools
import json
from dataclasses import replace

import pytest
from fleet.simulated_cluster import PROBE, fleet, model, version

from saccade.cli.fleet_status import status_lines
from saccade.errors import ConfigError, StorageError
from saccade.fleet.actions import AppHealth
from saccade.fleet.cluster.control_loop import ControlLoop, NotReadyError
from saccade.fleet.cluster.view import FleetView, FrontReport
from saccade.fleet.experiments import Experiment, Variant
from saccade.fleet.lease import LEASE_S, Candidate, Owner, holder_of
from saccade.fleet.objectives import Outcome
from saccade.fleet.operations import request_rollback
from saccade.fleet.state import FleetState
from saccade.fleet.status import fleet_status
from saccade.serve.rate_limit import Consumption

MAY, JUNE = version("may"), version("june")


class Killed(BaseException):
    """The controller's process ends here."""


class Machine:
    """A cluster, a state folder and a clock; controllers come and go."""

    def __init__(self, folder):
        self.now = 1000.0
        self.state = FleetState(str(folder))
        self.engines, self.front = {}, None
        self.answer = "stop"
        self.broken = {}
        self.deployed = []
        self.kill_after = None
        """Calls to cluster and store after which the controller is killed; None: it lives."""
        self.generation = 0

    def clock(self):
        return self.now

    def controller(self, cluster="Ray a"):
        state = FleetState(self.state.objects.url)
        state.objects = Traced(state.objects, self)
        owner = Owner.of_this_process(cluster)
        return ControlLoop(state, Traced(self, self), owner, wall=self.clock, clock=self.clock)

    def change(self, config, command="update", at_once=()):
        change = self.state.change(config, after=self.generation, command=command, time_s=self.now, at_once=at_once)
        self.generation = change.generation

    def run(self, controller, seconds, front=None):
        """Let time pass; returns the views that a front got."""
        views = []
        for _ in range(int(seconds)):
            self.now += 1
            controller.tick()
            if front is not None:
                views.append(front.report(controller))
        return views

    # ------------------------------------------------------------------ what a controller calls

    def observe(self, name):
        assert name == "photos"
        ended = [key for key, (_, deleted) in self.engines.items() if deleted is not None and self.now >= deleted + 2]
        for key in ended:
            del self.engines[key]
        engines = {
            key: AppHealth(is_deleting=True) if deleted is not None else AppHealth(num_ready=int(self.now >= since + 2))
            for key, (since, deleted) in self.engines.items()
        }
        return engines, self.front

    def deploy_engines(self, config, action):
        if reason := self.broken.get(action.version.name):
            raise ConfigError(reason)
        key = action.model.name, action.version.name
        self.deployed.append((*key, action.bounds))
        self.engines.setdefault(key, (self.now, None))

    def deploy_fronts(self, action):
        self.front = AppHealth(num_ready=1)

    def delete_engines(self, name, action):
        if (action.model, action.version) in self.engines:
            self.engines[action.model, action.version] = (0.0, self.now)

    def delete_fronts(self, name):
        self.front = None

    def ask(self, name, action, on_answer):
        on_answer(self.answer)


class Traced:
    """Counts calls, and kills the controller before or after one of them."""

    def __init__(self, wrapped, machine):
        self._wrapped, self._machine = wrapped, machine

    def __getattr__(self, name):
        found = getattr(self._wrapped, name)
        if not callable(found):
            return found

        def call(*arguments, **named):
            if self._machine.kill_after is not None:
                self._machine.kill_after -= 1
                if self._machine.kill_after < 0:
                    raise Killed
            return found(*arguments, **named)

        return call


class Front:
    """A front that reports to whichever controller there is."""

    def __init__(self, name="front", url="http://127.0.0.1:8000"):
        self.name, self.url, self.number = name, url, 0

    def report(self, controller, **fields):
        self.number += 1
        return self.repeat(controller, **fields)

    def repeat(self, controller, **fields):
        message = FrontReport(front=self.name, number=self.number, url=self.url, **fields).to_bytes()
        return FleetView.from_bytes(controller.sync(message))


def test_a_fleet_comes_up_and_its_status_is_in_the_folder(tmp_path):
    machine, front = Machine(tmp_path), Front()
    machine.change(fleet(model(MAY, probes=(PROBE,))), "up")
    controller = machine.controller()
    machine.run(controller, 12)
    views = machine.run(controller, 5, front)
    assert views[-1].models[0].split.default == "may"
    assert (views[-1].epoch, views[-1].generation) == (1, 1)
    status = json.loads(json.dumps(fleet_status(machine.state, machine.now), allow_nan=False))
    assert status["controller"]["epoch"] == 1
    assert status["fronts"] == {"ready": 1, "starting": 0, "failure": None, "urls": ["http://127.0.0.1:8000"]}
    [served] = status["models"]
    [one] = served["versions"]
    assert (one["state"], one["share"], one["replicas"]["ready"]) == ("ready", 1.0, 1)
    assert [decision["what"] for decision in status["decisions"]] == ["up", "starts", "probing", "ready"]
    assert machine.state.decisions(4) == status["decisions"]


def test_a_folder_without_a_fleet_has_no_status(tmp_path):
    assert fleet_status(FleetState(str(tmp_path)), 0.0) is None


@pytest.mark.parametrize("kill_after", range(0, 60, 5))
def test_a_controller_that_is_killed_at_any_call_leaves_what_another_one_continues(tmp_path, kill_after):
    machine, shares = Machine(tmp_path), []

    def run(controller, seconds):
        for _ in range(seconds):
            machine.now += 1
            controller.tick()
            split = FleetView.from_bytes(controller.sync(next(reports))).models[0].split
            shares.append(split.shares.get("june", 0.0))

    reports = (FrontReport(front="front", number=number, url="x").to_bytes() for number in itertools.count(1))
    machine.change(fleet(model(MAY)), "up")
    run(machine.controller(), 8)
    machine.change(fleet(model(JUNE)))
    for machine.kill_after in (kill_after, 47, 31, None):
        with contextlib.suppress(Killed):
            run(machine.controller(), 60)
    assert shares == sorted(shares), "traffic moves back"
    assert shares[-1] == 1.0
    snapshot = machine.state.snapshot()
    decisions = machine.state.decisions(snapshot.content["driver"]["num_decisions"])
    assert [one["number"] for one in decisions] == list(range(1, len(decisions) + 1))
    whats = [(one["version"], one["what"], one["share"]) for one in decisions if one["version"] == "june"]
    assert len(whats) == len(set(whats)), "a decision was made twice"
    assert set(machine.engines) == {("tiny", "june")}


def test_a_version_that_cannot_be_deployed_is_rolled_back_with_the_reason(tmp_path):
    machine = Machine(tmp_path)
    machine.change(fleet(model(MAY)), "up")
    controller = machine.controller()
    machine.run(controller, 8)
    machine.broken["june"] = "num_gpus of 3 is refused"
    machine.change(fleet(model(JUNE)))
    machine.run(controller, 10)
    [served] = fleet_status(machine.state, machine.now)["models"]
    assert (served["progress"], served["reason"]) == ("rolled back", "june: num_gpus of 3 is refused")
    assert [(one["name"], one["share"]) for one in served["versions"]] == [("may", 1.0)]


def test_of_two_controllers_the_one_without_the_lease_does_nothing_and_continues_when_the_other_dies(tmp_path):
    machine, front = Machine(tmp_path), Front()
    machine.change(fleet(model(MAY)), "up")
    first, second = machine.controller("Ray a"), machine.controller("Ray b")
    for _ in range(10):
        machine.run(first, 1)
        second.tick()
    with pytest.raises(NotReadyError):
        front.report(second)
    assert front.report(first).epoch == 1
    for _ in range(int(LEASE_S) + 2):
        machine.run(second, 1)
    assert front.report(second).epoch == 2
    num_deployed = len(machine.deployed)
    first.tick()
    with pytest.raises(NotReadyError):
        front.report(first)
    machine.change(fleet(model(JUNE)))
    machine.run(first, 3)
    assert len(machine.deployed) == num_deployed
    machine.run(second, 30)
    assert holder_of(machine.state.objects).owner.cluster == "Ray b"
    assert front.report(second).models[0].split.shares == {"june": 1.0}


def test_a_controller_that_cannot_reach_its_folder_stops_acting_before_another_one_may_act(tmp_path, monkeypatch):
    machine, front = Machine(tmp_path), Front()
    machine.change(fleet(model(MAY)), "up")
    controller = machine.controller()
    machine.run(controller, 8)

    def fail(*_):
        raise StorageError("the store does not answer")

    monkeypatch.setattr(controller._lease._objects._wrapped, "names", fail)
    for _ in range(int(LEASE_S) + 1):
        machine.now += 1
        with contextlib.suppress(StorageError):
            controller.tick()
    with pytest.raises(NotReadyError):
        front.report(controller)


def test_a_report_is_counted_once_and_a_lost_answer_is_repeated(tmp_path):
    machine, front, other = Machine(tmp_path), Front("a"), Front("b", "http://127.0.0.1:8001")
    machine.change(fleet(model(MAY)), "up")
    controller = machine.controller()
    machine.run(controller, 8)
    front.report(controller)
    other.report(controller)
    outcomes = {"tiny": (Outcome(user="ada", version="may", values={"errors": 1.0}),)}
    taken = {"key": Consumption(requests=2, tokens=100)}
    for send in (other.report, other.repeat, other.repeat):
        answer = send(controller, outcomes=outcomes, consumption=taken, poison=(b"digest",))
        assert answer.consumption == {}, "its own requests"
    first = front.report(controller)
    assert first.consumption == taken
    assert front.repeat(controller).consumption == taken
    assert front.report(controller).consumption == {}
    assert first.poison == frozenset([b"digest"])
    assert first.num_fronts == 2
    machine.run(controller, 5, front)
    [served] = fleet_status(machine.state, machine.now)["models"]
    assert (served["versions"][0]["requests"], served["versions"][0]["errors"]) == (1, 1)
    assert front.report(controller).num_fronts == 1, "the other one has not reported for 5 s"


def test_another_controller_knows_the_fronts_their_reports_and_what_is_refused(tmp_path):
    machine, front, other = Machine(tmp_path), Front("a"), Front("b")
    machine.change(fleet(model(MAY)), "up")
    controller = machine.controller()
    machine.run(controller, 8)
    front.report(controller)
    outcomes = {"tiny": (Outcome(user="ada", version="may", values={"errors": 1.0}),)}
    other.report(controller, outcomes=outcomes, poison=(b"digest",))
    machine.run(controller, 4)
    second = machine.controller()
    second.tick()
    view = other.repeat(second, outcomes=outcomes)
    assert (view.epoch, view.num_fronts, view.poison) == (2, 2, frozenset([b"digest"]))
    machine.run(second, 5)
    [served] = fleet_status(machine.state, machine.now)["models"]
    assert served["versions"][0]["requests"] == 1


def test_a_fleet_that_goes_down_ends_and_gives_the_lease_back(tmp_path):
    machine = Machine(tmp_path)
    machine.change(fleet(model(MAY)), "up")
    controller = machine.controller()
    machine.run(controller, 8)
    machine.change(fleet(model(MAY)), "down")
    machine.run(controller, 10)
    assert controller.has_ended
    assert (machine.engines, machine.front) == ({}, None)
    assert not fleet_status(machine.state, machine.now)["is_up"]
    assert Candidate(machine.state.objects, Owner.of_this_process("Ray b")).try_acquire() is not None


def test_probes_without_an_answer_are_asked_again(tmp_path):
    machine = Machine(tmp_path)
    machine.answer = None
    machine.change(fleet(model(MAY, probes=(PROBE,))), "up")
    controller = machine.controller()
    machine.run(controller, 8)
    assert fleet_status(machine.state, machine.now)["models"][0]["versions"][0]["state"] == "probing"
    machine.answer = "stop"
    machine.run(controller, 4)
    assert fleet_status(machine.state, machine.now)["models"][0]["versions"][0]["state"] == "ready"


def test_another_controller_continues_an_experiment_with_its_users_and_the_status_tells_its_results(tmp_path):
    machine, front = Machine(tmp_path), Front()
    variants = (Variant(name="old", version="may"), Variant(name="new", version="june"))
    months = Experiment(name="months", variants=variants, share=0.5, metrics=("tpot",))
    machine.change(fleet(model(MAY, version("june", 0.0), experiments=(months,))), "up")
    controller = machine.controller()
    machine.run(controller, 12)
    view = front.report(controller).models[0]
    assert view.experiments[0].is_running

    def report(controller, users):
        ended = []
        for user in users:
            chosen, experiment, variant = view.assign(user, ["may", "june"])
            values = {"tpot": 0.01 if chosen == "may" else 0.02, "errors": 0.0}
            ended.append(Outcome(user=user, version=chosen, values=values, experiment=experiment, variant=variant))
        front.report(controller, outcomes={"tiny": tuple(ended)})
        machine.run(controller, 5)

    def experiment():
        [served] = fleet_status(machine.state, machine.now)["models"]
        [one] = served["experiments"]
        return one

    report(controller, [f"user {number}" for number in range(500)])
    before = experiment()
    assert sum(one["users"] for one in before["variants"].values()) == pytest.approx(250, abs=40)
    second = machine.controller()
    machine.run(second, 5)
    assert experiment() == before
    assert front.report(second).models[0] == view
    report(second, [f"user {number}" for number in range(1500)])
    after = experiment()
    assert front.report(second).reports == {"tiny": [after]}
    assert sum(one["requests"] for one in after["variants"].values()) == pytest.approx(1000, abs=80)
    assert sum(one["users"] for one in after["variants"].values()) == pytest.approx(750, abs=60)
    [comparison] = after["comparisons"]
    assert (comparison["verdict"], comparison["difference"]) == ("higher", pytest.approx(0.01))
    lines = status_lines(json.loads(json.dumps(fleet_status(machine.state, machine.now))))
    assert "  experiment months: runs, with 50 % of users" in lines
    assert "    new against old, tpot: higher, +0.01 (" in "\n".join(lines)


def test_an_operator_who_goes_back_ends_the_experiments_of_the_model(tmp_path):
    machine = Machine(tmp_path)
    months = Experiment(
        name="months", variants=(Variant(name="old", version="june"), Variant(name="new", version="july"))
    )
    machine.change(fleet(model(MAY)), "up")
    controller = machine.controller()
    machine.run(controller, 12)
    machine.change(fleet(model(JUNE, version("july", 0.0), experiments=(months,))))
    machine.run(controller, 60)
    change, described = request_rollback(machine.state, "tiny", machine.now)
    assert (described, change.config.models[0].experiments) == ("may 100 %", ())
    machine.run(controller, 60)
    assert set(machine.engines) == {("tiny", "may")}


def test_a_controller_of_another_cluster_starts_what_had_users_with_the_settings_of_the_file(tmp_path):
    machine, front = Machine(tmp_path), Front()
    machine.change(fleet(model(MAY)), "up")
    machine.run(machine.controller("Ray a"), 8)
    machine.engines, machine.front = {}, None
    changed = replace(MAY, checkpoint="another-folder")
    machine.change(fleet(model(changed)), "up")
    controller = machine.controller("Ray b")
    for _ in range(int(LEASE_S) + 2):
        machine.run(controller, 1)
    machine.run(controller, 8)
    [served] = front.report(controller).models
    assert [(one.config.checkpoint, one.state) for one in served.versions] == [("another-folder", "ready")]
    assert served.split.shares == {"may": 1.0}
