"""Simulated rollouts: how soon broken versions are rolled back, and how many good ones are.

    python -m bench.fleet_rollout [--runs 40] [--good 1000]

The decisions are the real ones; users, their requests and the time are simulated. Users differ: their rates are Pareto
distributed, each has a speed of its own, and a few have all the errors. The load follows a sine that makes tokens up to
twice as slow and refuses requests at its peak, for both versions.
"""

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.fleet.objectives import Objective, Outcome
from saccade.fleet.rollout import Rollout, RolloutPolicy, State

OBJECTIVES = (
    Objective(metric="errors", max_share=0.005, max_ratio=2.0),
    Objective(metric="refusals", max_share=0.01, max_ratio=2.0),
    Objective(metric="ttft", quantile=0.9, max_ratio=1.2),
    Objective(metric="tpot", quantile=0.9, max_ratio=1.2),
    Objective(metric="probes", max_share=0.0),
)
POLICY = RolloutPolicy()
NUM_PROBES = 3


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a new version."""

    slower: float = 1.0
    """Its times are so many times those of the running version."""
    errors: float = 0.0
    """Share of its requests that fail, in addition to those of every version."""
    wrong_answers: float = 0.0
    """Share of its answers to probes that are wrong."""
    from_share: float = 0.0
    """Share of users from which on requests are affected, as for a fault under load."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a simulated rollout ended."""

    state: State
    """Last state."""
    share: float
    """Largest share of users that had the new version."""
    num_requests: int
    """Requests that the new version answered."""
    num_answers: int
    """Answers to probes."""


class Traffic:
    """Requests of users at random times."""

    def __init__(self, seed: int, num_users: int = 5000, rate: float = 40.0) -> None:
        self.random = random.Random(seed)
        self.rate = rate
        self.users = [f"user-{seed}-{number}" for number in range(num_users)]
        weights = [self.random.paretovariate(1.3) for _ in self.users]
        self.cumulative = [sum(weights[:1])]
        for weight in weights[1:]:
            self.cumulative.append(self.cumulative[-1] + weight)
        self.speed = {user: self.random.lognormvariate(0.0, 0.25) for user in self.users}
        self.errors = {user: 0.05 if self.random.random() < 0.02 else 0.0 for user in self.users}
        self.phase = self.random.random() * 2 * math.pi

    def second(self, rollout: Rollout, now: float, fault: Fault) -> list[Outcome]:
        """Outcomes of the requests of one second."""
        count = int(self.rate) + (self.random.random() < self.rate % 1)
        users = self.random.choices(self.users, cum_weights=self.cumulative, k=count)
        return [self._outcome(user, rollout, now, fault) for user in users]

    def _outcome(self, user: str, rollout: Rollout, now: float, fault: Fault) -> Outcome:
        draw, version = self.random, rollout.version_of(user)
        is_faulty = version == rollout.new and rollout.share >= fault.from_share
        load = 0.5 + 0.5 * math.sin(2 * math.pi * now / 3600 + self.phase)
        slowness = (1 + load) * self.speed[user] * (fault.slower if is_faulty else 1.0)
        if load > 0.95 and draw.random() < 0.05:
            return Outcome(user=user, version=version, values={"errors": 0.0, "refusals": 1.0})
        if draw.random() < self.errors[user] + (fault.errors if is_faulty else 0.0):
            return Outcome(user=user, version=version, values={"errors": 1.0, "refusals": 0.0})
        ttft, tpot = 0.1 * slowness * draw.lognormvariate(0.0, 0.4), 0.01 * slowness * draw.lognormvariate(0.0, 0.15)
        return Outcome(user=user, version=version, values={"errors": 0.0, "refusals": 0.0, "ttft": ttft, "tpot": tpot})


def simulate(
    seed: int, fault: Fault, policy: RolloutPolicy = POLICY, objectives: Sequence[Objective] = OBJECTIVES
) -> Ending:
    """Roll out one version until it is done or rolled back; probes are asked once a minute during the ramp."""
    traffic = Traffic(seed)
    rollout = Rollout(
        f"rollout-{seed}",
        running="old",
        new="new",
        objectives=objectives,
        policy=policy,
        num_probes=NUM_PROBES,
        now=0.0,
    )
    now, num_requests, num_answers, share = 0.0, 0, 0, 0.0
    while rollout.state not in (State.DONE, State.ROLLED_BACK):
        now += 1.0
        if now == 30.0:
            rollout.replicas_ready()
        asked = (
            NUM_PROBES if rollout.state is State.PROBING or (rollout.state is State.RAMPING and now % 60 == 0) else 0
        )
        for _ in range(asked):
            rollout.answer_probe(is_right=traffic.random.random() >= fault.wrong_answers)
        num_answers += asked
        for outcome in traffic.second(rollout, now, fault):
            num_requests += outcome.version == "new"
            rollout.observe(outcome)
        rollout.decide(now)
        share = max(share, rollout.share)
    return Ending(state=rollout.state, share=share, num_requests=num_requests, num_answers=num_answers)


def upper_limit(num_events: int, num_runs: int, confidence: float = 0.95) -> float:
    """Upper limit of a probability after so many events in so many runs (Clopper and Pearson, one-sided)."""
    low, high = num_events / num_runs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        terms = (math.comb(num_runs, k) * middle**k * (1 - middle) ** (num_runs - k) for k in range(num_events + 1))
        low, high = (middle, high) if sum(terms) > 1 - confidence else (low, middle)
    return high


def _detection(name: str, fault: Fault, runs: int) -> None:
    """Print one point of the detection curve."""
    endings = [simulate(seed, fault) for seed in range(runs)]
    caught = [ending for ending in endings if ending.state is State.ROLLED_BACK]
    if not caught:
        print(f"{name:38s} rolled back 0 of {runs}")
        return
    requests = sorted(ending.num_requests for ending in caught)
    answers = statistics.median(ending.num_answers for ending in caught)
    print(
        f"{name:38s} rolled back {len(caught)} of {runs}; requests p50 {requests[len(requests) // 2]}, "
        f"p90 {requests[int(0.9 * len(requests))]}; probe answers p50 {answers:g}; "
        f"share p50 {statistics.median(ending.share for ending in caught):.0%}",
        flush=True,
    )


def main() -> None:
    """Print the detection curve, and how often good versions are rolled back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="rollouts per fault")
    parser.add_argument("--good", type=int, default=1000, help="rollouts of a good version")
    options = parser.parse_args()
    for slower in (1.1, 1.25, 1.35, 1.5, 2.0, 4.0):
        _detection(f"times x {slower:g}", Fault(slower=slower), options.runs)
    _detection("times x 1.5 from 50 % of users", Fault(slower=1.5, from_share=0.5), options.runs)
    for errors in (0.005, 0.01, 0.02, 0.05, 0.2):
        _detection(f"{errors:.1%} more errors", Fault(errors=errors), options.runs)
    _detection("2 % more errors from 50 % of users", Fault(errors=0.02, from_share=0.5), options.runs)
    for wrong in (0.01, 0.1, 0.5, 1.0):
        _detection(f"{wrong:.0%} wrong answers", Fault(wrong_answers=wrong), options.runs)
    false = sum(simulate(seed, Fault()).state is State.ROLLED_BACK for seed in range(10_000, 10_000 + options.good))
    print(
        f"good versions rolled back: {false} of {options.good}, at most {upper_limit(false, options.good):.2%} at 95 %"
    )


if __name__ == "__main__":
    main()
