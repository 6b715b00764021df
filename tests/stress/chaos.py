"""Random load on a server, while parts of it are killed: every request ends once, everything comes back, nothing leaks.

    PYTHONPATH=tests python -m stress.chaos [--requests 10000] [--clients 24] [--seed 0] [--device cpu] [--log FILE]
                                            [--out FILE] [--media-kills 60] [--core-kills 10] [--front-kills 4 | --soak]
                                            [--ranks 1]

Starts `saccade serve` on a tiny model. Clients send text and images, broken ones too, with random sampling parameters,
streamed and not, and some leave in the middle. Meanwhile media workers, the engine core and the front are killed with
SIGKILL at random; the front is started again as a service manager would. The last third of the requests has no kill of
the front: there memory is measured. `--soak` kills nothing: memory must stay flat over many requests. With several
ranks (`--ranks`) a kill of the core kills one of them, the leader or a follower.

A request has ended once if its stream has exactly one `[DONE]`, or its answer is whole JSON, or it was refused or
failed with a typed code. A broken connection is an ending only if the front was killed meanwhile. Every request id is
in the log once. At the end no request is open, no KV-cache page is in use, and processes, file descriptors, threads and
shared memory are those of a server that has just started.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from commands import is_alive
from stress.tiny_server import find, holdings, kill, pids_of, tiny_server

from saccade.serve.load.client import Outcome, open_session, read_events
from saccade.serve.load.loops import run_loop
from saccade.serve.load.workload import data_url

OPTIONS = (
    "--max-model-len", "400", "--set", "engine.num_workers=2", "--set", "engine.num_pages=1000",
    "--set", "engine.processed_image_cache_bytes=4000000", "--set", "serve.max_restarts=1000", "--set",
    "serve.restart_backoff_s=0.01",
)  # fmt: skip
ALLOWED_CODES = {"engine_stopped", "engine_restarting", "loading", "cancelled", "overloaded", "invalid_request"}
"""Codes with which a request may fail. `invalid_request`: a broken image, or one on which two workers in a row were
killed."""
RESTART_S = 120.0
"""Time within which killed processes must run again."""
SURPLUS = {"num_processes": 0, "num_fds": 8, "num_threads": 8, "num_memory_files": 256}
"""Allowed growth of what a server holds: the front keeps the shared memory of up to 256 images, and so does
the leader of several ranks."""
ANSWER_S = 180.0
"""Time within which a request must have ended."""
WORKERS = "preprocessing.worker initialize"
"""Text in the command line of media workers and of the process that forks them."""
RANKS = ("saccade.engine.transport.process", "saccade.engine.ranks.follower")
"""Texts in the command lines of the core, which is rank 0, and of the other ranks."""
RETRY_S = 1.0
"""Pause of a client that was refused."""
REFUSALS = ("engine_restarting", "loading", "overloaded")
BROKEN = "data:image/png;base64,bm8gcGljdHVyZQ=="


@dataclass
class Result:
    """Counts and times of one run."""

    endings: Counter = field(default_factory=Counter)
    """Requests by how they ended."""
    violations: list = field(default_factory=list)
    ids: list = field(default_factory=list)
    """Request ids that clients have seen, while the front lived."""
    core_restarts_s: list = field(default_factory=list)
    """Seconds from the kill of the core to ready."""
    front_restarts_s: list = field(default_factory=list)
    """Seconds from the start of the front to ready."""
    num_media_kills: int = 0
    memory_mb: list = field(default_factory=list)
    """Samples of (requests, memory of all processes), about one a second."""

    @property
    def num_ended(self):
        """Requests that have ended, without those that were refused: their number depends on how long a restart
        takes."""
        return self.endings.total() - sum(self.endings[code] for code in REFUSALS)


class Chaos:
    """Runs clients, and kills parts of their server."""

    def __init__(self, server, seed):
        self._server, self._rng, self.result = server, random.Random(seed), Result()
        self._images = [data_url(56, 28 * (2 + number % 3), f"chaos {number}") for number in range(40)]
        self._front_deaths = []
        """Times at which the front was killed and at which it was ready again."""
        self._is_up = asyncio.Event()
        self._is_up.set()

    # -------------------------------------------------------------- clients

    async def run_clients(self, count, num_requests):
        """Send requests until so many have ended."""
        async with open_session(timeout_s=ANSWER_S) as session:
            await asyncio.gather(*(self._client(session, num_requests) for _ in range(count)))

    async def _client(self, session, num_requests):
        while self.result.num_ended < num_requests:
            await self._is_up.wait()
            ending = await self._request(session)
            if ending is not None:
                self.result.endings[ending] += 1
            if ending is None or ending in REFUSALS:
                await asyncio.sleep(RETRY_S)

    def _body(self):
        rng = self._rng
        urls = [rng.choice(self._images) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
        if rng.random() < 0.2:
            urls.append(BROKEN if rng.random() < 0.1 else data_url(56, 56, f"chaos unique {rng.random()}"))
        prefix = rng.choice(["", "", "You are a careful assistant. " * 3])
        content = [{"type": "text", "text": f"{prefix}question {rng.random()}"}]
        content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.randint(1, 16),
            "ignore_eos": rng.random() < 0.5,
            "temperature": rng.choice([0, 0, 0.8]),
            "top_p": rng.choice([1, 0.9]),
            "presence_penalty": rng.choice([0, 0, 0.5]),
            "stop": rng.choice([None, None, ["ab"]]),
            "priority": rng.randint(-1, 1),
        }
        if rng.random() < 0.1:
            body |= {"n": 2, "seed": 1}
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": rng.choice([0, 5])}
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if rng.random() < 0.7 else {})

    async def _request(self, session):
        """How a request ended; None if it could not be sent."""
        body, leaves_after_s = self._body(), self._rng.uniform(0, 0.15) if self._rng.random() < 0.1 else None
        outcome = Outcome(time.perf_counter())
        try:
            async with asyncio.timeout(leaves_after_s):
                ending = await self._ask(session, body, outcome)
        except TimeoutError:
            is_left = leaves_after_s is not None
            return "left" if is_left else self._violation(f"no answer within {ANSWER_S:.0f} s", outcome)
        except aiohttp.ClientConnectorError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            if self._was_front_killed(outcome.started_at, time.perf_counter()):
                return "front killed"
            return self._violation(f"broken connection ({type(error).__name__})", outcome)
        if ending not in ALLOWED_CODES | {"done"}:
            return self._violation(ending, outcome)
        return ending

    async def _ask(self, session, body, outcome):
        async with session.post(f"{self._server.url}/v1/chat/completions", data=json.dumps(body)) as response:
            request_id, num_completions = response.headers["x-request-id"], body.get("n", 1)
            if response.status == 200 and body.get("stream"):
                await read_events(response, outcome)
                ending = _ending_of_stream(outcome, num_completions)
            else:
                answer = json.loads(await response.read())
                ending = _ending_of_answer(answer, response.status, num_completions)
            self.result.ids.append(request_id)
            return ending

    def _violation(self, what, outcome):
        self.result.violations.append(f"{what} after {time.perf_counter() - outcome.started_at:.2f} s")
        return "violation"

    def _was_front_killed(self, start, end):
        return any(killed_at <= end and start <= ready_at for killed_at, ready_at in self._front_deaths)

    # -------------------------------------------------------------- kills

    def kill_media_worker(self):
        """Kill an image or text worker, or now and then the process that forks them."""
        if not (found := find(self._server, WORKERS)):
            return
        fork_server, *workers = found
        kill(self._rng.choice(workers or [fork_server]) if self._rng.random() < 0.9 else fork_server)
        self.result.num_media_kills += 1

    async def kill_core(self):
        """Kill the engine core, or one of its ranks, and wait until the server is ready again."""
        killed_at = time.perf_counter()
        ranks = [pid for marker in RANKS for pid in find(self._server, marker)]
        if ranks:
            kill(self._rng.choice(ranks))
        while await asyncio.to_thread(self._server.is_ready):
            await asyncio.sleep(0.01)
        while not await asyncio.to_thread(self._server.is_ready):
            await asyncio.sleep(0.05)
        self.result.core_restarts_s.append(time.perf_counter() - killed_at)

    async def kill_front(self):
        """Kill the front; all its processes must end; start it again."""
        pids = pids_of(self._server)
        self._front_deaths.append((time.perf_counter(), float("inf")))
        self._is_up.clear()
        self._server.kill()
        deadline = time.perf_counter() + RESTART_S
        while left := [pid for pid in pids if is_alive(pid)]:
            if time.perf_counter() > deadline:
                self.result.violations.append(f"{len(left)} processes outlive the front")
                break
            await asyncio.sleep(0.02)
        self.result.front_restarts_s.append(await asyncio.to_thread(self._server.start))
        self._front_deaths[-1] = (self._front_deaths[-1][0], time.perf_counter())
        self._is_up.set()

    async def run_kills(self, num_requests, kills):
        """Kill at random numbers of ended requests; the front only among the first two thirds."""
        moments = [
            (self._rng.uniform(0.03, 0.62 if name == "front" else 0.95), name)
            for name, count in kills.items()
            for _ in range(count)
        ]
        for share, name in sorted(moments):
            while self.result.num_ended < share * num_requests:
                await asyncio.sleep(0.02)
            if name == "media":
                while not find(self._server, WORKERS) and self.result.num_ended < num_requests:
                    await asyncio.sleep(0.02)  # none runs right now
                self.kill_media_worker()
            else:
                await (self.kill_core() if name == "core" else self.kill_front())

    async def watch_memory(self, num_requests):
        """Sample the memory of all processes."""
        while self.result.num_ended < num_requests:
            if self._is_up.is_set():
                found = await asyncio.to_thread(holdings, self._server)
                self.result.memory_mb.append((self.result.num_ended, found.memory_mb))
            await asyncio.sleep(1.0)


def _ending_of_stream(outcome, num_completions):
    if outcome.num_endings != 1:
        return f"{outcome.num_endings} endings of a stream"
    if outcome.error is not None:
        return outcome.error
    if outcome.num_finished != num_completions:
        return f"{outcome.num_finished} finish reasons of {num_completions} completions"
    return "done"


def _ending_of_answer(answer, status, num_completions):
    if status == 200:
        return "done" if len(answer["choices"]) == num_completions else "an answer without all completions"
    return str(answer["error"]["code"])


# ------------------------------------------------------------------ checks at the end


def gauges(text):
    """Metrics that must be zero on an idle server."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    found = {name: re.search(rf"^{name}{{[^}}]*}} (\S+)", text, re.M) for name in names}
    return {name: float(match[1]) for name, match in found.items() if match is not None}


