"""What a fleet does next: which versions run, who has users, and what a new controller continues."""

import json
import random
from dataclasses import replace

import pytest
from fleet.simulated_cluster import ERRORS, PROBE, QUICK, Cluster, fleet, model, version

from saccade.fleet.bounds import bounds_of, divide
from saccade.fleet.config import Pool
from saccade.fleet.driver import Driver
from saccade.fleet.experiments import Experiment, Variant
from saccade.serve.config import ServeConfig

MAY, JUNE, JULY = version("may"), version("june"), version("july")


def running(*versions, **fields):
    """A cluster that runs versions."""
    cluster = Cluster()
    cluster.command(fleet(model(*versions, **fields)), "up")
    cluster.run(10)
    assert set(cluster.shares["tiny"]) == {one.name for one in versions}
    return cluster


def test_the_first_version_starts_without_a_ramp_and_the_fronts_start_with_it():
    cluster = Cluster()
    cluster.command(fleet(model(MAY)), "up")
    cluster.tick()
    assert cluster.front is not None
    assert (cluster.states, cluster.shares) == ({"may": "starting"}, {"tiny": {}})
    cluster.run(3)
    assert (cluster.states, cluster.shares) == ({"may": "ready"}, {"tiny": {"may": 1.0}})
    assert cluster.said("may") == ["starts", "ready"]
    assert cluster.driver.models["tiny"].progress == "done"
    assert cluster.run(100).actions == ()


def test_the_first_versions_get_users_as_they_become_ready_and_their_shares_in_the_end():
    cluster = Cluster()
    cluster.faults["june"] = "silent"
    cluster.command(fleet(model(version("may", 90.0), version("june", 10.0), probes=(PROBE,))), "up")
    cluster.run(6)
    assert cluster.shares == {"tiny": {"may": 1.0}}
    cluster.faults.clear()
    cluster.run(3)
    assert cluster.shares["tiny"] == pytest.approx({"may": 0.9, "june": 0.1})


@pytest.mark.parametrize("fault", ["does not load", "never ready", "wrong", "silent"])
def test_a_first_version_that_does_not_load_or_fails_its_probes_gets_no_users(fault):
    cluster = Cluster()
    cluster.faults["june"] = fault
    cluster.command(fleet(model(version("may", 50.0), version("june", 50.0), probes=(PROBE,))), "up")
    cluster.run(60)
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert cluster.states == {"may": "ready"}
    assert ("tiny", "june") not in cluster.engines
    versions = cluster.driver.models["tiny"]
    assert versions.progress == "rolled back"
    assert versions.reason.startswith("june: ")


def test_an_update_ramps_and_deletes_the_old_version_after_its_requests():
    cluster = running(MAY, probes=(PROBE,))
    cluster.command(fleet(model(JUNE, probes=(PROBE,))))
    shares = []
    for _ in range(40):
        cluster.tick(num_requests=20)
        shares.append(cluster.shares["tiny"].get("june", 0.0))
    assert sorted(set(shares)) == pytest.approx([0.0, 0.1, 0.5, 0.95, 1.0])
    assert shares == sorted(shares)
    assert cluster.states == {"june": "ready"}
    assert cluster.said("june") == ["starts", "probing", "ramping", "ramping", "ramping", "done"]
    assert cluster.said("may")[-2:] == ["drains", "deleted"]
    ended = {one["what"]: one["time_s"] for one in cluster.decisions if one["version"] == "may"}
    assert ended["deleted"] - ended["drains"] >= 10


@pytest.mark.parametrize("fault", ["does not load", "never ready", "wrong", "silent"])
def test_a_new_version_that_does_not_load_or_fails_its_probes_leaves_the_running_one_alone(fault):
    cluster = running(MAY, probes=(PROBE,))
    cluster.faults["june"] = fault
    cluster.command(fleet(model(JUNE, probes=(PROBE,))))
    for _ in range(60):
        cluster.tick(num_requests=5)
        assert cluster.shares == {"tiny": {"may": 1.0}}
    assert cluster.states == {"may": "ready"}
    assert set(cluster.engines) == {("tiny", "may")}
    versions = cluster.driver.models["tiny"]
    assert (versions.progress, versions.reason.partition(":")[0]) == ("rolled back", "june")
    if fault == "does not load":
        assert versions.reason == "june: no such checkpoint"


