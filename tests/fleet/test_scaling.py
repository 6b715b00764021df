"""Scaling: replicas follow the predicted queue time, within bounds, and what they cost is counted."""

import random

import pytest

from bench.fleet_scaling import ENCODER, ENGINE, OngoingRequests, Predicting, Simulation
from saccade.errors import ConfigError
from saccade.fleet.scaling import Autoscaler, CostReport, Forecast, PoolLoad, ScalingPolicy, queue_time_s


def load(time_s, *, ready=1, starting=(), arrived=0.0, waiting=0.0, running=0, **fields):
    return PoolLoad(
        time_s=time_s, num_ready=ready, starting_s=starting, arrived_s=arrived, waiting_s=waiting,
        num_running=running, slots=32, request_s=5.0, **fields,
    )  # fmt: skip


def steady(autoscaler, rate, *, until=600, **fields):
    """The last decision under constant arrivals, with the replicas that it asks for."""
    decision = None
    for time_s in range(0, until, 5):
        ready = decision.num_replicas if decision else 1
        decision = autoscaler.decide(load(float(time_s), ready=ready, arrived=5 * rate, running=1, **fields))
    return decision


@pytest.mark.parametrize(("rate", "least", "most"), [(0.5, 1, 1), (3.0, 4, 4), (9.5, 10, 11)])
def test_steady_arrivals_get_the_replicas_that_keep_the_queue_short(rate, least, most):
    decision = steady(Autoscaler(ScalingPolicy(), min_replicas=1, max_replicas=100), rate)
    assert least <= decision.num_replicas <= most
    assert decision.predicted_queue_s <= 0.5
    assert decision.forecast == pytest.approx(rate, rel=0.01)


def test_queue_time_grows_with_load_and_ends_where_a_pool_is_overloaded():
    times = [queue_time_s(rate, 4, 8, 1.0) for rate in (0.0, 1.0, 3.0, 3.9)]
    assert times == sorted(times)
    assert queue_time_s(4.0, 4, 8, 1.0) == float("inf")
    assert queue_time_s(9.0, 10, 8, 1.0) < queue_time_s(0.9, 1, 8, 1.0)


def test_rising_arrivals_are_met_before_they_come():
    forecast = Forecast()
    for time_s in range(0, 300, 5):
        forecast.observe(1.0 + time_s / 60, 5.0)
    assert forecast.after(60.0, 0.0, 5.0) > forecast.after(0.0, 0.0, 5.0) + 0.3


def test_a_level_far_above_the_forecast_is_taken_at_once():
    forecast, rng = Forecast(), random.Random(0)
    for _ in range(100):
        forecast.observe(rng.gauss(1.0, 0.1), 5.0)
    forecast.observe(4.0, 5.0)
    assert forecast.after(60.0, 0.0, 5.0) == pytest.approx(4.0, rel=0.01)


def test_pages_in_use_add_replicas_before_requests_are_preempted():
    pool = {"pages_used": 950, "pages_per_replica": 1000}
    decision = steady(Autoscaler(ScalingPolicy(), min_replicas=1, max_replicas=8), 0.2, **pool)
    assert (decision.num_replicas, decision.reason) == (2, "pages")


def test_a_backlog_counts_replicas_that_start_already():
    autoscaler = Autoscaler(ScalingPolicy(warm_up_s=60.0), min_replicas=1, max_replicas=50)
    steady(autoscaler, 1.5)
    first = autoscaler.decide(load(600.0, ready=2, waiting=200.0, arrived=7.5, running=9))
    assert first.reason == "backlog"
    assert first.num_replicas > 2
    starting = (55.0,) * (first.num_replicas - 2)
    second = autoscaler.decide(load(605.0, ready=2, starting=starting, waiting=200.0, arrived=7.5, running=9))
    assert second.num_replicas == first.num_replicas
    cleared = autoscaler.decide(load(660.0, ready=first.num_replicas, arrived=80.0, running=9))
    assert cleared.num_replicas < first.num_replicas


def test_a_pool_scales_to_zero_after_idling_and_starts_for_the_first_request():
    autoscaler = Autoscaler(ScalingPolicy(idle_s=100.0, shrink_after_s=20.0), min_replicas=0, max_replicas=4)
    decisions = [autoscaler.decide(load(float(time_s), arrived=float(time_s == 0))) for time_s in range(0, 130, 10)]
    assert [decision.num_replicas for decision in decisions] == [1] * 10 + [0] * 3
    assert decisions[-1].reason == "idle"
    assert autoscaler.decide(load(200.0, ready=0)).num_replicas == 0
    assert autoscaler.decide(load(210.0, ready=0, waiting=0.1)).num_replicas == 1