async def wait_until_idle(url):
    """What is still open some time after the last request."""
    async with open_session() as session:
        for _ in range(600):
            async with session.get(f"{url}/metrics") as response:
                found = gauges(await response.text())
            if not any(found.values()):
                break
            await asyncio.sleep(0.1)
    return found


def check_log(text, ids):
    """Every request is in the log once."""
    logged = Counter(re.findall(r"\bid (req-[0-9a-f]+)", text))
    num_twice, num_missing = sum(count > 1 for count in logged.values()), len(set(ids) - logged.keys())
    problems = [f"{num_twice} requests are in the log twice"] if num_twice else []
    return problems + ([f"{num_missing} requests are not in the log"] if num_missing else [])


async def measure(server, *, requests, clients, kills, seed, ranks=1):
    """Run everything; what was found. `kills`: how many of each part."""
    chaos = Chaos(server, seed)
    await chaos.run_clients(clients, min(100, requests // 4))  # then workers and caches exist
    before, began = await _settled(server), time.perf_counter()
    chaos.result = Result()
    await asyncio.gather(
        chaos.run_clients(clients, requests), chaos.run_kills(requests, kills), chaos.watch_memory(requests)
    )
    seconds = time.perf_counter() - began
    await chaos.run_clients(clients, chaos.result.num_ended + 25)  # processes that start on demand run again
    idle, after, result = await wait_until_idle(server.url), await _settled(server, before.num_processes), chaos.result
    problems = [*result.violations, *check_log(server.log, result.ids)]
    problems += [f"{name} is {value:g} on an idle server" for name, value in idle.items() if value]
    for name, surplus in (SURPLUS | {"num_memory_files": 256 * min(ranks, 2)}).items():
        if getattr(after, name) > getattr(before, name) + surplus:
            problems.append(f"{name} was {getattr(before, name)} and is {getattr(after, name)}")
    if after.num_processes < before.num_processes:
        problems.append(f"{after.num_processes} processes instead of {before.num_processes}")
    if num_tracebacks := server.log.count("Traceback"):
        problems.append(f"{num_tracebacks} tracebacks in the log")
    memory = [sample for sample in result.memory_mb if sample[0] > 0.7 * requests]  # no front is killed in this part
    slope = float(np.polyfit(*zip(*memory, strict=True), 1)[0]) * 1000 if len(memory) > 2 else 0.0
    return {
        "requests": result.num_ended,
        "seconds": seconds,
        "endings": dict(result.endings),
        "problems": problems,
        "media_kills": result.num_media_kills,
        "core_restarts_s": result.core_restarts_s,
        "front_restarts_s": result.front_restarts_s,
        "before": asdict(before),
        "after": asdict(after),
        "memory_mb": result.memory_mb,
        "memory_mb_per_1000_requests": slope,
    }


async def _settled(server, num_processes=0):
    """What the server holds when nothing is going on, and killed processes have been started again."""
    await wait_until_idle(server.url)
    await asyncio.sleep(1.0)
    deadline = time.perf_counter() + RESTART_S
    while (found := holdings(server)).num_processes < num_processes and time.perf_counter() < deadline:
        await asyncio.sleep(0.2)
    return found


def show(found):
    """The result as text."""
    lines = [f"{found['requests']} requests in {found['seconds']:.0f} s: {found['endings']}"]
    lines.append(
        f"killed: {found['media_kills']} media workers, {len(found['core_restarts_s'])} cores, "
        f"{len(found['front_restarts_s'])} fronts"
    )
    for name, title in (("core_restarts_s", "core: kill to ready"), ("front_restarts_s", "front: start to ready")):
        if times := found[name]:
            lines.append(f"{title}: median {float(np.median(times)):.1f} s, longest {max(times):.1f} s")
    lines += [f"{name}: {value:g} before, {found['after'][name]:g} after" for name, value in found["before"].items()]
    lines.append(f"memory: {found['memory_mb_per_1000_requests']:+.2f} MB per 1000 requests in the last third")
    return "\n".join([*lines, *(f"PROBLEM {problem}" for problem in found["problems"][:20])])


def main():
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--media-kills", type=int, default=60)
    parser.add_argument("--core-kills", type=int, default=10)
    parser.add_argument("--front-kills", type=int, default=4)
    parser.add_argument("--soak", action="store_true", help="kill nothing")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the engine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kills = {"media": options.media_kills, "core": options.core_kills, "front": options.front_kills}
    kills = {} if options.soak else kills
    ranks = ("--tensor-parallel-size", str(options.ranks))
    with tiny_server(*OPTIONS, *ranks, "--device", options.device, log=options.log) as server:
        found = run_loop(
            measure(
                server,
                requests=options.requests,
                clients=options.clients,
                kills=kills,
                seed=options.seed,
                ranks=options.ranks,
            )
        )
        pids = pids_of(server)
    time.sleep(1.0)
    if left := [pid for pid in pids if is_alive(pid)]:
        found["problems"].append(f"{len(left)} processes outlive the server")
    if server.process.returncode != 0:
        found["problems"].append(f"the server ended with status {server.process.returncode}")
    print(show(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
