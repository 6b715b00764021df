"""What one client's requests cost the others: plain requests and /health, alone and during one attack after another.

    PYTHONPATH=tests python -m stress.neighbours [--seconds 10] [--attack NAME ...] [--out FILE]

Starts `saccade serve` on a tiny model for each attack. A quiet phase precedes the attack, both of `--seconds` at least.
Attackers send from a process of their own, from bytes made before. `hostile` sends every case of
`tests/serve/hostile.py`, with 2000 connections that say nothing and 16 readers that never read; the others repeat a few
requests. `schemas` cannot be compiled within the limits. Four rows are controls, clients of ordinary requests that are
all served: `new schemas`, each compiled within milliseconds, `harmless` and `harmless awaited`, without a schema, and
`streams`, the long streams of `hostile` alone, which are read.
Exit status 1 if, during an attack that is no control, a plain request takes more than twice the p99 of the quiet phase
(99 of 100 do not), the p99 of /health is above 100 ms, or a hostile case is answered wrongly.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from serve.hostile import all_cases
from serve.hostile_client import send
from stress.tiny_server import tiny_server

from saccade.serve.load.client import open_session
from saccade.serve.load.loops import run_loop
from saccade.serve.load.workload import Workload

MAX_HEALTH_MS = 100.0
MAX_RATIO = 2.0
CHAT = "/v1/chat/completions"
SLOW_SCHEMA = {"type": "string", "allOf": [{"pattern": f"x{i}"} for i in range(40)]}
QUICK_SCHEMA = {"type": "string", "pattern": "^(([a-z]{1,40}[0-9]{1,40}){1,40}[A-Z]{1,40}){1,40}$"}


def chat(**fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields


def turns():
    return [{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(1001)]


def tool_calls(num_bytes):
    call = {"id": "1", "type": "function", "function": {"name": "n" * num_bytes, "arguments": "{}"}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


def words(num_bytes):
    draw = random.Random(0)
    word = [draw.choice("abcdefghij ") for _ in range(4096)]
    return ("".join(word) * (num_bytes // 4096 + 1))[:num_bytes]


def schemas(schema):
    """Requests with 400 schemas that are not equal, so that each is compiled."""
    for number in range(400):
        schema = {**schema, "title": str(number)}
        yield chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def request(path, body):
    """The bytes of a POST request on a connection of its own."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


# ------------------------------------------------------------------ attacks


@dataclass(frozen=True)
class Repeated:
    """Clients that send the same few requests over and over."""

    path: str
    bodies: Callable[[], list]
    num_clients: int = 5
    pause_s: float = 0.4
    is_abandoned: bool = True
    """The client closes the connection as soon as the request is sent."""
    plain: dict | None = None
    """Further fields of the plain requests."""
    is_control: bool = False
    """All requests are ordinary ones."""
    options = (
        "--device", "cpu", "--max-model-len", 16384, "--set", "engine.num_workers=1", "--set", "engine.num_pages=4000",
    )  # fmt: skip

    def plain_body(self, number):
        return json.dumps(chat(**self.plain or {})).encode()

    def prepare(self):
        return [request(self.path, json.dumps(body).encode()) for body in self.bodies()]

    async def run(self, host, port, requests, is_over):
        """Attack until it is over; returns what was answered wrongly."""

        async def client(number):
            await asyncio.sleep(self.pause_s * number / self.num_clients)  # clients do not send at the same moment
            while not is_over():
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, port)
                    writer.write(requests[number % len(requests)])
                    await writer.drain()
                    if self.is_abandoned:
                        await asyncio.sleep(0.05)
                    else:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(reader.read(), 60.0)
                    writer.close()
                number += self.num_clients
                await asyncio.sleep(self.pause_s)

        async with tasks(*(client(number) for number in range(self.num_clients))):
            while not is_over():
                await asyncio.sleep(0.05)
        return []


