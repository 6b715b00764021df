"""Our router next to Ray's own, on real Ray Serve replicas with paced device steps.

    PYTHONPATH=. python -m bench.fleet_routers --workload image-groups [--seed 0] [--slowdown 10]

Every deployment has three replicas that take the time of `H200_8B`, slowed down so that Ray's own time and that of a
busy machine stay small, and gets the same requests at the same times from the same two fronts. Ours gets them as the
replicas of a fleet do (`ReplicaSet`, a connection for each replica), the others through handles of Ray Serve. All
deployments run at once, so that they share whatever disturbs the machine. Times are printed as measured and divided by
the slowdown; the simulator gets the same arrivals and costs, and its oracle is the peer of the hit rates.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from bench.paced_engine import message_of, slower
from bench.paced_replicas import Answer, Asked, Front, PacedEngineReplica, PacedReplica, Prompt
from saccade.config import load_config
from saccade.engine import EngineConfig
from saccade.fleet.cluster.names import ENGINE
from saccade.fleet.config import FleetConfig, VersionConfig
from saccade.fleet.describe import ExpectedLength, routed
from saccade.fleet.replicas import REPORT_S, Replica
from saccade.fleet.routing import RoutingPolicy
from saccade.fleet.simulate import simulate
from saccade.fleet.workloads import PATCHES_PER_TOKEN, VERSION, Arrival, chat, image_groups, simulated_replicas

OURS = "expected-finish"
_LLM = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
"""`ray.serve.llm.request_router` exports it, and needs vLLM or SGLang to be imported."""
ROUTERS: dict[str, RequestRouterConfig] = {
    OURS: RequestRouterConfig(request_router_class="saccade.fleet.cluster.ray_router.ChosenReplicaRouter"),
    "power-of-two": RequestRouterConfig(),
    "prefix": RequestRouterConfig(request_router_class=_LLM),
    "prefix-5": RequestRouterConfig(request_router_class=_LLM, request_router_kwargs={"imbalanced_threshold": 5}),
    "consistent-hash": RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    ),
}
"""Routers by name. `prefix-5` is Ray's prefix router with a threshold of 5 requests between two queues, as in an
example of Ray's documentation; the default is infinity."""
NUM_REPLICAS, NUM_FRONTS = 3, 2
CACHE_SHARE = 0.18
"""Caches as a share of an 8B engine's: 40 groups on 3 replicas instead of 600 on 8."""
WORKLOADS: dict[str, tuple[float, int, Callable[[float, int, int], Iterator[Arrival]]]] = {
    "image-groups": (18.0, 200, image_groups),
    "chat": (30.0, 360, partial(chat, pause_s=1.0)),
}
"""Requests per second before the slowdown, number of requests, and the workload."""


