"""Requests to simulate: made from a seed, or read from a file of JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from saccade.errors import ConfigError, DataError
from saccade.fleet.config import ModelConfig
from saccade.fleet.costs import H200_8B
from saccade.fleet.replicas import PREFIX_BLOCK, Image, Replica, RoutedRequest

PATCHES_PER_TOKEN = 4
"""Patches that become one image token."""
VERSION = "simulated"
"""Version of all simulated requests and replicas."""


_CACHED_TOKENS = 700_000
"""Tokens in the KV cache of an 8B model in bf16 on an H200: 144 KiB each, in 0.9 of 139.8 GiB less the weights."""


def simulated_replicas(model: ModelConfig, count: int) -> list[Replica]:
    """Replicas with the cache sizes and times of the first version of a model that has traffic."""
    version = model.live_versions[0]
    engine = version.engine
    return [
        Replica(
            name=f"{model.name}-{number}", version=VERSION, costs=version.costs or H200_8B,
            cached_patches=engine.encoder_cache_tokens * PATCHES_PER_TOKEN if engine.encoder_cache else 0,
            cached_tokens=(engine.num_pages or _CACHED_TOKENS // engine.page_size) * engine.page_size
            if engine.prefix_cache else 0,
        )
        for number in range(count)
    ]  # fmt: skip


class Arrival(NamedTuple):
    """A request and when it arrives."""

    time: float
    request: RoutedRequest


def image_groups(rate: float, count: int, seed: int) -> Iterator[Arrival]:
    """Groups of 5 requests in random order: 3 images of 1280 x 720 and 1,000 tokens are shared, 300 tokens are not."""
    rng = random.Random(seed)  # noqa: S311
    groups = [number // 5 for number in range(count)]
    rng.shuffle(groups)
    for number, time in enumerate(_poisson(rng, rate, count)):
        images = [(f"{groups[number]} {place}", 3680) for place in range(3)]
        shared = [*(f"group {groups[number]} {block}" for block in range((3 * 920 + 1000) // PREFIX_BLOCK))]
        yield Arrival(time, _request(number, text=1300, output=256, images=images, prefix=shared))


def own_images(rate: float, count: int, seed: int) -> Iterator[Arrival]:
    """Requests with 3 images of 1280 x 720 that no other request has, 100 tokens of text, 32 out."""
    rng = random.Random(seed)  # noqa: S311
    for number, time in enumerate(_poisson(rng, rate, count)):
        images = [(f"{number} {place}", 3680) for place in range(3)]
        yield Arrival(time, _request(number, text=100, output=32, images=images))


def chat(rate: float, count: int, seed: int, pause_s: float = 18.0) -> Iterator[Arrival]:
    """Conversations about one image of 672 x 672, of 1 to 8 turns, 2 s and a pause apart; all share 512 tokens."""
    rng = random.Random(seed)  # noqa: S311
    turns: list[tuple[float, int, int]] = []
    for conversation, start in enumerate(_poisson(rng, rate / 4.5, count)):
        time = start
        for turn in range(rng.randint(1, 8)):
            turns.append((time, conversation, turn))
            time += 2 + rng.expovariate(1 / pause_s)
    for number, (time, conversation, turn) in enumerate(sorted(turns)[:count]):
        text = 512 + 350 * (turn + 1)  # 150 tokens of a question and 200 of an answer
        num_blocks = (441 + text) // PREFIX_BLOCK
        prefix = [f"system {block}" if block < 2 else f"chat {conversation} {block}" for block in range(num_blocks)]
        request = _request(number, text=text, output=200, images=[(str(conversation), 1764)], prefix=prefix, before=512)
        yield Arrival(time, request)


def poisson(rate: float, count: int, seed: int) -> Iterator[Arrival]:
    """Requests that share nothing: 0 to 2 images of 196 to 4,692 patches, 16 to 2,048 tokens of text, 16 to 256 out."""
    rng = random.Random(seed)  # noqa: S311
    for number, time in enumerate(_poisson(rng, rate, count)):
        images = [(f"{number} {place}", rng.choice((196, 1764, 2352, 4692))) for place in range(rng.randrange(3))]
        yield Arrival(time, _request(number, text=rng.randint(16, 2048), output=rng.randint(16, 256), images=images))


WORKLOADS: dict[str, Callable[[float, int, int], Iterator[Arrival]]] = {
    "image-groups": image_groups,
    "own-images": own_images,
    "chat": chat,
    "poisson": poisson,
}
"""Workloads by name: functions of requests per second, number of requests and seed."""


def read_trace(path: Path) -> list[Arrival]:
    """Requests of a file: one JSON object per line, with `time`, `text`, `output`, `images` and `prefix`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Give a file of JSON lines") from error
    arrivals = [_arrival(path, number, line) for number, line in enumerate(lines) if line.strip()]
    if not arrivals:
        raise DataError(f"{path}: no requests. Write one JSON object per line")
    return sorted(arrivals, key=lambda arrival: arrival.time)


def _arrival(path: Path, number: int, line: str) -> Arrival:
    try:
        fields: dict[str, Any] = json.loads(line)
        images = [(str(key), int(patches)) for key, patches in fields.get("images", [])]
        prefix = [str(key) for key in fields.get("prefix", [])]
        request = _request(number, text=int(fields["text"]), output=int(fields["output"]), images=images, prefix=prefix)
        arrival = Arrival(float(fields["time"]), request)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}, line {number + 1}: {error!r}. A line is like "
            '{"time": 0.5, "text": 300, "output": 64, "images": [["KEY", 1764]], "prefix": ["KEY"]}'
        ) from error
    if len(prefix) * PREFIX_BLOCK > request.prompt_tokens:
        raise DataError(f"{path}, line {number + 1}: {len(prefix)} prefix blocks exceed the prompt. Remove some")
    return arrival


def _request(
    number: int, *, text: int, output: int, images: list[tuple[str, int]], prefix: Sequence[str] = (), before: int = 0
) -> RoutedRequest:  # fmt: skip
    """A request whose images follow `before` tokens of text."""
    end, placed = before, []
    for key, patches in images:
        end += patches // PATCHES_PER_TOKEN
        placed.append(Image(key.encode(), patches, end))
    return RoutedRequest(
        id=str(number), version=VERSION, prompt_tokens=text + end - before, output_tokens=max(1, output),
        images=tuple(placed), prefix=tuple(key.encode() for key in prefix),
    )  # fmt: skip


def _poisson(rng: random.Random, rate: float, count: int) -> Iterator[float]:
    """Times of a Poisson process."""
    time = 0.0
    for _ in range(count):
        time += rng.expovariate(rate)
        yield time