def test_a_version_with_errors_is_rolled_back_with_its_evidence_and_drains():
    cluster = running(MAY)
    cluster.faults["june"] = 0.5
    cluster.command(fleet(model(JUNE, rollout=replace(QUICK, hold_s=30.0))))
    for _ in range(40):
        cluster.tick(num_requests=50)
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert cluster.states == {"may": "ready"}
    [decision] = [one for one in cluster.decisions if one["what"] == "rolled back"]
    assert decision["reason"] == "errors: worse than the objective allows"
    assert decision["evidence"][0]["log_e_maximum"] >= decision["evidence"][0]["log_e_needed"]
    json.dumps(decision, allow_nan=False)
    drained = [one["time_s"] for one in cluster.decisions if one["version"] == "june" and one["what"] == "deleted"]
    assert drained[0] - decision["time_s"] >= 10


def test_wrong_answers_to_probes_during_the_ramp_roll_back():
    cluster = running(MAY, probes=(PROBE,))
    cluster.command(fleet(model(JUNE, probes=(PROBE,))))
    while cluster.shares["tiny"].get("june", 0.0) < 0.4:
        cluster.tick()
    cluster.faults["june"] = "wrong"
    cluster.run(10)
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert "probes" in cluster.driver.models["tiny"].reason


def test_a_version_that_was_rolled_back_is_tried_again_by_another_update():
    cluster = running(MAY)
    cluster.faults["june"] = "does not load"
    cluster.command(fleet(model(JUNE)))
    cluster.run(60)
    assert cluster.said("june").count("starts") == 1
    cluster.faults.clear()
    cluster.command(fleet(model(JUNE)))
    cluster.run(60)
    assert cluster.shares == {"tiny": {"june": 1.0}}


def test_a_change_of_another_model_leaves_a_rollout_alone():
    cluster = running(MAY)
    other = model(version("x"), name="other")
    cluster.command(fleet(model(JUNE)))
    while cluster.shares["tiny"].get("june", 0.0) < 0.4:
        cluster.tick()
    split = cluster.steps[-1].models[0].split
    cluster.command(fleet(model(JUNE), other))
    assert cluster.tick().models[0].split == split
    cluster.run(40)
    assert cluster.shares == {"tiny": {"june": 1.0}, "other": {"x": 1.0}}


def test_shares_of_a_file_are_ramped_up_and_reached():
    cluster = running(version("may", 90.0), version("june", 10.0))
    cluster.command(fleet(model(version("may", 20.0), version("june", 80.0))))
    shares = []
    for _ in range(30):
        cluster.tick()
        shares.append(cluster.shares["tiny"]["june"])
    assert sorted(set(shares)) == pytest.approx([0.5, 0.8])
    cluster.command(fleet(model(MAY)))
    cluster.run(60)
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert cluster.states == {"may": "ready"}


def test_two_new_versions_are_introduced_one_after_the_other():
    cluster = running(MAY)
    cluster.command(fleet(model(version("may", 40.0), version("june", 30.0), version("july", 30.0))))
    seen = set()
    for _ in range(60):
        cluster.tick()
        seen.add(frozenset(name for name, state in cluster.states.items() if state == "starting"))
    assert frozenset({"june", "july"}) not in seen
    assert cluster.shares["tiny"] == pytest.approx({"may": 0.4, "june": 0.3, "july": 0.3})


def test_a_version_that_leaves_the_file_in_the_middle_of_its_ramp_loses_its_users_at_once():
    cluster = running(MAY)
    cluster.command(fleet(model(JUNE)))
    while cluster.shares["tiny"].get("june", 0.0) < 0.4:
        cluster.tick()
    cluster.command(fleet(model(JULY)))
    cluster.tick()
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert cluster.states["june"] == "draining"
    cluster.run(60)
    assert cluster.shares == {"tiny": {"july": 1.0}}
    assert cluster.states == {"july": "ready"}


def test_another_target_in_the_middle_of_a_ramp_moves_no_user_back():
    cluster = running(MAY)
    cluster.command(fleet(model(JUNE)))
    while cluster.shares["tiny"].get("june", 0.0) < 0.4:
        cluster.tick()
    users = [f"user {number}" for number in range(500)]
    new = {user for user in users if cluster.steps[-1].models[0].split.version_of(user) == "june"}
    cluster.command(fleet(model(version("may", 30.0), version("june", 70.0))))
    for _ in range(20):
        split = cluster.tick().models[0].split
        larger = {user for user in users if split.version_of(user) == "june"}
        assert new <= larger
        new = larger
    assert cluster.shares["tiny"] == pytest.approx({"may": 0.3, "june": 0.7})


