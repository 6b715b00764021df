"""What one client's requests cost the others: plain requests and /health, alone and during one attack after another.

    python -m bench.serve_neighbours [--seconds 10] [--attack NAME ...] [--set serve.x=y ...] [--out FILE]

Starts `saccade serve` on a tiny random model. Each attack is preceded by a quiet phase of the same length. Attackers send from a process of
their own, from bytes made before; those that are `abandoned` close the connection at once. Exit status 1 if, during an attack, a plain
request takes more than twice the p99 of the quiet phases (99 of 100 do not), or the p99 of /health is above 100 ms.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.server_process import ServerProcess, tiny_checkpoint
from saccade.serve.load.client import open_session
from saccade.serve.load.loops import run_loop

OPTIONS = (
    "--device",
    "cpu",
    "--max-model-len",
    "16384",
    "--set",
    "engine.num_workers=1",
    "--set",
    "engine.num_pages=4000",
)
_MAX_HEALTH_MS = 100.0
_MAX_RATIO = 2.0
SLOW_SCHEMA = {"type": "string", "pattern": "^(([a-z]{1,40}[0-9]{1,40}){1,40}[A-Z]{1,40}){1,40}$"}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields


def _turns() -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(1001)]


def _tool_calls(num_bytes: int) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "n" * num_bytes, "arguments": "{}"}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


def _words(num_bytes: int) -> str:
    draw = random.Random(0)
    word = [draw.choice("abcdefghij ") for _ in range(4096)]
    return ("".join(word) * (num_bytes // 4096 + 1))[:num_bytes]


def _schema(number: int) -> dict[str, Any]:
    schema = {**SLOW_SCHEMA, "title": str(number)}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


@dataclass(frozen=True)
class Attack:
    """Requests that one client sends over and over."""

    path: str
    bodies: Callable[[], list[dict[str, Any]]]
    num_clients: int = 5
    pause_s: float = 0.4
    is_abandoned: bool = True
    """The client closes the connection as soon as the request is sent."""
    plain: dict[str, Any] = field(default_factory=dict)
    """More fields of the plain requests."""


ATTACKS = {
    "turns": Attack("/v1/chat/completions", lambda: [_chat(messages=_turns())]),
    "tokenize messages": Attack(
        "/tokenize", lambda: [{"model": "tiny", "messages": [{"role": "user", "content": _words(20_000_000)}]}],
        num_clients=2, pause_s=0.5, is_abandoned=False,
    ),
    "tool names": Attack(
        "/v1/chat/completions", lambda: [_chat(messages=_tool_calls(24_000_000))], num_clients=2, pause_s=0.5, is_abandoned=False
    ),
    "long texts": Attack(
        "/v1/completions", lambda: [{"model": "tiny", "prompt": _words(1_000_000), "max_tokens": 1}], num_clients=3, is_abandoned=False
    ),
    "schemas": Attack(
        "/v1/chat/completions", lambda: [_chat(response_format=_schema(i)) for i in range(400)],
        num_clients=20, pause_s=0.5, plain={"response_format": {"type": "json_object"}},
    ),
    "schemas awaited": Attack(
        "/v1/chat/completions", lambda: [_chat(response_format=_schema(i)) for i in range(400)],
        num_clients=20, is_abandoned=False, plain={"response_format": {"type": "json_object"}},
    ),
}  # fmt: skip


def _attack_process(name: str, host: str, port: int, is_prepared: Any, begins: Any, ends: Any) -> None:
    attack = ATTACKS[name]
    bodies = [json.dumps(body).encode() for body in attack.bodies()]
    head = f"POST {attack.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    requests = [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
    is_prepared.set()
    begins.wait()

    async def client(first: int) -> None:
        number = first
        while not ends.is_set():
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(requests[number % len(requests)])
                await writer.drain()
                if attack.is_abandoned:
                    await asyncio.sleep(0.05)
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(), 60.0)
                writer.close()
            number += attack.num_clients
            await asyncio.sleep(attack.pause_s)

    async def run() -> None:
        clients = [asyncio.create_task(client(i)) for i in range(attack.num_clients)]
        while not ends.is_set():
            await asyncio.sleep(0.05)
        for one in clients:
            one.cancel()

    asyncio.run(run())


async def _ask_until(ends_at: float, ask: Callable[[], Any]) -> list[float]:
    """Milliseconds of one request after another."""
    times = []
    while time.perf_counter() < ends_at:
        began = time.perf_counter()
        await ask()
        times.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(0.02)
    return times


async def phase(session: aiohttp.ClientSession, url: str, seconds: float, plain: dict[str, Any]) -> dict[str, float]:
    """Plain requests and /health, one after another each, for this long."""

    async def ask() -> None:
        async with session.post(f"{url}/v1/chat/completions", json=_chat(**plain)) as response:
            assert response.status == 200, await response.text()
            await response.read()

    async def health() -> None:
        async with session.get(f"{url}/health") as response:
            assert response.status == 200

    ends_at = time.perf_counter() + seconds
    plain_ms, health_ms = await asyncio.gather(_ask_until(ends_at, ask), _ask_until(ends_at, health))
    return {
        "num_plain": len(plain_ms),
        "p50": float(np.percentile(plain_ms, 50)),
        "p99": float(np.percentile(plain_ms, 99)),
        "longest": max(plain_ms),
        "health_p99": float(np.percentile(health_ms, 99)),
        "health_longest": max(health_ms),
    }


async def measure(url: str, name: str, seconds: float) -> dict[str, dict[str, float]]:
    """A quiet phase, then one during the attack."""
    attack, context = ATTACKS[name], get_context("spawn")
    host, port = url.removeprefix("http://").split(":")
    is_prepared, begins, ends = context.Event(), context.Event(), context.Event()
    process = context.Process(target=_attack_process, args=(name, host, int(port), is_prepared, begins, ends))
    process.start()
    await asyncio.to_thread(is_prepared.wait)
    try:
        async with open_session() as session:
            await phase(session, url, 1.0, attack.plain)
            quiet = await phase(session, url, seconds, attack.plain)
            begins.set()
            attacked = await phase(session, url, seconds, attack.plain)
    finally:
        begins.set()
        ends.set()
        await asyncio.to_thread(process.join)
    return {"quiet": quiet, "attacked": attacked}


def main() -> None:
    """Run the attacks and judge them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attack", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.attack:
        with tempfile.TemporaryDirectory() as folder, ServerProcess(tiny_checkpoint(Path(folder)), *OPTIONS) as server:
            results[name] = run_loop(measure(server.url, name, options.seconds))
        for which, row in results[name].items():
            print(
                f"{name:18} {which:9} {row['num_plain']:4.0f} plain: p50 {row['p50']:6.0f}  p99 {row['p99']:6.0f}  longest {row['longest']:6.0f} ms"
                f"   /health p99 {row['health_p99']:5.0f}  longest {row['health_longest']:5.0f} ms", flush=True
            )  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    is_bad = any(
        row["attacked"]["p99"] > _MAX_RATIO * row["quiet"]["p99"] or row["attacked"]["health_p99"] > _MAX_HEALTH_MS
        for row in results.values()
    )
    sys.exit(1 if is_bad else 0)


if __name__ == "__main__":
    main()