def test_a_pool_whose_replica_takes_longer_to_start_than_it_may_idle_is_not_emptied_before_it_serves():
    autoscaler = Autoscaler(ScalingPolicy(idle_s=10.0, warm_up_s=60.0), min_replicas=0, max_replicas=1)
    autoscaler.decide(load(0.0, ready=0, waiting=1.0))
    starting = [autoscaler.decide(load(float(now), ready=0, starting=(60.0 - now,))) for now in range(1, 60)]
    assert {one.num_replicas for one in starting} == {1}
    served = [autoscaler.decide(load(float(now))) for now in range(60, 75)]
    assert served[0].num_replicas == 1
    assert served[-1].reason == "idle"


def test_another_controller_keeps_the_replicas_it_finds():
    autoscaler = Autoscaler(ScalingPolicy(shrink_after_s=300.0), min_replicas=1, max_replicas=20)
    assert autoscaler.decide(load(0.0, ready=9)).num_replicas == 9
    assert autoscaler.decide(load(299.0, ready=9)).num_replicas == 9
    assert autoscaler.decide(load(301.0, ready=9)).num_replicas == 1


@pytest.mark.parametrize("seed", range(5))
def test_decisions_stay_within_bounds_and_never_shrink_below_a_recent_need(seed):
    rng = random.Random(seed)
    low, high = rng.choice([(0, 5), (1, 3), (2, 30)])
    policy = ScalingPolicy(warm_up_s=rng.uniform(0, 120), shrink_after_s=50.0, idle_s=60.0)
    autoscaler, time_s, needs = Autoscaler(policy, min_replicas=low, max_replicas=high), 0.0, []
    for _ in range(500):
        time_s += rng.uniform(0.5, 10)
        one = load(
            time_s, ready=rng.randrange(high + 1), starting=tuple(rng.uniform(0, 99) for _ in range(rng.randrange(3))),
            arrived=rng.choice([0.0, rng.expovariate(0.05)]), waiting=rng.choice([0.0, 0.0, rng.expovariate(0.01)]),
            running=rng.randrange(3), pages_used=rng.randrange(3000), pages_per_replica=rng.choice([0, 500]),
        )  # fmt: skip
        decision = autoscaler.decide(one)
        assert low <= decision.num_replicas <= high
        assert decision.num_replicas >= 1 or not one.has_work
        assert decision.forecast >= 0
        recent = [number for when, number in needs if when >= time_s - 50.0]
        if decision.reason == "arrivals":
            needs.append((time_s, decision.num_replicas))
            assert decision.num_replicas >= max(recent, default=0)


def test_a_step_needs_fewer_replica_hours_than_a_policy_by_ongoing_requests():
    def step(time_s):
        return 24.0 if 200 <= time_s < 500 else 6.0

    reports = []
    for policy in (Predicting(ENGINE, 24), OngoingRequests(0.4 * ENGINE.slots, 24)):
        simulation = Simulation(ENGINE, policy, seed=0, num_replicas=2)
        simulation.run(step, 900)
        reports.append(simulation.costs.report())
    ours, theirs = reports
    assert ours["requests"] == theirs["requests"]
    assert ours["within_objective"] >= theirs["within_objective"] - 0.01
    assert ours["replica_hours"] < 0.6 * theirs["replica_hours"]


def test_a_pool_of_encoders_scales_by_the_same_policy():
    simulation = Simulation(ENCODER, Predicting(ENCODER, 24), seed=0, num_replicas=2)
    simulation.run(lambda time_s: 40.0 if time_s >= 100 else 15.0, 400)
    late = simulation.ttfts[-3000:]
    assert sum(ttft <= ENCODER.objective_s for ttft in late) >= 0.99 * len(late)


def test_costs_are_replica_hours_and_the_share_within_the_objective():
    costs = CostReport()
    assert costs.report()["within_objective"] is None
    for time_s in (0.0, 1800.0, 3600.0):
        costs.observe(time_s, num_ready=2, num_starting=1)
    for number in range(10):
        costs.finish(is_within_objective=number > 1)
    report = costs.report()
    assert (report["replica_hours"], report["starting_hours"]) == (3.0, 1.0)
    assert report["within_objective"] == 0.8
    assert report["replica_hours_per_1000_within"] == 375.0


@pytest.mark.parametrize(
    "fields", [{"warm_up_s": -1.0}, {"max_queue_s": 0.0}, {"clear_s": 0.0}, {"idle_s": float("inf")}]
)
def test_a_policy_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ScalingPolicy(**fields)
