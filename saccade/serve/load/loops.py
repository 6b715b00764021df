"""Load on a server that speaks OpenAI's chat API: closed loop (a number of clients) and open loop (Poisson arrivals).

    saccade bench serve http://127.0.0.1:8000 --concurrency 8 --images unique

All bodies are made before the clock starts (`workload.py`). `summary.py` says what was measured.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import aiohttp

from saccade.serve.load.client import Outcome, find_model, open_session, stream_chat
from saccade.serve.load.summary import Load, summarize
from saccade.serve.load.workload import ALL, Share, Workload

_Value = TypeVar("_Value")
Wait = Callable[[], object]


async def closed_loop(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], concurrency: int
) -> list[Outcome]:
    """Send the bodies from `concurrency` clients, each with one request at a time."""
    waiting, outcomes = iter(bodies), []

    async def client() -> None:
        for body in waiting:
            outcomes.append(await stream_chat(session, url, body))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return outcomes


async def open_loop(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], rate: float, seed: int = 0
) -> list[Outcome]:
    """Send the bodies at random times (Poisson), however slow the server is."""
    rng, start, at, tasks = random.Random(seed), time.perf_counter(), 0.0, []  # noqa: S311  arrival times
    for body in bodies:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(stream_chat(session, url, body)))
        at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def run(
    url: str, loads: Sequence[Load], workload: Workload, *, model: str | None = None, api_key: str | None = None,
    num_warmup: int = 2, num_processes: int = 1, on_result: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run one load after the other, each with new images. A process of clients reads about 40,000 chunks per second."""
    model = run_loop(_warm_up(url, model, api_key, replace(workload, num_requests=num_warmup, seed=-1)))
    results = []
    for number, load in enumerate(loads):
        changed = replace(
            workload, seed=workload.seed + 1000 * number, num_requests=load.num_requests(workload.num_requests)
        )
        outcomes, start = _run_load(partial(_clients, url, load, changed, model, api_key), num_processes)
        end = max(outcome.ended_at for outcome in outcomes)
        results.append(summarize(outcomes, end - start, load))
        on_result(results[-1])
    return results


def run_loop(coroutine: Coroutine[Any, Any, _Value]) -> _Value:
    """Run a coroutine in uvloop, if it is installed, which takes two thirds of the time."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


async def _warm_up(url: str, model: str | None, api_key: str | None, workload: Workload) -> str:
    async with open_session(api_key) as session:
        model = model or await find_model(session, url)
        await closed_loop(session, url, workload.bodies(model), 1)
    return model


def _clients(
    url: str, load: Load, workload: Workload, model: str, api_key: str | None, share: Share, wait: Wait
) -> tuple[list[Outcome], float]:
    """Run a share of the clients: make the bodies, `wait` for the others, send.

    Returns outcomes and the time of the start.
    """
    bodies = workload.bodies(model, share)
    wait()
    start = time.perf_counter()

    async def send() -> list[Outcome]:
        async with open_session(api_key) as session:
            if load.rate is None:
                return await closed_loop(session, url, bodies, share.part_of(load.concurrency or 1))
            return await open_loop(session, url, bodies, load.rate / share.count, share.index)

    return run_loop(send()), start


def _run_load(
    clients: Callable[[Share, Wait], tuple[list[Outcome], float]], num_processes: int
) -> tuple[list[Outcome], float]:
    if num_processes == 1:
        return clients(ALL, lambda: None)
    context = get_context("spawn")
    barrier, results = context.Barrier(num_processes), context.SimpleQueue()
    processes = [
        context.Process(target=_client_process, args=(clients, Share(index, num_processes), barrier, results))
        for index in range(num_processes)
    ]
    for process in processes:
        process.start()
    parts = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return [outcome for outcomes, _ in parts for outcome in outcomes], min(start for _, start in parts)


def _client_process(clients: Callable[[Share, Wait], Any], share: Share, barrier: Any, results: Any) -> None:
    results.put(clients(share, barrier.wait))