@dataclass(frozen=True)
class Hostile:
    """All hostile cases, one after another, with idle connections and clients of long streams, which are not read."""

    num_idle: int = 2000
    num_streams: int = 16
    is_control: bool = False
    """Only the streams, which are read."""
    options = (
        "--device", "cpu", "--max-model-len", 800, "--set", "engine.num_workers=1", "--set", "engine.num_pages=800",
        "--set", "serve.header_timeout_s=3", "--set", "serve.body_timeout_s=4", "--set", "serve.keep_alive_s=3",
        "--set", "serve.write_timeout_s=5",
    )  # fmt: skip
    _workload = Workload(images="mixed", side=112, num_words=16, num_output=24)

    def plain_body(self, number):
        return self._workload.body(number, "tiny")

    def prepare(self):
        return [] if self.is_control else [(case, case.pieces()) for case in all_cases()]

    async def run(self, host, port, cases, is_over):
        """Send every case; returns those that were answered wrongly."""
        endless = chat(max_tokens=700, ignore_eos=True, stream=True, logprobs=True, top_logprobs=5)
        stream = request(CHAT, json.dumps(endless).encode())
        client = _read if self.is_control else _never_read
        idle = [_idle(host, port) for _ in range(self.num_idle)]
        async with tasks(*idle, *(client(host, port, stream) for _ in range(self.num_streams))):
            answers = [(case, await send(case, host, port, pieces)) for case, pieces in cases]
            while self.is_control and not is_over():
                await asyncio.sleep(0.05)
        return [f"{case.name}: {answer}" for case, answer in answers if not answer.fits(case)]


async def _idle(host, port):
    """Connections that send nothing, opened again some time after the server has closed them."""
    while True:
        await asyncio.sleep(random.uniform(0, 10))
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            await reader.read()
            writer.close()


async def _never_read(host, port, stream):
    while True:
        with contextlib.suppress(OSError), socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
            await asyncio.get_running_loop().sock_sendall(connection, stream)
            await asyncio.sleep(10.0)


