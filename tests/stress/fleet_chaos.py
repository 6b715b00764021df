"""Streams of a fleet while engines, fronts and Ray's controller are killed: each ends once, nearly all are whole.

    PYTHONPATH=tests python -m stress.fleet_chaos [--kills 24] [--clients 48] [--seed 0] [--out FILE]

Starts `saccade fleet up` with one front and three engine replicas of a tiny fp32 model. Each client streams one request
after the other: greedy or sampled text, images, two completions, log-probabilities, JSON schemas. Processes are killed
with SIGKILL in turn: engines, and after three of them the front or Ray's controller. Streams that run continue; new
ones start when the fleet is whole again.

The answer to each request is known from an undisturbed run. A stream has ended once if each choice has one finish
reason and the stream one `[DONE]`, or one typed error. A broken connection is an ending only if the front was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import torch
from PIL import Image

from bench.fleet_process import FleetProcess
from saccade.model.initialize import initialize_random, named_size

SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 40, "maxItems": 60}
ROUND = ("engine", "engine", "engine", "front", "engine", "engine", "engine", "controller")
"""Kinds of processes in the order in which they are killed."""
TITLES = {
    "engine": "ray::ServeReplica:chaos:engine",
    "front": "ray::ServeReplica:chaos:front",
    "controller": "ray::ServeController",
}
RECOVERY_S = 180.0
TYPED = {"engine_stopped", "unavailable", "overloaded", "loading", "invalid_request", "timeout"}


@dataclass
class Answer:
    """What came of one stream."""

    kind: int
    texts: dict[int, str] = field(default_factory=dict)
    endings: list[str] = field(default_factory=list)
    num_done: int = 0
    error: str | None = None
    began: float = 0.0
    ended: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.num_done == 1 and len(self.endings) == len(self.texts) > 0


def requests_of(seed: int, tokens: int) -> list[dict]:
    """Requests of every kind, with different prompts."""
    rng, found = random.Random(seed), []
    for number in range(12):
        text = f"Question {number}: {rng.random()}"
        image = _picture(rng)
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
        base = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        text_only = base | {"messages": [{"role": "user", "content": text}]}
        with_image = base | {"messages": [{"role": "user", "content": parts}]}
        found += [
            text_only, with_image,
            text_only | {"temperature": 0.9, "seed": number, "top_p": 0.95, "repetition_penalty": 1.2},
            with_image | {"temperature": 1.0, "seed": number, "n": 2},
            text_only | {"logprobs": True, "top_logprobs": 1},
            with_image | {
                "ignore_eos": False,
                "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}},
            },
        ]  # fmt: skip
    return found


def _picture(rng):
    file, colour = io.BytesIO(), tuple(rng.randrange(256) for _ in range(3))
    Image.new("RGB", (84, 56), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def ask(session, url, kind, body) -> Answer:
    """Stream one request."""
    answer = Answer(kind, began=time.monotonic())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                answer.error = json.loads(await response.read())["error"]["code"]
                return answer
            async for line in response.content:
                _read(answer, line.decode().strip())
        if answer.num_done == 0 and answer.error is None:
            answer.error = "cut"
    except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
        answer.error = f"connection: {type(error).__name__}"
    finally:
        answer.ended = time.monotonic()
    return answer


def _read(answer, line):
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        answer.num_done += 1
        return
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        assert answer.error is None, "two errors in a stream"
        answer.error = chunk["error"]["code"]
        return
    for choice in chunk["choices"]:
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + (choice["delta"].get("content") or "")
        if choice["finish_reason"] is not None:
            answer.endings.append(choice["finish_reason"])


class Load:
    """Clients that stream one request after the other, and what the front counts."""

    def __init__(self, url, bodies, expected, num_clients):
        self.url, self.bodies, self.expected, self.num_clients = url, bodies, expected, num_clients
        self.answers: list[Answer] = []
        self.must_stop = False
        self.may_start = asyncio.Event()
        """Cleared while the fleet recovers: on two cores new streams would delay the processes that start."""
        self.counts = Counter()
        self._last = {}

    async def run(self, session):
        numbers = iter(range(10**9))
        await asyncio.gather(*[self._client(session, numbers) for _ in range(self.num_clients)])

    async def _client(self, session, numbers):
        while await self.may_start.wait() and not self.must_stop:
            kind = next(numbers) % len(self.bodies)
            answer = await ask(session, self.url, kind, self.bodies[kind])
            self.answers.append(answer)
            if answer.error is not None:
                await asyncio.sleep(0.3)

    async def follow_counters(self, session):
        """Add up the front's counters, which start at zero with each front."""
        while True:
            found = await metrics(session, self.url)
            for name, value in found.items():
                if name.startswith("saccade:fleet_requests_"):
                    before = self._last.get(name, 0.0)
                    self.counts[name] += value - before if value >= before else value
                    self._last[name] = value
            await asyncio.sleep(0.2)