def test_an_operator_goes_back_in_the_middle_of_a_ramp_at_once():
    cluster = running(MAY)
    cluster.command(fleet(model(JUNE)))
    while cluster.shares["tiny"].get("june", 0.0) < 0.4:
        cluster.tick()
    target = cluster.driver.models["tiny"].rollback_target
    assert [(one.name, one.traffic) for one in target] == [("may", 100.0)]
    cluster.command(fleet(model(*target)), "rollback", at_once=("tiny",))
    cluster.tick()
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert cluster.states == {"may": "ready", "june": "draining"}


def test_an_operator_goes_back_to_a_version_that_has_ended_without_a_ramp_when_it_is_ready():
    cluster = running(MAY, probes=(PROBE,))
    cluster.command(fleet(model(JUNE, probes=(PROBE,))))
    cluster.run(60)
    assert cluster.states == {"june": "ready"}
    target = cluster.driver.models["tiny"].rollback_target
    cluster.command(fleet(model(*target, probes=(PROBE,))), "rollback", at_once=("tiny",))
    cluster.tick()
    assert cluster.shares == {"tiny": {"june": 1.0}}, "until may has warmed up"
    cluster.run(5)
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert [one.name for one in cluster.driver.models["tiny"].rollback_target] == ["june"]


def test_going_back_to_a_version_that_fails_keeps_the_running_one():
    cluster = running(MAY)
    cluster.command(fleet(model(JUNE)))
    cluster.run(60)
    cluster.faults["may"] = "does not load"
    target = cluster.driver.models["tiny"].rollback_target
    cluster.command(fleet(model(*target)), "rollback", at_once=("tiny",))
    for _ in range(30):
        cluster.tick()
        assert cluster.shares == {"tiny": {"june": 1.0}}
    assert cluster.driver.models["tiny"].progress == "rolled back"
    assert cluster.states == {"june": "ready"}


def test_a_version_with_changed_settings_under_its_name_is_refused_and_what_runs_continues():
    cluster = running(MAY)
    cluster.command(fleet(model(replace(MAY, checkpoint="other"))))
    cluster.run(5)
    assert "Give the changed version another name" in cluster.driver.models["tiny"].refusal
    assert cluster.shares == {"tiny": {"may": 1.0}}


def test_a_fleet_that_goes_down_ends_its_fronts_first_and_leaves_nothing():
    cluster = running(MAY)
    cluster.command(fleet(model(MAY)), "down")
    cluster.tick()
    assert cluster.front.gone_at is not None
    assert cluster.engines["tiny", "may"].gone_at is None
    step = cluster.run(20)
    assert step.has_ended
    assert (cluster.engines, cluster.front, step.models) == ({}, None, ())
    cluster.command(fleet(model(MAY)), "up")
    cluster.run(10)
    assert cluster.shares == {"tiny": {"may": 1.0}}


def test_everything_starts_again_after_the_cluster_was_lost_and_no_user_moves():
    cluster = running(version("may", 60.0), version("june", 40.0))
    split = cluster.steps[-1].models[0].split
    cluster.lose_everything()
    cluster.tick()
    assert cluster.shares == {"tiny": {}}
    cluster.run(10)
    assert cluster.steps[-1].models[0].split == split
    assert cluster.front is not None


def test_a_version_with_users_whose_application_is_gone_is_deployed_until_it_runs():
    cluster = running(MAY)
    cluster.faults["may"] = "does not load"
    cluster.lose_everything()
    cluster.run(50)
    assert cluster.shares == {"tiny": {}}
    assert "no such checkpoint" in [one["reason"] for one in cluster.decisions]
    cluster.faults.clear()
    cluster.run(60)
    assert cluster.shares == {"tiny": {"may": 1.0}}


def test_an_application_that_no_version_accounts_for_is_deleted():
    cluster = running(MAY)
    cluster.engines["tiny", "orphan"] = cluster.engines["tiny", "may"].__class__(0.0, None, (1, 1))
    cluster.run(5)
    assert set(cluster.engines) == {("tiny", "may")}