async def _read(host, port, stream):
    """A client that reads the whole stream, then waits as `_never_read` does."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(stream)
            await asyncio.gather(reader.read(), asyncio.sleep(10.0))
            writer.close()


@contextlib.asynccontextmanager
async def tasks(*coroutines):
    """Tasks that run until the block ends."""
    running = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


JSON = {"response_format": {"type": "json_object"}}
ATTACKS = {
    "turns": Repeated(CHAT, lambda: [chat(messages=turns())]),
    "tokenize messages": Repeated(
        "/tokenize", lambda: [{"model": "tiny", "messages": [{"role": "user", "content": words(20_000_000)}]}],
        num_clients=2, pause_s=0.5, is_abandoned=False,
    ),
    "tool names": Repeated(
        CHAT, lambda: [chat(messages=tool_calls(24_000_000))], num_clients=2, pause_s=0.5, is_abandoned=False
    ),
    "long texts": Repeated(
        "/v1/completions", lambda: [{"model": "tiny", "prompt": words(1_000_000), "max_tokens": 1}],
        num_clients=3, is_abandoned=False,
    ),
    "schemas": Repeated(CHAT, partial(schemas, SLOW_SCHEMA), num_clients=20, pause_s=0.5, plain=JSON),
    "schemas awaited": Repeated(CHAT, partial(schemas, SLOW_SCHEMA), num_clients=20, is_abandoned=False, plain=JSON),
    "new schemas": Repeated(
        CHAT, partial(schemas, QUICK_SCHEMA), num_clients=20, is_abandoned=False, plain=JSON, is_control=True
    ),
    "harmless": Repeated(CHAT, lambda: [chat()], num_clients=20, pause_s=0.5, plain=JSON, is_control=True),
    "harmless awaited": Repeated(
        CHAT, lambda: [chat()], num_clients=20, is_abandoned=False, plain=JSON, is_control=True
    ),
    "hostile": Hostile(),
    "streams": Hostile(num_idle=0, is_control=True),
}  # fmt: skip


def attack_process(name, host, port, is_prepared, begins, ends, wrong):
    """Prepare, wait, attack."""
    prepared = ATTACKS[name].prepare()
    is_prepared.set()
    begins.wait()
    wrong.put(asyncio.run(ATTACKS[name].run(host, port, prepared, ends.is_set)))


# ------------------------------------------------------------------ neighbours


async def phase(session, url, plain_body, is_over):
    """Plain requests and /health, one after another each, until it is over."""

    async def times_ms(post):
        times, number = [], 0
        while not is_over() or not times:
            began = time.perf_counter()
            async with post(number) as response:
                assert response.status == 200, await response.text()
                await response.read()
            times.append(1e3 * (time.perf_counter() - began))
            number += 1
            await asyncio.sleep(0.02)
        return times

    plain_ms, health_ms = await asyncio.gather(
        times_ms(lambda number: session.post(f"{url}{CHAT}", data=plain_body(number))),
        times_ms(lambda number: session.get(f"{url}/health")),
    )
    return {
        "num_plain": len(plain_ms),
        "p50": float(np.percentile(plain_ms, 50)),
        "p99": float(np.percentile(plain_ms, 99)),
        "longest": max(plain_ms),
        "health_p99": float(np.percentile(health_ms, 99)),
        "health_longest": max(health_ms),
    }


async def measure(url, name, seconds):
    """A quiet phase, then one during the attack; with the cases that were answered wrongly."""
    attack, context = ATTACKS[name], get_context("spawn")
    host, port = url.removeprefix("http://").split(":")
    is_prepared, begins, ends = context.Event(), context.Event(), context.Event()
    wrong = context.SimpleQueue()
    process = context.Process(target=attack_process, args=(name, host, int(port), is_prepared, begins, ends, wrong))
    process.start()
    await asyncio.to_thread(is_prepared.wait)

    def for_seconds(length):
        deadline = time.perf_counter() + length
        return lambda: time.perf_counter() > deadline

    try:
        async with open_session() as session:
            run_phase = partial(phase, session, url, attack.plain_body)
            await run_phase(for_seconds(1.0))
            quiet = await run_phase(for_seconds(seconds))
            begins.set()
            is_late = for_seconds(seconds)
            waits = isinstance(attack, Hostile) and not attack.is_control
            attacked = await run_phase(lambda: is_late() and not (waits and wrong.empty()))
    finally:
        begins.set()
        ends.set()
        found = await asyncio.to_thread(wrong.get)
        await asyncio.to_thread(process.join)
    return {"quiet": quiet, "attacked": attacked, "wrong": found}


def is_bad(found):
    """Whether a neighbour was harmed, or a case answered wrongly."""
    quiet, attacked = found["quiet"], found["attacked"]
    is_slow = attacked["p99"] > MAX_RATIO * quiet["p99"] or attacked["health_p99"] > MAX_HEALTH_MS
    return is_slow or bool(found["wrong"])


def main():
    """Run the attacks and judge them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attack", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.attack:
        with tiny_server(*ATTACKS[name].options) as server:
            results[name] = run_loop(measure(server.url, name, options.seconds))
        for which in ("quiet", "attacked"):
            row = results[name][which]
            print(
                f"{name:18} {which:9} {row['num_plain']:4} plain: p50 {row['p50']:6.0f}  p99 {row['p99']:6.0f}  "
                f"longest {row['longest']:6.0f} ms   /health p99 {row['health_p99']:5.0f}  "
                f"longest {row['health_longest']:5.0f} ms",
                flush=True,
            )
        for line in results[name]["wrong"]:
            print(f"  WRONG {line}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    sys.exit(1 if any(is_bad(found) for name, found in results.items() if not ATTACKS[name].is_control) else 0)


if __name__ == "__main__":
    main()
