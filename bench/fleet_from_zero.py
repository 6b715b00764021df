"""How long the first request of an empty pool waits: the time to its first token, next to that of a warm replica.

    python -m bench.fleet_from_zero [--rounds 3]

A fleet on this machine with at most one engine replica of a tiny model, which ends after a few seconds without work. A
request then starts one and waits for it.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

import torch

from bench.fleet_process import FleetProcess
from saccade.model.initialize import initialize_random, named_size

_IDLE_S = 10.0
_TIMEOUT_S = 180.0


def first_token_s(url: str) -> float:
    """Seconds from sending a request until its first token."""
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        for line in answer:
            if b'"content"' in line and b'"content":""' not in line:
                return time.perf_counter() - began
    raise RuntimeError("the answer has no token")


def wait_until_empty(fleet: FleetProcess) -> float:
    """Wait until the pool has no replica; returns the seconds that it took."""
    began = time.perf_counter()
    while fleet.sample("saccade:fleet_replicas_ready"):
        if time.perf_counter() - began > _TIMEOUT_S:
            raise RuntimeError("the pool does not become empty")
        time.sleep(0.2)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print a line per round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        initialize_random(folder / "model", named_size("tiny"), dtype=torch.float32)
        fleet = FleetProcess(folder, folder / "model", num_engines=1, engine={"max_requests": 16})
        scaling = f"scaling = {{ idle_s = {_IDLE_S}, warm_up_s = 60.0 }}"
        fleet.head = fleet.head.replace("engines = { min_replicas = 1,", f"engines = {{ {scaling}, min_replicas = 0,")
        fleet.write(fleet.version("v1", folder / "model"))
        rounds = []
        with fleet:
            for _ in range(arguments.rounds):
                first_token_s(fleet.url)
                warm_s, empty_s = first_token_s(fleet.url), wait_until_empty(fleet)
                rounds.append({"warm_s": warm_s, "empty_after_s": empty_s, "from_zero_s": first_token_s(fleet.url)})
                print(json.dumps(rounds[-1]), flush=True)
    for name in rounds[0]:
        print(f"{name}: {statistics.median(one[name] for one in rounds):.3f}")


if __name__ == "__main__":
    main()