def test_fronts_are_deployed_again_only_if_their_own_settings_change():
    cluster = running(MAY)
    cluster.command(fleet(model(JUNE)))
    assert "DeployFronts" not in [type(one).__name__ for one in cluster.tick().actions]
    cluster.command(fleet(model(JUNE), server=ServeConfig(port=8001)))
    assert "DeployFronts" in [type(one).__name__ for one in cluster.tick().actions]
    assert "DeployFronts" not in [type(one).__name__ for one in cluster.tick().actions]


def test_replicas_of_a_pool_are_divided_by_share_and_a_larger_pool_takes_none_away():
    assert divide(10, {"may": 0.9, "june": 0.1}) == {"may": 9, "june": 1}
    assert divide(1, {"may": 0.9, "june": 0.1}) == {"may": 1, "june": 1}
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    for total in range(3, 40):
        counts, larger = divide(total, shares), divide(total + 1, shares)
        assert sum(counts.values()) == total
        assert all(counts[name] <= larger[name] for name in shares)
        assert all(abs(counts[name] - total * shares[name]) < 1.5 for name in shares)
    assert bounds_of(Pool(min_replicas=0, max_replicas=4), {"a": 0.75, "b": 0.25}) == {"a": (0, 3), "b": (0, 1)}


def test_a_new_version_has_replicas_for_its_next_share_before_it_gets_it():
    cluster = Cluster()
    pool = Pool(min_replicas=10, max_replicas=20)
    cluster.command(fleet(model(MAY, engines=pool)), "up")
    cluster.run(10)
    assert cluster.engines["tiny", "may"].bounds == (10, 20)
    cluster.command(fleet(model(JUNE, engines=pool)))
    for _ in range(40):
        share = cluster.shares["tiny"].get("june", 0.0)
        cluster.tick()
        if ("tiny", "june") in cluster.engines and cluster.states.get("may") == "ready":
            assert cluster.engines["tiny", "june"].bounds[0] >= int(10 * share)
            assert cluster.engines["tiny", "may"].bounds[0] >= 1
    assert cluster.engines["tiny", "june"].bounds == (10, 20)


def test_a_pool_that_may_be_empty_has_a_replica_while_a_version_warms_up():
    cluster = Cluster()
    cluster.command(fleet(model(MAY, engines=Pool(min_replicas=0, max_replicas=2))), "up")
    cluster.tick()
    assert cluster.engines["tiny", "may"].bounds == (1, 2)
    cluster.run(10)
    assert cluster.engines["tiny", "may"].bounds == (0, 2)


# ------------------------------------------------------------------ experiments

INT4 = version("int4", 0.0)
COLOURS = Experiment(
    name="colours", share=0.5, metrics=("errors",),
    variants=(Variant(name="grey", version="may"), Variant(name="red", version="int4", proportion=3.0)),
)  # fmt: skip


def reports(cluster):
    return [one.report() for one in cluster.driver.models["tiny"].experiments.runs.values()]


def in_experiment(cluster, seconds=10, faults=(), **fields):
    """A cluster that runs may for all users, and compares it with int4."""
    cluster = cluster or Cluster()
    cluster.faults.update(faults)
    cluster.command(fleet(model(MAY, INT4, experiments=(COLOURS,), **fields)), "up")
    cluster.run(seconds)
    return cluster


def test_an_experiment_begins_when_its_version_has_answered_the_probes_and_its_users_are_counted():
    cluster = in_experiment(None, faults={"int4": "silent"}, probes=(PROBE,))
    cluster.run(4, num_requests=50)
    assert cluster.states == {"may": "ready", "int4": "probing"}
    assert cluster.driver.models["tiny"].progress == "done"
    [report] = reports(cluster)
    assert (report["is_running"], report["variants"]["grey"]["requests"]) == (False, 0)
    assert report["fallbacks"] == pytest.approx(100, abs=30)
    cluster.faults.clear()
    cluster.run(60, num_requests=50)
    assert cluster.states == {"may": "ready", "int4": "ready"}
    assert cluster.shares == {"tiny": {"may": 1.0}}
    assert cluster.steps[-1].models[0].shares == pytest.approx({"may": 0.625, "int4": 0.375})
    [again] = reports(cluster)
    assert again["is_running"]
    assert again["fallbacks"] <= report["fallbacks"] + 50, "the requests of the first seconds"
    users = {name: one["users"] for name, one in again["variants"].items()}
    assert users["red"] / sum(users.values()) == pytest.approx(0.75, abs=0.05)
    assert again["sample_ratio"]["is_as_expected"]
    assert [one["what"] for one in cluster.decisions if one["version"] is None][-1] == "experiment begins"


