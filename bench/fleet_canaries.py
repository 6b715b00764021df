"""Broken versions of a model on a running fleet, and how soon each is rolled back; then a good one, which stays.

    python -m bench.fleet_canaries [--clients 60] [--hold 60] [--only slow errors]

A fleet with one front runs a tiny model on this machine. Clients send short questions of 2000 users all the time, one
after the other, every fiftieth about an image. The versions: `good` has the weights of the running one; `slow` has
more layers, which add nothing to the result, so many that its tokens take half as long again; `errors` overflows on
images, so that 2 % of its requests fail; `wrong` has other weights, so that it answers the probe otherwise. A version
that is not rolled back as it should be, or an answer 5xx of a good version, ends the benchmark with an error.
"""

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from bench.fleet_process import FleetProcess
from saccade.engine import Engine, SamplingParams
from saccade.engine.config import EngineConfig
from saccade.engine.structured import StructuredOutput
from saccade.model.initialize import initialize_random, named_size

_QUESTION = "Throw six dice."
_SCHEMA = json.dumps({"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "minItems": 6, "maxItems": 6})
_EVERY_IMAGE = 50
"""Requests of a client of which one is about an image."""
_VERSIONS = ("wrong", "slow", "errors", "good")


def checkpoints(folder: Path, slow_layers: int) -> dict[str, Path]:
    """Folders of the running version and of those that follow."""
    size = named_size("tiny")
    deep = replace(size, language=replace(size.language, num_layers=slow_layers))
    made = {name: folder / name for name in ("running", *_VERSIONS)}
    for name, path in made.items():
        initialize_random(path, deep if name == "slow" else size, dtype=torch.float32, seed=int(name != "wrong"))
    _change(made["slow"], lambda name: _is_added(name, size.language.num_layers), 0.0)
    _change(made["errors"], lambda name: "merger.mlp.2.weight" in name, 3e38)
    return made


def _is_added(name: str, first: int) -> bool:
    """Whether a tensor is the last one of a branch in an added layer."""
    parts = name.split(".")
    is_last = name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))
    return is_last and "layers" in parts and int(parts[parts.index("layers") + 1]) >= first


def _change(folder: Path, is_chosen: Any, value: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    chosen = [name for name in tensors if is_chosen(name)]
    assert chosen, f"{path} has no such tensor"
    save_file(tensors | {name: torch.full_like(tensors[name], value) for name in chosen}, path, {"format": "pt"})


def model_toml(checkpoint: Path, hold_s: float) -> str:
    """Probes, objectives and rollout of the fleet's model. The probe's answer is that of the running version."""
    with Engine.load(checkpoint, device="cpu", config=EngineConfig(num_workers=0, num_pages=100)) as engine:
        asked = [{"role": "user", "content": _QUESTION}]
        dice = StructuredOutput(json_schema=_SCHEMA)
        [answer] = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=32, structured=dice))
    return f"""
objectives = [
    {{ metric = "errors", max_share = 0.005, max_ratio = 2.0 }},
    {{ metric = "tpot", quantile = 0.9, max_ratio = 1.2 }},
]
rollout = {{ ramp = [20, 50, 100], hold_s = {hold_s}, min_requests = 60, settle_s = 3, holdout = 10 }}

[[models.probes]]
name = "dice"
question = {json.dumps(_QUESTION)}
schema = {json.dumps(_SCHEMA)}
answers = [{json.dumps(answer.text)}]
max_tokens = 32
"""


class Users:
    """Clients who send one request after the other, each of another user, and what they got."""

    def __init__(self, url: str, count: int) -> None:
        self._url, self._count = url, count
        self.endings: dict[str, Counter[str]] = defaultdict(Counter)
        self.tpot_s: dict[str, list[float]] = defaultdict(list)

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*[self._user(session, number) for number in range(self._count)])

    async def _user(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(number)
        for index in itertools.count(number):
            await asyncio.sleep(rng.expovariate(1.0))
            began = time.perf_counter()
            body = _body(rng, has_image=index % _EVERY_IMAGE == 0)
            async with session.post(f"{self._url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
                version = response.headers.get("saccade-version", "none")
                self.endings[version][str(response.status)] += 1
                if response.status == 200:
                    self.tpot_s[version].append(
                        (time.perf_counter() - began) / max(1, answer["usage"]["completion_tokens"])
                    )


def _body(rng: random.Random, *, has_image: bool) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": f"Question {rng.random()}"}]
    if has_image:
        file = io.BytesIO()
        Image.new("RGB", (56, 56), tuple(rng.randrange(256) for _ in range(3))).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {
        "model": "tiny", "user": f"user-{rng.randrange(2000)}", "messages": [{"role": "user", "content": content}],
        "max_tokens": 24, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


async def update(fleet: FleetProcess, name: str, folders: dict[str, Path], users: Users) -> None:
    """Update the fleet to a version, wait until it has all users or none, and print what happened."""
    fleet.write(fleet.version("running", folders["running"], 0), fleet.version(name, folders[name]))
    command = [sys.executable, "-m", "saccade", "fleet", "update", str(fleet.file)]
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    last = output.decode().strip().splitlines()[-1]
    tpot = {version: sorted(times)[len(times) * 9 // 10] * 1e3 for version, times in users.tpot_s.items() if times}
    result = {
        "version": name, "exit": process.returncode, "seconds": round(time.monotonic() - began, 1), "last": last,
        "requests": dict(users.endings[name]), "tpot_p90_ms": {key: round(value, 2) for key, value in tpot.items()},
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    assert (process.returncode == 0) == (name == "good"), f"version {name} ended otherwise"
    refused = [status for status in users.endings["good"] if status >= "500"]
    assert not refused, f"a good version answered {refused}"
    fleet.write(fleet.version("running", folders["running"]))
    if name != "good":
        subprocess.run([sys.executable, "-m", "saccade", "fleet", "update", str(fleet.file)], check=True)


async def main(arguments: argparse.Namespace) -> None:
    """Update to each version in turn, under load."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folders = checkpoints(folder, arguments.slow_layers)
        model = model_toml(folders["running"], arguments.hold)
        fleet = FleetProcess(folder, folders["running"], num_engines=2, engine={"max_requests": 64}, model=model)
        fleet.write(fleet.version("running", folders["running"]))
        with fleet:
            users = Users(fleet.url, arguments.clients)
            load = asyncio.create_task(users.run())
            await asyncio.sleep(10)
            for name in arguments.only or _VERSIONS:
                await update(fleet, name, folders, users)
            load.cancel()
            print(json.dumps({version: dict(endings) for version, endings in users.endings.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--hold", type=float, default=60, help="seconds of a step of the ramp")
    parser.add_argument("--only", nargs="*", choices=_VERSIONS)
    parser.add_argument("--slow-layers", type=int, default=14, help="layers of `slow`; the running version has 2")
    asyncio.run(main(parser.parse_args()))
