"""The scaling policy as Ray Serve calls it: with series of metrics by replica, many times a second."""

from types import SimpleNamespace

import pytest

from saccade.config import encode
from saccade.fleet.cluster.ray_scaling import PredictedQueueTime
from saccade.fleet.scaling import ScalingPolicy

POLICY = encode(ScalingPolicy(warm_up_s=10.0, shrink_after_s=20.0, idle_s=30.0))


class Pool:
    """A pool in the form of Ray's context; replicas that are wanted are ready after 10 s."""

    def __init__(self, policy):
        self.policy, self.now, self.target = policy, 1000.0, 1
        self.ready_at = {0: 0.0}
        self.arrived = {0: 0.0}

    def run(self, seconds, work_per_s=0.0, queued=0.0):
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            running = [one for one, at in self.ready_at.items() if at <= self.now]
            for one in running:
                self.arrived[one] = self.arrived.get(one, 0.0) + work_per_s * 0.5 / len(running)
            values = {"arrived_s": self.arrived, "slots": dict.fromkeys(running, 8.0)}
            values |= {"request_s": dict.fromkeys(running, 1.0), "num_running": dict.fromkeys(running, work_per_s)}
            metrics = {
                name: {one: [SimpleNamespace(value=by_replica[one])] for one in running}
                for name, by_replica in values.items()
            }
            context = SimpleNamespace(
                app_name="app", current_time=self.now, running_replicas=running, raw_metrics=metrics,
                target_num_replicas=self.target, total_queued_requests=queued, policy_state={},
            )  # fmt: skip
            self.target, _ = self.policy(context)
            self._follow_target()
        return self.target

    def _follow_target(self):
        while len(self.ready_at) > self.target:
            self.ready_at.pop(max(self.ready_at))
        while len(self.ready_at) < self.target:
            self.ready_at[max(self.ready_at, default=-1) + 1] = self.now + 10.0


@pytest.fixture
def pool():
    return Pool(PredictedQueueTime(POLICY, min_replicas=1, max_replicas=6))


def test_a_pool_grows_with_the_work_that_arrives_and_shrinks_after_it(pool):
    assert pool.run(20, work_per_s=0.3) == 1
    assert 3 <= pool.run(60, work_per_s=2.5) <= 6
    assert pool.run(120, work_per_s=0.1) == 1


def test_bounds_hold(pool):
    assert pool.run(60, work_per_s=50.0) == 6
    assert pool.run(300) == 1


def test_a_pool_without_work_is_empty_until_a_front_calls():
    pool = Pool(PredictedQueueTime(POLICY, min_replicas=0, max_replicas=2))
    pool.run(5, work_per_s=0.1)
    assert pool.run(90) == 0
    assert pool.run(5, queued=1.0) == 1


def test_a_replica_that_was_replaced_does_not_count_its_work_twice(pool):
    pool.run(20, work_per_s=0.3)
    pool.arrived.clear()
    pool.ready_at = {7: 0.0}
    assert pool.run(20, work_per_s=0.3) == 1


def test_a_replica_that_ray_starts_for_a_waiting_call_is_not_stopped_as_idle_when_it_is_ready():
    pool = Pool(PredictedQueueTime(POLICY, min_replicas=0, max_replicas=1))
    assert pool.run(40) == 0
    pool.now += 600.0  # Ray does not ask the policy while the pool is empty
    pool.target = 1
    pool.ready_at, pool.arrived = {5: pool.now}, {}
    assert pool.run(20) == 1
    assert pool.run(20) == 0