async def metrics(session, url) -> dict[str, float]:
    """Samples of the metrics page, summed over labels. Empty: the front does not answer."""
    try:
        async with session.get(f"{url}/metrics") as response:
            page = (await response.read()).decode()
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        return {}
    found = Counter()
    for name, value in re.findall(r"^(saccade:fleet_\w+)\{.*\} (\S+)$", page, re.M):
        found[name] += float(value)
    return found


def processes(kind):
    """Processes of a kind, by their title: those of this fleet, not of another one on the machine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (line := process.cmdline()) and line[0].startswith(TITLES[kind]):
                found.append(process.pid)
    return found


async def kill_in_turn(session, url, load, num_kills, pause_s, rng):
    """Kill processes in turn; returns when each happened and what it was."""
    kills = []
    for number in range(num_kills):
        load.may_start.set()
        await asyncio.sleep(pause_s)
        kind = ROUND[number % len(ROUND)]
        pid = rng.choice(processes(kind))
        os.kill(pid, signal.SIGKILL)
        kills.append((time.monotonic(), kind))
        load.may_start.clear()
        began = time.monotonic()
        await asyncio.sleep(1.5)
        while (await metrics(session, url)).get("saccade:fleet_replicas_ready", 0) < 3 or not processes("controller"):
            assert time.monotonic() - began < RECOVERY_S, (
                f"the fleet is not whole {RECOVERY_S:.0f} s after a kill of {kind}"
            )
            await asyncio.sleep(0.2)
        print(f"kill {number + 1}: {kind}, whole again after {time.monotonic() - began:.1f} s", flush=True)
    return kills


def judge(load, kills):
    """Counts of endings, and examples of those that should not be."""
    front_kills = [at for at, kind in kills if kind == "front"]
    counts, examples = Counter(), []
    for answer in load.answers:
        if answer.is_whole:
            counts["whole"] += 1
            if answer.texts != load.expected[answer.kind]:
                counts["different"] += 1
                examples.append((answer.kind, answer.texts, load.expected[answer.kind]))
        elif any(answer.began - 5 <= at <= answer.ended + 0.5 for at in front_kills):
            counts["front killed"] += 1
        elif answer.error in TYPED:
            counts[f"typed: {answer.error}"] += 1
        else:
            counts[f"unexplained: {answer.error}"] += 1
            examples.append((answer.kind, answer.error, answer.endings, answer.num_done))
    return counts, examples


def report(load, kills, out):
    """Print what became of the streams, and write it; returns the counts of endings."""
    counts, examples = judge(load, kills)
    continued = load.counts["saccade:fleet_requests_continued_total"]
    lost = load.counts["saccade:fleet_requests_lost_total"]
    result = {
        "kills": Counter(kind for _, kind in kills), "requests": len(load.answers), "endings": counts,
        "continued": continued, "lost": lost, "share continued": continued / max(1, continued + lost),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    for example in examples[:5]:
        print(example)
    if out:
        Path(out).write_text(json.dumps(result))
    return counts


async def main(arguments):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        initialize_random(checkpoint, named_size("tiny"), dtype=torch.float32)
        settings = {"num_engines": 3, "engine": {"num_pages": 2000, "max_requests": 64}}
        keep = Path(arguments.keep) if arguments.keep else Path(folder)
        with FleetProcess(keep, checkpoint, name="chaos", **settings) as fleet:
            bodies = requests_of(arguments.seed, arguments.tokens)
            timeout = aiohttp.ClientTimeout(total=120)
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
                gate = asyncio.Semaphore(8)

                async def undisturbed(kind):
                    async with gate:
                        return await ask(session, fleet.url, kind, bodies[kind])

                first = await asyncio.gather(*[undisturbed(kind) for kind in range(len(bodies))])
                assert all(answer.is_whole for answer in first), [one.error for one in first if not one.is_whole]
                load = Load(fleet.url, bodies, [answer.texts for answer in first], arguments.clients)
                running = asyncio.create_task(load.run(session))
                counting = asyncio.create_task(load.follow_counters(session))
                rng = random.Random(arguments.seed)
                kills = await kill_in_turn(session, fleet.url, load, arguments.kills, arguments.pause, rng)
                await asyncio.sleep(1.0)
                load.must_stop = True
                load.may_start.set()
                await running
                counting.cancel()
            began = time.monotonic()
            status = fleet.stop()
            print(f"ended {time.monotonic() - began:.1f} s after Ctrl-C with status {status}", flush=True)
            counts = report(load, kills, arguments.out)
    assert status == 130, "the fleet did not end by itself after Ctrl-C"
    assert not counts["different"], "a whole answer differs from the undisturbed run"
    assert not [name for name in counts if name.startswith("unexplained")], "a stream ended without a typed error"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--pause", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    parser.add_argument("--keep", help="folder in which the fleet's log and state stay")
    asyncio.run(main(parser.parse_args()))
