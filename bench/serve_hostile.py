"""Hostile inputs against a server under normal load: every one is answered 4xx within its limit, and the normal load does not notice.

    python -m bench.serve_hostile [--seconds 20] [--clients 4] [--attackers 1] [--idle 2000] [--slow-readers 16] [--out FILE]

Starts `saccade serve` on a tiny random model. First the normal load runs alone: clients that stream answers about images of mixed sizes. Then
it runs beside all cases of `tests/serve/hostile.py`, sent by `attackers` at once, while `idle` connections say nothing and `slow-readers` ask for
long streams that they never read. Exit status 1 if a case is not answered as it should be, a normal request fails, or a p99 of the normal
load (time to the first token, or to the last byte) is more than twice what it was alone.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.server_process import ServerProcess, tiny_checkpoint
from saccade.serve.load.client import Outcome, open_session, stream_chat
from saccade.serve.load.loops import Workload, run_loop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
OPTIONS = (
    "--device", "cpu", "--max-model-len", "800", "--set", "engine.num_workers=1", "--set", "engine.num_pages=800", "--set", "serve.header_timeout_s=3",
    "--set", "serve.body_timeout_s=4", "--set", "serve.keep_alive_s=3", "--set", "serve.write_timeout_s=5",
)  # fmt: skip
_MAX_RATIO = 2.0


class NormalLoad:
    """Clients that ask one question after another until they are stopped."""

    def __init__(self, session: aiohttp.ClientSession, url: str, num_clients: int, seed: int) -> None:
        self._session, self._url = session, url
        self._workload = Workload(images="mixed", side=112, num_words=16, num_output=24, seed=seed)
        self._number = 0
        self.outcomes: list[Outcome] = []
        self._is_over = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(num_clients)]

    async def _client(self) -> None:
        while not self._is_over:
            self._number += 1
            body = self._workload.body(self._number, "tiny")
            self.outcomes.append(await stream_chat(self._session, self._url, body))

    async def stop(self) -> None:
        """Let the last requests finish."""
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def attack(
    host: str, port: int, cases: Sequence[tuple[Any, Sequence[Any]]], num_attackers: int
) -> list[dict[str, Any]]:
    """Send every case; the answers."""
    from serve.hostile_client import send

    waiting = iter(cases)
    rows: list[dict[str, Any]] = []

    async def attacker() -> None:
        for case, pieces in waiting:
            answer = await send(case, host, port, pieces)
            rows.append(
                {
                    "name": case.name,
                    "group": case.group,
                    "status": answer.status,
                    "seconds": answer.seconds,
                    "ended_at": time.perf_counter(),
                    "is_right": answer.fits(case),
                }
            )

    await asyncio.gather(*(attacker() for _ in range(num_attackers)))
    return rows


@contextlib.asynccontextmanager
async def idle_connections(host: str, port: int, count: int) -> Any:
    """Connections that send nothing, opened again some time after the server has closed them."""

    async def idle() -> None:
        while True:
            await asyncio.sleep(random.uniform(0, 10))
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                await reader.read()
                writer.close()

    tasks = [asyncio.create_task(idle()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def slow_readers(host: str, port: int, count: int) -> Any:
    """Streams that are asked for and never read."""
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 700, "ignore_eos": True, "stream": True,
                       "logprobs": True, "top_logprobs": 5}).encode()  # fmt: skip
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )

    async def ask() -> None:
        while True:
            with contextlib.suppress(OSError):
                connection = socket.socket()
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
                await asyncio.get_running_loop().sock_sendall(connection, request)
                await asyncio.sleep(10.0)
                connection.close()

    tasks = [asyncio.create_task(ask()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Attack:
    """The attack from a process of its own, with inputs made before it begins, so that only the server has work with them."""

    def __init__(self, host: str, port: int, options: argparse.Namespace) -> None:
        context = get_context("spawn")
        self._is_prepared, self._begins, self._rows = context.Event(), context.Event(), context.SimpleQueue()
        events = self._is_prepared, self._begins, self._rows
        self._process = context.Process(target=_attack_process, args=(host, port, options, *events))
        self._process.start()
        self._is_prepared.wait()

    def run(self) -> list[dict[str, Any]]:
        """Attack; the answers."""
        self._begins.set()
        rows: list[dict[str, Any]] = self._rows.get()
        self._process.join()
        return rows


def _attack_process(
    host: str, port: int, options: argparse.Namespace, is_prepared: Any, begins: Any, rows: Any
) -> None:
    from serve.hostile import all_cases

    cases = [(case, case.pieces()) for case in all_cases()]
    is_prepared.set()
    begins.wait()

    async def run() -> list[dict[str, Any]]:
        async with idle_connections(host, port, options.idle), slow_readers(host, port, options.slow_readers):
            return await attack(host, port, cases, options.attackers)

    rows.put(asyncio.run(run()))


def p99_ms(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """p99 of the times to the first token and to the last byte."""
    good = [one for one in outcomes if one.is_success]
    return {
        "ttft": float(np.percentile([1e3 * one.ttft_s for one in good], 99)),
        "latency": float(np.percentile([1e3 * one.latency_s for one in good], 99)),
    }


def _delayed(outcomes: Sequence[Outcome], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slowest normal requests, with the cases that were in progress meanwhile."""
    slowest = sorted((one for one in outcomes if one.is_success), key=lambda one: -one.ttft_s)[:10]
    return [
        {
            "ttft_ms": 1e3 * one.ttft_s,
            "beside": [
                row["name"]
                for row in rows
                if row["ended_at"] > one.started_at and row["ended_at"] - row["seconds"] < one.chunk_times[0]
            ],
        }
        for one in slowest
    ]


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both phases."""
    host, port = url.removeprefix("http://").split(":")
    attackers = await asyncio.to_thread(Attack, host, int(port), options)
    async with open_session() as session:
        warm = NormalLoad(session, url, options.clients, seed=0)
        await asyncio.sleep(min(5.0, options.seconds))
        await warm.stop()
        alone = NormalLoad(session, url, options.clients, seed=1)
        await asyncio.sleep(options.seconds)
        await alone.stop()
        beside = NormalLoad(session, url, options.clients, seed=2)
        began = time.perf_counter()
        rows = await asyncio.to_thread(attackers.run)
        attack_s = time.perf_counter() - began
        await asyncio.sleep(max(0.0, options.seconds - attack_s))
        await beside.stop()
    p99 = {"alone": p99_ms(alone.outcomes), "beside": p99_ms(beside.outcomes)}
    return {
        "num_cases": len(rows),
        "delayed": _delayed(beside.outcomes, rows),
        "num_refused_cases": sum(row["group"] != "served" for row in rows),
        "wrong": [row for row in rows if not row["is_right"]],
        "slowest_s": max(row["seconds"] for row in rows),
        "attack_s": attack_s,
        "num_normal": {"alone": len(alone.outcomes), "beside": len(beside.outcomes)},
        "normal_failures": [one.error for one in (*alone.outcomes, *beside.outcomes) if not one.is_success],
        "p99_ms": p99,
        "ratios": {name: p99["beside"][name] / p99["alone"][name] for name in p99["alone"]},
        "by_group": {group: sum(row["group"] == group for row in rows) for group in dict.fromkeys(row["group"] for row in rows)},
    }  # fmt: skip


def main() -> None:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--attackers", type=int, default=1)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--slow-readers", type=int, default=16)
    parser.add_argument("--verbose", action="store_true", help="show what the slowest normal requests ran beside")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ServerProcess(tiny_checkpoint(Path(folder)), *OPTIONS) as server:
        result = run_loop(measure(server.url, options))
        log = server.log_path.read_text(errors="replace")
    print(
        f"{result['num_refused_cases']} hostile inputs and {result['num_cases'] - result['num_refused_cases']} odd ones {result['by_group']}"
    )
    for row in result["wrong"]:
        print(f"  WRONG {row['name']}: status {row['status']} after {row['seconds']:.1f} s")
    print(f"slowest answer {result['slowest_s']:.1f} s; the attack took {result['attack_s']:.0f} s")
    print(
        f"normal requests alone {result['num_normal']['alone']}, beside {result['num_normal']['beside']}; failed {len(result['normal_failures'])}"
    )
    for name, ratio in result["ratios"].items():
        print(
            f"p99 {name}: {result['p99_ms']['alone'][name]:.0f} ms alone, {result['p99_ms']['beside'][name]:.0f} ms beside: {ratio:.2f} times"
        )
    for row in result["delayed"][: 5 if options.verbose else 0]:
        print(f"  TTFT {row['ttft_ms']:.0f} ms beside {row['beside'][:12]}")
    print(f"tracebacks in the log: {log.count('Traceback')}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    is_bad = (
        result["wrong"]
        or result["normal_failures"]
        or max(result["ratios"].values()) > _MAX_RATIO
        or "Traceback" in log
    )
    sys.exit(1 if is_bad else 0)


if __name__ == "__main__":
    main()
