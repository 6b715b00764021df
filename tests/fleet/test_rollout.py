"""Rollouts: who gets a new version, which versions are rolled back, and how rarely a good one is."""

import json
import random

import pytest

from bench.fleet_rollout import Fault, simulate, upper_limit
from saccade.errors import ConfigError
from saccade.fleet.comparison import position
from saccade.fleet.evidence import SequentialTest
from saccade.fleet.objectives import Objective, Outcome
from saccade.fleet.rollout import Rollout, RolloutPolicy, State

ERRORS = Objective(metric="errors", max_share=0.01)
PROBES = Objective(metric="probes", max_share=0.0)
QUICK = RolloutPolicy(hold_s=10.0, min_requests=0, settle_s=0.0)
SHORT = RolloutPolicy(hold_s=60.0, min_requests=50, settle_s=5.0)


def rollout(objectives=(ERRORS,), policy=QUICK, num_probes=0, target=1.0):
    return Rollout(
        "model/new", running="old", new="new", objectives=objectives, policy=policy, num_probes=num_probes, now=0.0,
        target=target,
    )  # fmt: skip


def ramping(**arguments):
    """A rollout in its first step."""
    one = rollout(**arguments)
    one.replicas_ready()
    assert one.decide(0.0).state is State.RAMPING
    return one


def outcome(one, user, **values):
    return Outcome(user=user, version=one.version_of(user), values=values)


def test_a_good_version_goes_through_every_share_and_every_decision_is_plain_data():
    one = rollout(objectives=(ERRORS, PROBES), num_probes=2)
    assert one.decide(1.0) is None
    one.replicas_ready()
    decisions = [one.decide(2.0)]
    for _ in range(2):
        one.answer_probe(is_right=True)
    decisions += [made for now in range(3, 80) if (made := one.decide(float(now)))]
    assert [made.share for made in decisions] == [0.0, 0.01, 0.1, 0.3, 0.5, 0.95, 1.0]
    assert decisions[-1].state is State.DONE
    assert one.decide(1000.0) is None
    for made in decisions:
        assert json.loads(json.dumps(made.evidence)) == list(made.evidence)
        assert made.reason


def test_a_target_below_everything_ends_the_ramp_there():
    one = ramping(target=0.2)
    shares = [made.share for now in range(100) if (made := one.decide(float(now)))]
    assert shares == [0.1, 0.2, 0.2]
    assert one.state is State.DONE


def test_a_larger_share_adds_users_and_moves_none_back():
    one, users = ramping(), [f"user {number}" for number in range(5000)]
    new = {user for user in users if one.version_of(user) == "new"}
    for now in range(100):
        if one.decide(float(now)):
            larger = {user for user in users if one.version_of(user) == "new"}
            assert new <= larger
            assert abs(len(larger) / len(users) - one.share) < 0.03
            new = larger
    assert new == set(users)


def test_positions_of_users_are_unrelated_in_another_rollout():
    users = [f"user {number}" for number in range(4000)]
    both = sum(position(user, "a") < 0.5 and position(user, "b") < 0.5 for user in users)
    assert abs(both / len(users) - 0.25) < 0.03
    assert position("b", "a") != position("", "ab")


def test_probes_keep_a_version_from_traffic():
    one = rollout(objectives=(), num_probes=3)
    one.replicas_ready()
    one.decide(1.0)
    one.answer_probe(is_right=True)
    one.answer_probe(is_right=False)
    decision = one.decide(2.0)
    assert decision.state is State.ROLLED_BACK
    assert decision.evidence[0]["new"] == {"requests": 2, "exceeding": 1}
    assert "probes" in decision.reason


@pytest.mark.parametrize(("is_ready", "state"), [(False, "warming"), (True, "probing")])
def test_a_version_that_does_not_become_ready_is_rolled_back(is_ready, state):
    one = rollout(num_probes=1)
    if is_ready:
        one.replicas_ready()
        one.decide(1.0)
    assert one.state.value == state
    assert one.decide(299.0) is None
    assert one.decide(3000.0).state is State.ROLLED_BACK
    assert one.version_of("anyone") == "old"


def test_a_failure_is_the_reason_of_the_rollback_in_any_state():
    one = ramping()
    one.fail("checkpoint is damaged")
    decision = one.decide(1.0)
    assert (decision.state, decision.reason, decision.share) == (State.ROLLED_BACK, "checkpoint is damaged", 0.0)


def test_a_step_waits_for_its_requests():
    one = ramping(policy=RolloutPolicy(hold_s=10.0, min_requests=20, settle_s=0.0))
    assert one.decide(1000.0) is None
    users = [user for number in range(10_000) if one.version_of(user := f"user {number}") == "new"]
    for user in users[:20]:
        one.observe(outcome(one, user, errors=0.0))
    assert one.decide(1000.0).share == 0.1