@pytest.mark.parametrize("fault", ["does not load", "never ready", "wrong", "silent"])
def test_an_experiment_with_a_version_that_fails_never_begins_and_the_model_is_updated_all_the_same(fault):
    cluster = running(version("june"), probes=(PROBE,))
    in_experiment(cluster, 60, {"int4": fault}, probes=(PROBE,))
    assert (cluster.states, cluster.shares) == ({"may": "ready"}, {"tiny": {"may": 1.0}})
    assert cluster.driver.models["tiny"].progress == "done"
    assert not reports(cluster)[0]["is_running"]
    assert cluster.said("int4")[-3:] == ["rolled back", "drains", "deleted"]


def test_an_experiment_pauses_while_a_version_is_gone_and_users_have_their_variants_again():
    cluster = in_experiment(None)
    cluster.run(5, num_requests=20)
    before = cluster.steps[-1].models[0]
    del cluster.engines["tiny", "int4"]
    step = cluster.tick()
    assert step.models[0].shares == {"may": 1.0}
    [decision] = [one for one in step.decisions if one["what"] == "experiment pauses"]
    assert (decision["reason"], decision["evidence"][0]["experiment"]) == ("colours: int4 is not ready", "colours")
    cluster.run(10)
    assert cluster.steps[-1].models[0] == before


def test_a_new_version_has_its_users_by_the_ramp_before_an_experiment_gives_it_more():
    cluster = running(MAY)
    colours = replace(COLOURS, variants=(Variant(name="old", version="may"), Variant(name="new", version="june")))
    update = (version("may", 60.0), version("june", 40.0))
    cluster.command(fleet(model(*update, experiments=(colours,))))
    while cluster.driver.models["tiny"].progress == "updating":
        view = cluster.tick().models[0]
        assert not cluster.driver.models["tiny"].introductions or not view.experiments[0].is_running
    assert cluster.tick().models[0].shares == pytest.approx({"may": 0.55, "june": 0.45})
    cluster.faults["july"] = 0.5
    colours = replace(colours, variants=(Variant(name="old", version="may"), Variant(name="new", version="july")))
    cluster.command(fleet(model(version("may", 50.0), version("july", 50.0), experiments=(colours,))))
    cluster.run(60, num_requests=50)
    assert "rolled back" in cluster.said("july")
    assert not cluster.steps[-1].models[0].experiments[0].is_running
    assert "july" not in cluster.states


def test_requests_of_an_experiment_are_no_evidence_about_a_rollout():
    cluster = in_experiment(None)
    cluster.command(fleet(model(JUNE, version("may", 0.0), INT4, experiments=(replace(COLOURS, share=1.0),))))
    cluster.run(4, num_requests=50)
    [one] = cluster.driver.models["tiny"].introductions.values()
    assert one.is_ramping
    counts = one.evidence[0]
    assert (counts["new"]["requests"], counts["running"]["requests"]) == (0, 0)


def test_a_version_of_an_experiment_keeps_its_users_while_an_update_gives_it_traffic():
    cluster = in_experiment(None, probes=(PROBE,))
    update = (version("may", 50.0), version("int4", 50.0))
    cluster.command(fleet(model(*update, experiments=(COLOURS,), probes=(PROBE,))))
    while cluster.driver.models["tiny"].progress == "updating":
        assert cluster.tick(num_requests=20).models[0].experiments[0].is_running
    assert cluster.shares["tiny"] == pytest.approx({"may": 0.5, "int4": 0.5})


def test_an_experiment_whose_variant_breaks_an_objective_is_rolled_back_until_another_update():
    cluster = in_experiment(None, faults={"int4": 0.5})
    step = cluster.run(20, num_requests=20)
    assert step.models[0].shares == {"may": 1.0}
    assert "int4" not in cluster.states or cluster.states["int4"] == "draining"
    [decision] = [one for one in cluster.decisions if one["what"] == "experiment rolled back"]
    assert decision["reason"] == "colours: variant red, errors: worse than the objective allows"
    cluster.run(30, num_requests=20)
    assert set(cluster.engines) == {("tiny", "may")}
    cluster.faults.clear()
    in_experiment(cluster, objectives=(replace(ERRORS, max_share=0.06),))
    assert cluster.steps[-1].models[0].experiments[0].is_running


