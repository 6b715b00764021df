"""All ranks must run the same recipe with the same code: a rank that does not is refused when the run starts.

One machine with an old checkout or another torch would train a slightly different model, or wait in another collective.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import socket
from pathlib import Path
from typing import Any

import torch

import saccade
from saccade.config import encode
from saccade.errors import ConfigError
from saccade.train.config import TrainConfig, changed_values
from saccade.world import World

_NAMES = {"recipe": "recipe", "code": "code of saccade", "torch": "version of torch", "python": "version of Python"}


def check_ranks_agree(config: TrainConfig, world: World) -> None:
    """Refuse a run whose ranks have different recipes, code, or versions of torch or Python. Collective."""
    if world.dims.size == 1:
        return
    found = world.gather(_facts(config) | {"host": socket.gethostname()})
    for rank, facts in enumerate(found):
        if different := [name for name in _NAMES if facts[name] != found[0][name]]:
            settings = world.gather(encode(config)) if different == ["recipe"] else []
            raise ConfigError(_refusal(rank, facts, found[0], different[-1], settings))


def _refusal(rank: int, facts: dict[str, str], first: dict[str, str], name: str, settings: list[dict[str, Any]]) -> str:
    line = (
        f"rank {rank} on host {facts['host']} has another {_NAMES[name]} than rank 0 on host {first['host']}: "
        f"{facts[name]} instead of {first[name]}"
    )
    if settings:
        return f"{line} ({'; '.join(changed_values(settings[0], settings[rank])[:4])}). Start all ranks with one recipe"
    return f"{line}. Install the same on every machine"


def _facts(config: TrainConfig) -> dict[str, str]:
    return {
        "recipe": _digest(json.dumps(encode(config), sort_keys=True).encode()),
        "code": _code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@functools.cache
def _code_digest() -> str:
    """Digest of all modules of this package; 600 files take some 20 ms."""
    folder = Path(saccade.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return _digest(b"".join(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() for file in files))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
