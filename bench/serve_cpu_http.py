"""Servers on a CPU with clients on the same cores: requests per second, TTFT and TPOT, next to another server's.

    python -m bench.serve_cpu_http [--clients 8 1] [--requests 48] [--rounds 1] [--set max_draft_tokens=0]
                                   [--peer "COMMAND {checkpoint} {port}"]

A Qwen2.5-VL of 174M parameters with random weights in fp32: 12 layers, 896 wide, 14 query and 2 key-value heads, 32,000
tokens; a vision tower of 12 layers, 512 wide. A request has one 336 x 336 image and about 64 tokens of text, gets 64
tokens, and is streamed over HTTP. Images are `unique`, a new one for each request, or `repeated`, one for all. A client
has one request at a time. Drafts are off.

A peer is a server with OpenAI's API that its command starts on a port. Both run one after the other in each round, with
equal requests, and only one runs at a time. For vLLM's CPU build the command is a script that sets
VLLM_CPU_OMP_THREADS_BIND and preloads tcmalloc and iomp.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from bench.server_process import ServerProcess
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.initialize import initialize_random
from saccade.serve.load.loops import run
from saccade.serve.load.summary import Load
from saccade.serve.load.workload import Workload

NUM_WORDS, SIDE, NUM_OUTPUT = 12, 336, 64
READY_S = 600.0
SHOWN = {
    "req/s": "request_throughput",
    "TTFT p50": "median_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "p99": "p99_tpot_ms",
}


def make_checkpoint(folder: Path) -> None:
    """Write random weights of the benchmark's shape."""
    language = LanguageConfig(
        vocab_size=32000, hidden_size=896, num_layers=12, num_heads=14, num_kv_heads=2, intermediate_size=2432,
        rope_theta=1e6, rope_sections=(8, 12, 12), norm_eps=1e-6, max_positions=4096,
    )  # fmt: skip
    vision = VisionConfig(
        num_layers=12, hidden_size=512, num_heads=8, intermediate_size=1368, full_attention_layers=(5, 11)
    )
    config = ModelConfig(vision=vision, language=language, tied_head=True, family="qwen2_5_vl")
    initialize_random(folder, config, dtype=torch.float32)


@contextmanager
def ours(checkpoint: Path, settings: list[str]) -> Iterator[str]:
    """Run our server; yields its URL."""
    options = [word for one in settings for word in ("--set", f"engine.{one}")]
    with ServerProcess(checkpoint, "--device", "cpu", "--no-auth", *options) as server:
        yield server.url


@contextmanager
def peer(command: str, checkpoint: Path) -> Iterator[str]:
    """Run another server; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(checkpoint=checkpoint, port=port) for word in shlex.split(command)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_S
            while not is_up(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"the peer did not start:\n{log.read()[-3000:].decode(errors='replace')}")
                time.sleep(0.5)
            yield url
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)


def is_up(url: str) -> bool:
    """Whether a GET succeeds."""
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def measure(url: str, clients: list[int], num_requests: int, seed: int) -> dict[str, dict[str, Any]]:
    """Run every load; equal seeds give equal requests."""
    found = {}
    for number in clients:
        for images in ("unique", "repeated"):
            workload = Workload(
                num_requests=num_requests if number > 1 else num_requests // 4, images=images, side=SIDE,
                num_words=NUM_WORDS, num_output=NUM_OUTPUT, seed=seed,
            )  # fmt: skip
            [result] = run(url, [Load(concurrency=number)], workload, num_warmup=2 * number)
            assert not result["failed"], result["errors"]
            found[f"{number} clients, {images}"] = result
    return found


def main() -> None:
    """Measure each server in every round, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--requests", type=int, default=48, help="of each load; a quarter for one client")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="a folder to keep the checkpoint in")
    parser.add_argument("--set", nargs="*", default=["max_draft_tokens=0"], metavar="NAME=VALUE")
    parser.add_argument("--peer", help="command of a server, with {checkpoint} and {port}")
    parser.add_argument("--only-peer", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, list[dict[str, dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = options.checkpoint or Path(temporary) / "checkpoint"
        if not checkpoint.exists():
            make_checkpoint(checkpoint)
        servers = {} if options.only_peer else {"saccade": lambda: ours(checkpoint, options.set)}
        if options.peer:
            servers["peer"] = lambda: peer(options.peer, checkpoint)
        for number in range(options.rounds):
            for name, serving in servers.items():
                with serving() as url:
                    found = measure(url, options.clients, options.requests, options.seed + number)
                results.setdefault(name, []).append(found)
                for load, result in found.items():
                    print(f"{load:<22} {name:<8}", *(f"{k} {result[v]:.2f}" for k, v in SHOWN.items()), flush=True)
    for load in results[next(iter(results))][0] if len(results) > 1 else ():
        rates = [statistics.median(found[load]["request_throughput"] for found in one) for one in results.values()]
        print(f"{load:<22} {rates[0] / rates[1]:.2f}x the requests per second of the peer")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