def test_an_experiment_whose_control_breaks_the_objective_too_continues():
    cluster = in_experiment(None, faults={"int4": 0.2, "may": 0.2})
    cluster.run(60, num_requests=20)
    assert cluster.steps[-1].models[0].experiments[0].is_running


def test_an_experiment_that_leaves_the_file_ends_with_its_report_and_its_version_drains():
    cluster = in_experiment(None)
    cluster.run(20, num_requests=20)
    counted = reports(cluster)[0]["variants"]
    cluster.command(fleet(model(MAY, INT4)))
    step = cluster.tick()
    assert step.models[0].experiments == ()
    [decision] = [one for one in step.decisions if one["what"] == "experiment ends"]
    assert decision["evidence"][0]["variants"] == counted
    assert cluster.states == {"may": "ready", "int4": "draining"}
    cluster.run(15)
    assert set(cluster.engines) == {("tiny", "may")}


def test_another_share_continues_the_results_and_other_proportions_begin_them_again():
    cluster = in_experiment(None)
    cluster.run(20, num_requests=20)
    counted = reports(cluster)[0]["variants"]
    wider = replace(COLOURS, share=0.8)
    cluster.command(fleet(model(MAY, INT4, experiments=(wider,))))
    cluster.tick()
    assert (reports(cluster)[0]["share"], reports(cluster)[0]["variants"]) == (0.8, counted)
    even = tuple(replace(one, proportion=1.0) for one in wider.variants)
    cluster.command(fleet(model(MAY, INT4, experiments=(replace(wider, variants=even),))))
    cluster.tick()
    assert [one["users"] for one in reports(cluster)[0]["variants"].values()] == [0, 0]


def test_replicas_follow_the_users_of_an_experiment_and_the_running_version_keeps_its_own_until_it_begins():
    pool = Pool(min_replicas=8, max_replicas=16)
    cluster = Cluster()
    cluster.command(fleet(model(MAY, engines=pool)), "up")
    cluster.run(10)
    cluster.command(fleet(model(MAY, INT4, experiments=(COLOURS,), engines=pool)))
    for _ in range(10):
        view = cluster.tick().models[0]
        if not view.experiments[0].is_running:
            assert cluster.engines["tiny", "may"].bounds[0] >= 7
    assert view.experiments[0].is_running
    assert {name: app.bounds for (_, name), app in cluster.engines.items()} == {"may": (5, 10), "int4": (3, 6)}


# ------------------------------------------------------------------ random fleets

NAMES = ("may", "june", "july", "august")
FAULTS = ("does not load", "never ready", "wrong", "silent", 0.5, 0.0, 0.0, 0.0, 0.0)


def random_models(chooser):
    """One or two models with one to three versions."""
    found = []
    for name in chooser.sample(("tiny", "large"), chooser.choice((1, 1, 2))):
        names = chooser.sample(NAMES, chooser.choice((1, 1, 2, 3)))
        cuts = sorted(chooser.sample(range(1, 100), len(names) - 1))
        traffic = [high - low for low, high in zip([0, *cuts], [*cuts, 100], strict=True)]
        versions = [version(one, float(part)) for one, part in zip(names, traffic, strict=True)]
        probes = chooser.choice(((), (PROBE,)))
        pool = Pool(min_replicas=chooser.choice((0, 1, 3)), max_replicas=chooser.choice((3, 6)))
        found.append(model(*versions, name=name, probes=probes, engines=pool, **random_experiments(chooser, versions)))
    return found


def random_experiments(chooser, versions):
    """None to two experiments, some with a version that has no traffic."""
    names, found = [one.name for one in versions], []
    others = [version(name, 0.0) for name in NAMES if name not in names]
    if len(versions) < 3 and chooser.random() < 0.5:
        versions = (*versions, others[0])
    for name in ("colours", "sizes")[: chooser.choice((0, 1, 1, 2))]:
        proportions = [(one.name, chooser.choice((1.0, 3.0))) for one in chooser.choices(versions, k=2)]
        variants = tuple(
            Variant(name=f"{number}", version=one, proportion=part) for number, (one, part) in enumerate(proportions)
        )
        found.append(Experiment(name=name, variants=variants, share=chooser.choice((0.1, 0.5)), metrics=("errors",)))
    return {"versions": tuple(versions), "experiments": tuple(found)}