def test_a_maximum_that_every_version_exceeds_is_no_reason_to_roll_back():
    shared = Objective(metric="errors", max_share=0.01, max_ratio=2.0)
    rng = random.Random(0)
    kept, absolute = ramping(objectives=(shared,)), ramping(objectives=(ERRORS,))
    for one in (kept, absolute):
        for number in range(20_000):
            one.observe(outcome(one, f"user {number}", errors=float(rng.random() < 0.3)))
    assert kept.decide(1.0) is None
    assert absolute.decide(1.0).state is State.ROLLED_BACK


def test_one_user_with_only_errors_does_not_roll_back_a_version():
    one = ramping(objectives=(Objective(metric="errors", max_ratio=1.5),))
    user = next(user for number in range(10_000) if one.version_of(user := f"user {number}") == "new")
    for _ in range(1000):
        one.observe(outcome(one, user, errors=1.0))
    assert one.decide(1.0) is None


def test_latencies_do_not_count_while_caches_are_cold_but_errors_do():
    tpot = Objective(metric="tpot", quantile=0.9, max_s=0.05)
    policy = RolloutPolicy(settle_s=30.0)
    one = ramping(objectives=(tpot, ERRORS), policy=policy)
    for number in range(20_000):
        one.observe(outcome(one, f"user {number}", tpot=1.0, errors=0.0))
    assert one.decide(20.0) is None
    for number in range(20_000):
        one.observe(outcome(one, f"user {number}", errors=1.0))
    assert one.decide(21.0).reason.startswith("errors:")


def test_requests_that_began_under_an_earlier_share_do_not_count():
    one = ramping(objectives=(Objective(metric="errors", max_ratio=1.5),))
    early = [outcome(one, f"user {number}", errors=1.0) for number in range(2000)]
    one.decide(20.0)
    assert one.share == 0.1
    for each in early:
        one.observe(each)
    moved = sum(0.01 <= position(each.user, "model/new") < 0.1 for each in early)
    [evidence] = one.evidence()
    assert evidence["new"]["requests"] + evidence["running"]["requests"] == len(early) - moved
    assert one.decide(21.0) is None


def test_another_controller_continues_with_the_same_decisions():
    tpot = Objective(metric="tpot", quantile=0.9, max_ratio=1.2)
    objectives = (Objective(metric="errors", max_share=0.01, max_ratio=2.0), tpot)
    rng = random.Random(1)
    first = ramping(objectives=objectives, policy=SHORT)
    for now in range(200):
        if now == 100:
            second = rollout(objectives=objectives, policy=SHORT)
            second.restore(json.loads(json.dumps(first.to_plain())))
        for _ in range(30):
            values = {"errors": float(rng.random() < 0.02), "tpot": rng.lognormvariate(-4.0, 0.3)}
            made = outcome(first, f"user {rng.randrange(3000)}", **values)
            for one in (first, second) if now >= 100 else (first,):
                one.observe(made)
        decision = first.decide(float(now))
        if now >= 100:
            assert second.decide(float(now)) == decision
            assert second.to_plain() == first.to_plain()


@pytest.mark.parametrize(
    "fault",
    [Fault(slower=1.5), Fault(errors=0.02), Fault(slower=1.5, from_share=0.5), Fault(wrong_answers=1.0)],
    ids=["slower tokens", "errors", "slower under load", "wrong answers"],
)
def test_a_version_with_a_fault_is_rolled_back(fault):
    ending = simulate(1, fault)
    assert ending.state is State.ROLLED_BACK
    assert ending.share <= 0.5
    assert fault.wrong_answers == 0 or ending.num_requests == 0


def test_good_versions_are_done():
    assert [simulate(seed, Fault(), SHORT).state for seed in range(3)] == [State.DONE] * 3


def test_a_sequential_test_alarms_no_more_often_than_stated_however_often_one_looks():
    rng, alarms, runs = random.Random(0), 0, 400
    for _ in range(runs):
        test = SequentialTest()
        for _ in range(300):
            allowed = rng.choice((0.01, 0.1, 0.5))
            test.add(happened=rng.random() < allowed, allowed=allowed)
            if test.is_alarm(0.05):
                alarms += 1
                break
    assert upper_limit(alarms, runs) <= 0.05


def test_what_may_never_happen_is_evidence_at_once():
    test = SequentialTest()
    for _ in range(100):
        test.add(happened=False, allowed=0.0)
    assert test.log_e_value == 0.0
    test.add(happened=True, allowed=0.0)
    assert test.is_alarm(1e-9)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"ramp": (10.0, 1.0)}, "ramp is"),
        ({"ramp": (0.0, 50.0)}, "ramp is"),
        ({"ramp": ()}, "ramp is"),
        ({"hold_s": -1.0}, "hold_s is"),
        ({"holdout": 100.0}, "holdout is"),
        ({"false_rollbacks": 0.0}, "false_rollbacks is"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(policy, message):
    with pytest.raises(ConfigError, match=message):
        RolloutPolicy(**policy)
