"""A server at several times its capacity keeps serving at its capacity and refuses the rest at once.

    PYTHONPATH=tests python -m stress.overload [--url URL] [--factor 4] [--seconds 60] [--images none|unique|mixed]
                                               [--layers 4]

Capacity is measured before and after: a closed loop that keeps the server's slots and queue full. In between, requests
arrive at `factor` times that rate (Poisson), without retries. Reported: requests served per second in both, and how
long a refusal (429) takes. Without --url a server is started on random weights, with 4 requests at once and 4 in its
queue.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.serve_cpu import make_checkpoint
from bench.server_process import ServerProcess
from saccade.serve.load.client import find_model, open_session
from saccade.serve.load.loops import closed_loop, open_loop
from saccade.serve.load.workload import Workload

NUM_SLOTS, NUM_QUEUED = 4, 4
OPTIONS = ["--device", "cpu", "--max-model-len", 1024, "--max-requests", NUM_SLOTS, "--max-queued", NUM_QUEUED]


async def measure(url, *, factor, seconds, images, output, num_open):
    """Capacity, then overload."""

    def bodies(count, seed):
        workload = Workload(num_requests=count, images=images, num_output=output, num_words=16, seed=seed)
        return workload.bodies(model)

    async with open_session() as session:
        model = await find_model(session, url)
        few = bodies(8 * num_open, 0)
        await closed_loop(session, url, few[:num_open], num_open)
        before = served_per_s(await closed_loop(session, url, few, num_open))
        rate, started_at = factor * before, time.perf_counter()
        outcomes = await open_loop(session, url, bodies(round(rate * seconds), 1), rate)
        after = served_per_s(await closed_loop(session, url, few, num_open))
    refused_ms = [one.latency_s * 1e3 for one in outcomes if one.status == 429]
    latencies = [one.latency_s for one in outcomes if one.is_success]
    served = served_per_s(outcomes, since=started_at + 5.0)
    return {
        "capacity_per_s": [before, after],
        "offered_per_s": rate,
        "served_per_s": served,
        "served_share": served / statistics.mean([before, after]),
        "num_requests": len(outcomes),
        "num_served": len(latencies),
        "num_refused": len(refused_ms),
        "num_other": len(outcomes) - len(latencies) - len(refused_ms),
        "refusal_ms": dict(zip(("median", "p99", "max"), np.percentile(refused_ms, [50, 99, 100]), strict=True)),
        "served_latency_s": {"median": statistics.median(latencies), "max": max(latencies)},
    }


def served_per_s(outcomes, since=0.0):
    """Rate of successes between the first and the last start of a request."""
    first = max(since, min(one.started_at for one in outcomes))
    last = max(one.started_at for one in outcomes)
    return sum(one.is_success and first <= one.ended_at <= last for one in outcomes) / (last - first)


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; one is started if not given")
    parser.add_argument("--num-open", type=int, default=NUM_SLOTS + NUM_QUEUED, help="slots and queue of the server")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--images", choices=["none", "unique", "mixed", "repeated"], default="none")
    parser.add_argument("--output", type=int, default=32, help="output tokens of a request")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model that is started")
    settings = vars(parser.parse_args())
    url, layers = settings.pop("url"), settings.pop("layers")
    if url:
        found = asyncio.run(measure(url, **settings))
    else:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "model"
            make_checkpoint(checkpoint, layers, 896)
            with ServerProcess(checkpoint, *OPTIONS) as server:
                found = asyncio.run(measure(server.url, **settings))
    print(json.dumps(found, indent=2, default=float))


if __name__ == "__main__":
    main()
