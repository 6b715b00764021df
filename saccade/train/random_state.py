"""State of the random generators of Python, numpy and torch: saved with a training state, one per data rank."""

from __future__ import annotations

import json
import random
from typing import Any, cast

import numpy as np
import torch

from saccade.train.saved_state import RANDOM, SavedState
from saccade.world import World


def random_state(device: torch.device) -> dict[str, Any]:
    """State of all random generators of this process, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).tolist()).hex()
    return state


def restore_random_state(state: SavedState, world: World, seed: int) -> None:
    """Restore the random generators of this data rank; one without a saved state is seeded."""
    saved = json.loads((state.path / RANDOM).read_text(encoding="utf-8"))
    if world.data_rank >= len(saved):
        seed_everything(seed + world.data_rank)
        return
    mine = saved[world.data_rank]
    version, numbers, gauss = mine["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = mine["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["torch"]), dtype=torch.uint8))
    if world.device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["cuda"]), dtype=torch.uint8), world.device)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