def random_command(cluster, chooser):
    match chooser.randrange(10):
        case 0:
            cluster.command(fleet(*random_models(chooser)), "down")
        case 1 | 2 if cluster.driver.models and cluster.driver.desired is not None:
            config = cluster.driver.desired.config
            name = chooser.choice([one.name for one in config.models])
            versions = cluster.driver.models.get(name)
            target = versions.rollback_target if versions is not None else ()
            if target:
                models = [one.only_with(target) if one.name == name else one for one in config.models]
                cluster.command(replace(config, models=tuple(models)), "rollback", at_once=(name,))
        case 3:
            cluster.lose_everything()
        case _:
            cluster.command(fleet(*random_models(chooser)), chooser.choice(("up", "update", "update")))


def check_invariants(cluster, users, before):
    """What holds after every step; `before` is what the users of each model had after the last one."""
    step, after = cluster.steps[-1], {}
    decided = {one["model"] for one in step.decisions}
    for view in step.models:
        states = {one.config.name: one.state for one in view.versions}
        shares = view.shares
        assert not view.split.shares or sum(shares.values()) == pytest.approx(1.0)
        for name, share in shares.items():
            assert share > 0
            assert states[name] == "ready", (name, states)
            health = cluster.engines.get((view.name, name))
            assert health is not None, f"{name} has users and no application"
            assert health.gone_at is None
        old = before.get(view.name)
        able = [name for name, state in states.items() if state == "ready"]
        moved = [user for user in users if old is not None and old.get(user) != view.assign(user, able)]
        assert not moved or view.name in decided, "users moved without a decision"
        for version_view in view.versions:
            if version_view.state != "draining":
                least, most = cluster.driver.models[view.name].bounds()[version_view.config.name]
                assert 0 <= least <= most
        after[view.name] = {user: view.assign(user, able) for user in users}
    return after


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_random_fleets_keep_their_promises_and_a_new_controller_does_what_the_old_one_would_have_done(seed):
    cluster, users = Cluster(seed), [f"user {number}" for number in range(40)]
    chooser, before = cluster.random, {}
    cluster.command(fleet(*random_models(chooser)), "up")
    for _ in range(250):
        if chooser.random() < 0.05:
            cluster.faults = {name: chooser.choice(FAULTS) for name in NAMES}
        if chooser.random() < 0.04:
            random_command(cluster, chooser)
        if chooser.random() < 0.3:  # the controller is killed, and another one continues
            plain = json.loads(json.dumps(cluster.driver.to_plain()))
            cluster.driver = Driver.from_plain(plain)
            assert json.loads(json.dumps(cluster.driver.to_plain())) == plain
        cluster.tick(num_requests=3)
        before = check_invariants(cluster, users, before)
    cluster.faults = {}
    cluster.run(400)
    assert cluster.tick().actions == ()
    assert all(state == "ready" for state in cluster.states.values()), "every version runs or is deleted"
    for view in cluster.steps[-1].models:
        needed = {version for one in view.experiments for version in one.config.versions}
        names = {one.config.name for one in view.versions}
        assert set(view.split.shares) <= names <= set(view.split.shares) | needed
        for one in view.experiments:
            failure = cluster.driver.models[view.name].experiments.runs[one.config.name].failure
            assert one.is_running == (one.config.versions <= names and not failure)
    known = {(view.name, one.config.name) for view in cluster.steps[-1].models for one in view.versions}
    assert set(cluster.engines) == known
    numbers = [one["number"] for one in cluster.decisions]
    assert numbers == list(range(1, len(numbers) + 1)), "no decision is lost or made twice"


@pytest.mark.parametrize("seed", range(3))
def test_controllers_that_are_killed_every_second_decide_what_one_decides_that_lives(seed):
    def decisions(*, is_killed):
        cluster = Cluster(seed)
        chooser = random.Random(seed)
        cluster.command(fleet(*random_models(chooser)), "up")
        for number in range(200):
            if number % 40 == 30:
                cluster.faults = {name: chooser.choice(FAULTS) for name in NAMES}
                cluster.command(fleet(*random_models(chooser)))
            if is_killed:
                cluster.driver = Driver.from_plain(json.loads(json.dumps(cluster.driver.to_plain())))
            cluster.tick(num_requests=5)
        return cluster.decisions, [step.models for step in cluster.steps]

    assert decisions(is_killed=True) == decisions(is_killed=False)
