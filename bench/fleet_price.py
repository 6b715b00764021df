"""What a fleet costs: the time to the first token and the throughput of one engine, through a fleet and by itself.

    python -m bench.fleet_price [--rounds 5] [--streams 64] [--size tiny] [--side 336]

`saccade serve` and a fleet with one front and one engine replica serve the same checkpoint, on a GPU if there is one.
Both run all the time and are measured in turn, so that what else the machine does reaches both.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bench.fleet_process import ENGINE, FleetProcess
from bench.server_process import ServerProcess
from saccade.model.initialize import initialize_random, named_size
from saccade.serve.load.loops import run
from saccade.serve.load.summary import Load
from saccade.serve.load.workload import Workload


def main() -> None:
    """Measure, print a line per round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--side", type=int, default=336, help="side of the images in pixels")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    settings = ENGINE | {"num_pages": 4000, "max_requests": arguments.streams}
    settings |= {"num_workers": 6, "max_length": 2000} if has_gpu else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = folder / "model"
        initialize_random(checkpoint, named_size(arguments.size), dtype=torch.bfloat16 if has_gpu else torch.float32)
        options = [
            word for key, value in settings.items() for word in ("--set", f"engine.{key}={json.dumps(value)}")
            if key != "core_process"
        ]  # fmt: skip
        with (
            ServerProcess(checkpoint, *options, log=folder / "log") as server,
            FleetProcess(folder, checkpoint, num_engines=1, engine=settings, gpus=float(has_gpu)) as fleet,
        ):
            rounds = [
                {name: measure(url, arguments, seed) for name, url in pair}
                for seed in range(arguments.rounds)
                for pair in [[("serve", server.url), ("fleet", fleet.url)][:: 1 if seed % 2 else -1]]
            ]
    for one in rounds:
        print(json.dumps(one))
    for name in ("ttft_ms", "tokens_per_s"):
        values = {kind: statistics.median(one[kind][name] for one in rounds) for kind in ("serve", "fleet")}
        ratio = statistics.median(one["fleet"][name] / one["serve"][name] for one in rounds)
        print(f"{name}: serve {values['serve']:.1f}, fleet {values['fleet']:.1f}, ratio {ratio:.3f}")


def measure(url: str, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Time to the first token of one client, and throughput of many."""
    workload = Workload(num_requests=30, seed=100 * seed, num_output=16, side=arguments.side)
    [alone] = run(url, [Load(concurrency=1)], workload)
    many = replace(workload, num_requests=4 * arguments.streams, num_output=64, images="none")
    [busy] = run(url, [Load(concurrency=arguments.streams)], many)
    assert not alone["failed"] + busy["failed"], f"{alone['errors']} {busy['errors']}"
    return {"ttft_ms": alone["median_ttft_ms"], "tokens_per_s": busy["output_throughput"]}


if __name__ == "__main__":
    main()