def asked_of(workload: str, arrivals: Sequence[Arrival]) -> list[Asked]:
    """Requests with their texts, four characters per token; what requests share as tokens they share as text."""
    made = []
    for time_s, request in arrivals:
        session = request.images[0].key.decode().split()[0]
        tokens = request.prompt_tokens - sum(image.patches // PATCHES_PER_TOKEN for image in request.images)
        shared = 1000 if workload == "image-groups" else 512
        parts = ((session, shared), (request.id, tokens - shared))
        if workload == "chat":
            parts = (("system", shared), (session, tokens - shared))
        text = "".join(_text(f"{workload} {key}", 4 * length) for key, length in parts)
        message = message_of(request)
        described = routed(message.request, VERSION, ExpectedLength())
        described = replace(described, output_tokens=request.output_tokens)
        made.append(Asked(time_s, Prompt(prompt=text, session=session, request=described), message))
    return made


def _text(key: str, length: int) -> str:
    return "".join(random.Random(key).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def run(workload: str, seed: int, slowdown: float) -> dict[str, Any]:
    """Measure every router on one draw of a workload."""
    rate, count, generate = WORKLOADS[workload]
    arrivals = list(generate(rate, count, seed))
    [original] = simulated_replicas(load_config(FleetConfig, Path("examples/fleet.toml")).models[0], 1)
    sizes = {name: int(CACHE_SHARE * getattr(original, name)) for name in ("cached_patches", "cached_tokens")}
    replica = replace(original, **sizes)
    asked = asked_of(workload, arrivals)
    arrivals = [Arrival(one.due, one.prompt.request) for one in asked]
    answers = _measure(asked, replica, seed, slowdown)
    record: dict[str, Any] = {"workload": workload, "seed": seed, "slowdown": slowdown}
    record["measured"] = {app: figures(found, slowdown) for app, found in answers.items()}
    replicas = [replace(replica, name=f"replica {number}") for number in range(NUM_REPLICAS)]
    record["simulated"] = {}
    for name, policy in (("oracle", "oracle"), (OURS, OURS), ("power-of-two", "power-of-two")):
        result = simulate(arrivals, replicas, policy, num_fronts=NUM_FRONTS, seed=seed)
        record["simulated"][name] = {
            "hits": result.image_hit_rate, "load": result.max_over_mean_load, "p50_ms": 1e3 * result.ttft_p50_s,
            "p90_ms": 1e3 * result.ttft_p90_s, "tokens_s": result.output_tokens_per_s,
        }  # fmt: skip
    return record


def _measure(asked: Sequence[Asked], replica: Replica, seed: int, slowdown: float) -> dict[str, list[Answer]]:
    """Start all deployments, send the requests from two fronts, and return the answers by router."""
    replica = replace(replica, costs=slower(replica.costs, slowdown))
    policy = RoutingPolicy()
    policy = replace(policy, load_floor_s=slowdown * policy.load_floor_s, tie_s=slowdown * policy.tie_s)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray gives processes of the machine precedence over its own
    folder = tempfile.mkdtemp(prefix="paced-", dir="/tmp")
    ray.init(
        num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level="warning",
        log_to_driver=False, object_store_memory=100_000_000, _temp_dir=folder,
    )  # fmt: skip
    try:
        serve.start(proxy_location="Disabled")
        for app, router in ROUTERS.items():
            _deploy(app, router, replica, slowdown)
        actor: Any = ray.remote(num_cpus=0.01)(Front)
        fronts = [actor.remote(number, tuple(ROUTERS), OURS, VERSION, policy) for number in range(NUM_FRONTS)]
        ray.get([front.prepare.remote(NUM_REPLICAS) for front in fronts])
        draw, shares = random.Random(seed), [[] for _ in fronts]
        for one in asked:
            draw.choice(shares).append(one._replace(due=slowdown * one.due))
        begin = time.monotonic() + 2
        found = ray.get([front.run.remote(share, begin) for front, share in zip(fronts, shares, strict=True)])
        return {app: [answer for one in found for answer in one[app]] for app in ROUTERS}
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _deploy(app: str, router: RequestRouterConfig, replica: Replica, slowdown: float) -> None:
    """Start the replicas of a router."""
    deployment = serve.deployment(
        name=ENGINE if app == OURS else "PacedReplica", num_replicas=NUM_REPLICAS, max_ongoing_requests=10_000,
        request_router_config=router, ray_actor_options={"num_cpus": 0.01}, graceful_shutdown_timeout_s=0.1,
    )  # fmt: skip
    if app == OURS:
        engine = EngineConfig(encoder_cache_tokens=replica.cached_patches // PATCHES_PER_TOKEN)
        version = VersionConfig(
            name=VERSION, checkpoint="paced", traffic=100, gpus_per_replica=0, engine=engine, costs=replica.costs
        )
        bound = deployment(PacedEngineReplica).bind(version, replica, slowdown * REPORT_S)
    else:
        bound = deployment(PacedReplica).bind(replica)
    serve.run(bound, name=app, route_prefix=None)


def figures(answers: Sequence[Answer], slowdown: float) -> dict[str, float]:
    """Hit rate, load and latencies of one router; times are divided by the slowdown."""
    waits = np.array([answer.first_token - answer.due for answer in answers]) / slowdown
    loads: dict[str, float] = {}
    for answer in answers:
        loads[answer.replica] = loads.get(answer.replica, 0.0) + answer.timing.last_token_s
    images = sum(len(answer.request.images) for answer in answers)
    on_the_way = [answer.first_token - answer.due - answer.timing.first_token_s for answer in answers]
    span = (max(answer.ended for answer in answers) - min(answer.due for answer in answers)) / slowdown
    return {
        "hits": sum(answer.timing.resident_images for answer in answers) / images,
        "load": max(loads.values()) / (sum(loads.values()) / NUM_REPLICAS),
        "p50_ms": 1e3 * float(np.percentile(waits, 50)),
        "p90_ms": 1e3 * float(np.percentile(waits, 90)),
        "tokens_s": sum(answer.request.output_tokens for answer in answers) / span,
        "transport_ms": 1e3 * float(np.median(on_the_way)),
    }


def main() -> None:
    """Measure, print a line per router, and the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="image-groups")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slowdown", type=float, default=10.0)
    options = parser.parse_args()
    record = run(options.workload, options.seed, options.slowdown)
    oracle = record["simulated"]["oracle"]["hits"]
    for kind in ("measured", "simulated"):
        for name, one in record[kind].items():
            print(
                f"{kind:<9} {name:<16} hits {one['hits']:6.1%}, {one['hits'] / oracle:6.1%} of the oracle's  "
                f"load {one['load']:.2f}  TTFT p50 {one['p50_ms']:6.1f}  p90 {one['p90_ms']:6.1f} ms  "
                f"{one['tokens_s']:6.0f} tokens/s  {one.get('transport_ms', 0):.1f} ms on the way",
                flush=True,
            )
    print(json.dumps(record))


if __name__ == "__main__":
    main()
