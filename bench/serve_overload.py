"""Overload: a server at several times its capacity keeps serving at its capacity and refuses the rest at once.

    python -m bench.serve_overload [--url URL] [--factor 4] [--seconds 60] [--images none|unique|mixed] [--layers 4]

Capacity is measured before and after: a closed loop that keeps the server's slots and queue full. In between, requests arrive at `factor`
times that rate (Poisson), without retries. Reported: requests served per second in both, and how long a refusal (429) takes. Without --url a server is
started on random weights, with 4 requests at once and 4 in its queue.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.serve_cpu import make_checkpoint
from bench.server_process import running_server
from saccade.serve.load.client import Outcome, find_model, open_session, stream_chat
from saccade.serve.load.loops import Images, Workload, closed_loop

NUM_SLOTS, NUM_QUEUED = 4, 4
OPTIONS = ["--device", "cpu", "--max-model-len", 1024, "--max-requests", NUM_SLOTS, "--max-queued", NUM_QUEUED]


async def measure(
    url: str, *, factor: float, seconds: float, images: Images, num_output: int, num_open: int
) -> dict[str, Any]:
    """Capacity, then overload."""
    async with open_session() as session:
        model = await find_model(session, url)
        few = Workload(num_requests=8 * num_open, images=images, num_output=num_output, num_words=16)
        await closed_loop(session, url, few.bodies(model)[:num_open], num_open)
        capacity = await _capacity(session, url, few.bodies(model), num_open)
        num_requests = round(factor * capacity * seconds)
        many = Workload(num_requests=num_requests, images=images, num_output=num_output, num_words=16, seed=1)
        started_at = time.perf_counter()
        outcomes = await _arrivals(session, url, many.bodies(model), factor * capacity)
        again = await _capacity(session, url, few.bodies(model), num_open)
        return _report((capacity, again), factor, outcomes, started_at)


async def _capacity(session: Any, url: str, bodies: list[bytes], num_open: int) -> float:
    """Requests served per second when every slot and place in the queue is taken."""
    return _served_per_s(await closed_loop(session, url, bodies, num_open), after=0.0)


async def _arrivals(session: Any, url: str, bodies: list[bytes], rate: float) -> list[Outcome]:
    rng, tasks = random.Random(0), []
    at = time.perf_counter()
    for body in bodies:
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(stream_chat(session, url, body)))
    return list(await asyncio.gather(*tasks))


def _served_per_s(outcomes: list[Outcome], after: float) -> float:
    """Rate of successes between the first and the last start of a request, from `after` on."""
    first = max(after, min(one.started_at for one in outcomes))
    last = max(one.started_at for one in outcomes)
    return sum(one.is_success and first <= one.ended_at <= last for one in outcomes) / (last - first)


def _report(
    capacities: tuple[float, float], factor: float, outcomes: list[Outcome], started_at: float
) -> dict[str, Any]:
    refused = sorted(one.latency_s * 1e3 for one in outcomes if one.status == 429)
    latencies = sorted(one.latency_s for one in outcomes if one.is_success)
    goodput = _served_per_s(outcomes, after=started_at + 5.0)
    return {
        "capacity_per_s": [round(one, 3) for one in capacities],
        "offered_per_s": round(capacities[0] * factor, 3),
        "goodput_per_s": round(goodput, 3),
        "goodput_share": round(goodput / statistics.mean(capacities), 3),
        "num_requests": len(outcomes),
        "num_served": len(latencies),
        "num_refused": len(refused),
        "num_other": len(outcomes) - len(latencies) - len(refused),
        "refusal_ms": {
            "median": round(statistics.median(refused), 1),
            "p99": round(refused[int(0.99 * (len(refused) - 1))], 1),
            "max": round(refused[-1], 1),
        },
        "served_latency_s": {"median": round(statistics.median(latencies), 2), "max": round(latencies[-1], 2)},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; one is started if not given")
    parser.add_argument("--open", type=int, default=NUM_SLOTS + NUM_QUEUED, help="slots and queue of the server")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--images", choices=["none", "unique", "mixed", "repeated"], default="none")
    parser.add_argument("--output", type=int, default=32, help="output tokens of a request")
    parser.add_argument("--layers", type=int, default=4, help="of the model that is started")
    options = parser.parse_args()
    settings = {
        "factor": options.factor,
        "seconds": options.seconds,
        "images": options.images,
        "num_output": options.output,
        "num_open": options.open,
    }
    if options.url:
        found = asyncio.run(measure(options.url, **settings))
    else:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "model"
            make_checkpoint(checkpoint, options.layers, 896)
            with running_server(checkpoint, Path(folder), OPTIONS) as (url, _):
                found = asyncio.run(measure(url, **settings))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
