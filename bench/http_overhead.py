"""What HTTP costs: the same requests to `saccade serve` and to the engine in this process, at once and one by one.

    python -m bench.http_overhead [--checkpoint FOLDER | --size 3b] [--requests 256] [--rounds 3] [--out FILE]

`shared` requests have one image of 672 x 672 and about 62 tokens of text, `text` ones about 290 tokens; all get 128
tokens, greedy, end of turn ignored, prefix cache off. All are sent at once by as many clients, which stream, on the
same machine. TTFT is that of requests with an image of their own, one at a time. Every token id is given a word, so
that every token has text to send.
"""

import argparse
import base64
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serve import make_checkpoint
from bench.server_process import ServerProcess
from saccade.serve.load.loops import run
from saccade.serve.load.summary import Load
from saccade.serve.load.workload import Workload

SIDE, NUM_OUTPUT = 672, 128
NUM_SINGLE = 24
"""Number of requests that are sent one at a time."""


def workloads(num_requests: int) -> dict[str, Workload]:
    """Return the requests that are sent at once."""
    return {
        "shared": Workload(
            num_requests=num_requests, images="repeated", side=SIDE, num_words=14, num_output=NUM_OUTPUT
        ),
        "text": Workload(num_requests=num_requests, images="none", num_words=66, num_output=NUM_OUTPUT),
    }


SINGLE = Workload(num_requests=NUM_SINGLE, images="unique", side=SIDE, num_words=14, num_output=1)


def name_all_tokens(checkpoint: Path) -> None:
    """Give a word to each id between the bytes and the special tokens; no text is encoded to it."""
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab, first_special = tokenizer["model"]["vocab"], min(token["id"] for token in tokenizer["added_tokens"])
    vocab |= {f"Ġword{number}": number for number in range(len(vocab), first_special)}
    path.write_text(json.dumps(tokenizer))


def conversations(workload: Workload) -> list[list[dict[str, Any]]]:
    """Return the conversations of the HTTP requests, with images as bytes, as callers in Python have them."""
    made = [json.loads(body)["messages"] for body in workload.bodies("model")]
    for messages in made:
        for part in messages[0]["content"]:
            if part["type"] == "image_url":
                part["image_url"]["url"] = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return made


def in_process(checkpoint: Path, num_requests: int, rounds: int) -> dict[str, float]:
    """Measure requests per second of each workload, and TTFT in seconds, in this process."""
    from saccade.engine import Engine, EngineConfig, SamplingParams

    def sampling(num_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    def seconds(asked: Sequence[list[dict[str, Any]]], num_tokens: int) -> float:
        start = time.perf_counter()
        done = engine.generate(asked, sampling(num_tokens))
        assert all(one.failure is None for one in done)
        return time.perf_counter() - start

    found = {}
    config = EngineConfig(prefix_cache=False, max_requests=num_requests, max_length=8192, core_process=True)
    with Engine.load(checkpoint, config=config) as engine:
        for name, workload in workloads(num_requests).items():
            times = [seconds(conversations(workload), NUM_OUTPUT) for _ in range(rounds + 1)][1:]
            found[name] = num_requests / statistics.median(times)
        times = [seconds([one], 1) for one in conversations(SINGLE)]
        found["ttft_s"] = statistics.median(times[4:])
    return found


def over_http(checkpoint: Path, num_requests: int, rounds: int) -> dict[str, float]:
    """Measure the same of a server."""
    found = {}
    options = ["--max-requests", num_requests, "--max-queued", num_requests, "--max-model-len", 8192]
    with ServerProcess(checkpoint, *options, "--set", "engine.prefix_cache=false") as server:
        url = server.url
        for name, workload in workloads(num_requests).items():
            loads = [Load(concurrency=num_requests)] * (rounds + 1)
            results = run(url, loads, workload, num_processes=4)[1:]
            assert not any(result["failed"] for result in results), results[0]["errors"]
            found[name] = statistics.median(result["request_throughput"] for result in results)
        [result] = run(url, [Load(concurrency=1)], SINGLE, num_warmup=4)
        found["ttft_s"] = result["median_ttft_ms"] / 1e3
    return found


def main() -> None:
    """Measure both and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or Path(folder) / "checkpoint"
        if options.checkpoint is None:
            make_checkpoint(checkpoint, options.size)
        name_all_tokens(checkpoint)
        engine = in_process(checkpoint, options.requests, options.rounds)
        http = over_http(checkpoint, options.requests, options.rounds)
    for name in workloads(options.requests):
        print(
            f"{name:<8} engine {engine[name]:7.2f} req/s  HTTP {http[name]:7.2f} req/s  "
            f"{http[name] / engine[name]:.3f}x"
        )
    added = http["ttft_s"] - engine["ttft_s"]
    print(
        f"ttft     engine {engine['ttft_s'] * 1e3:7.1f} ms     HTTP {http['ttft_s'] * 1e3:7.1f} ms     "
        f"+{added * 1e3:.1f} ms"
    )
    if options.out:
        options.out.write_text(json.dumps({"engine": engine, "http": http}, indent=1))


if __name__ == "__main__":
    main()
