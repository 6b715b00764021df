"""Scaling on Ray under a step of the load: our policy next to Ray Serve's default, with paced replicas.

    PYTHONPATH=. python -m bench.fleet_step [--seed 0]

One pool for each policy gets the same requests at the same times: 2 per second for a minute, 8 per second for two, 2
per second for two more. They have 1,000 tokens of their own and answers of 100, and replicas take the time of
`H200_8B`, ten times slower: one computes the prompts of about two requests per second. A replica is ready 15 s after
its process has started. Printed are the requests whose first token came within 2 s, and the hours of all replicas,
those that start or stop included.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from bench.paced_engine import message_of, slower
from bench.paced_replicas import Answer, Asked, Front, PacedEngineReplica, PacedReplica, Prompt
from saccade.engine import EngineConfig
from saccade.fleet.cluster.deployments import scaling_config
from saccade.fleet.cluster.names import ENGINE
from saccade.fleet.config import VersionConfig
from saccade.fleet.costs import H200_8B
from saccade.fleet.replicas import REPORT_S, Replica, RoutedRequest
from saccade.fleet.routing import RoutingPolicy
from saccade.fleet.scaling import ScalingPolicy
from saccade.fleet.workloads import VERSION

OURS = "predicted queue time"
SLOWDOWN, LOAD_S, OBJECTIVE_S, MAX_REPLICAS = 10.0, 15.0, 2.0, 6
PHASES = ((60.0, 2.0), (120.0, 8.0), (120.0, 2.0))
"""Seconds and requests per second."""
BOUNDS = {"min_replicas": 1, "initial_replicas": 1, "max_replicas": MAX_REPLICAS}
POLICIES: dict[str, AutoscalingConfig] = {
    OURS: scaling_config(
        ScalingPolicy(max_queue_s=OBJECTIVE_S / 2, warm_up_s=LOAD_S + 5, shrink_after_s=60.0), 1, MAX_REPLICAS
    ),
    "Ray's default": AutoscalingConfig(**BOUNDS),
    "ongoing requests, target 10, 5 s and 60 s": AutoscalingConfig(
        **BOUNDS, target_ongoing_requests=10, upscale_delay_s=5, downscale_delay_s=60, look_back_period_s=15
    ),
}
"""The third has Ray's policy react as soon as ours; ten requests are those of a replica that is half loaded."""


def requests(seed: int) -> Iterator[Asked]:
    """The requests of the trace."""
    rng, begin, number = random.Random(seed), 0.0, 0
    for seconds, rate in PHASES:
        time_s = begin + rng.expovariate(rate)
        begin += seconds
        while time_s < begin:
            request = RoutedRequest(id=str(number), version=VERSION, prompt_tokens=1000, output_tokens=100)
            yield Asked(time_s, Prompt(prompt="", session=request.id, request=request), message_of(request))
            time_s, number = time_s + rng.expovariate(rate), number + 1


def run(seed: int) -> dict[str, dict[str, float]]:
    """Run the trace, and return the figures of each policy."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    folder = tempfile.mkdtemp(prefix="paced-", dir="/tmp")
    ray.init(
        num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level="warning",
        log_to_driver=False, object_store_memory=100_000_000, _temp_dir=folder,
    )  # fmt: skip
    try:
        serve.start(proxy_location="Disabled")
        for app, scaling in POLICIES.items():
            _deploy(app, scaling)
        policy = RoutingPolicy()
        policy = replace(policy, load_floor_s=SLOWDOWN * policy.load_floor_s, tie_s=SLOWDOWN * policy.tie_s)
        actor: Any = ray.remote(num_cpus=0.01)(Front)
        front = actor.remote(0, tuple(POLICIES), OURS, VERSION, policy)
        ray.get(front.prepare.remote(1))
        running = front.run.remote(list(requests(seed)), time.monotonic() + 2)
        replica_s, last = dict.fromkeys(POLICIES, 0.0), time.monotonic()
        most = dict.fromkeys(POLICIES, 0)
        while not ray.wait([running], timeout=1)[0]:
            now = time.monotonic()
            for app, count in _replicas().items():
                replica_s[app] += count * (now - last)
                most[app] = max(most[app], count)
            last = now
        answers = ray.get(running)
        return {app: _figures(answers[app], replica_s[app] / 3600, most[app]) for app in POLICIES}
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _deploy(app: str, scaling: AutoscalingConfig) -> None:
    costs = slower(H200_8B, SLOWDOWN)
    replica = Replica(name="", version=VERSION, costs=costs, cached_patches=0, cached_tokens=700_000)
    router = RequestRouterConfig()
    if app == OURS:
        router = RequestRouterConfig(request_router_class="saccade.fleet.cluster.ray_router.ChosenReplicaRouter")
    deployment = serve.deployment(
        name=ENGINE if app == OURS else "PacedReplica", autoscaling_config=scaling, max_ongoing_requests=10_000,
        request_router_config=router, ray_actor_options={"num_cpus": 0.01}, graceful_shutdown_timeout_s=60.0,
    )  # fmt: skip
    if app == OURS:
        engine = EngineConfig(encoder_cache=False)
        version = VersionConfig(
            name=VERSION, checkpoint="paced", traffic=100, gpus_per_replica=0, engine=engine, costs=costs
        )
        bound = deployment(PacedEngineReplica).bind(version, replica, SLOWDOWN * REPORT_S, LOAD_S)
    else:
        bound = deployment(PacedReplica).bind(replica, LOAD_S)
    serve.run(bound, name=app, route_prefix=None)


def _replicas() -> dict[str, int]:
    """Replicas of each policy, whatever their state."""
    status = serve.status().applications
    deployments = {app: list(status[app].deployments.values()) for app in POLICIES}
    return {app: sum(sum(one.replica_states.values()) for one in found) for app, found in deployments.items()}


def _figures(answers: list[Answer], replica_hours: float, most: int) -> dict[str, float]:
    waits = np.array([answer.first_token - answer.due for answer in answers])
    return {
        "requests": len(answers),
        "within": float(np.mean(waits <= OBJECTIVE_S)),
        "p50_s": float(np.percentile(waits, 50)),
        "p90_s": float(np.percentile(waits, 90)),
        "p99_s": float(np.percentile(waits, 99)),
        "replica_hours": replica_hours,
        "most_replicas": most,
    }


def main() -> None:
    """Print a line per policy, and the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    record = run(seed)
    for policy, one in record.items():
        ttft = " ".join(f"{one[name]:.2f}" for name in ("p50_s", "p90_s", "p99_s"))
        print(
            f"{policy:<42} within {OBJECTIVE_S:g} s {one['within']:6.1%}  {one['replica_hours']:.3f} replica-hours, "
            f"at most {one['most_replicas']:g}  TTFT p50, p90, p99 {ttft} s",
            flush=True,
        )
    print(json.dumps({"seed": seed} | record))


if __name__ == "__main__":
    main()
