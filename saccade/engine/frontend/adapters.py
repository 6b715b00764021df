"""LoRA adapters of an engine. They outlive the core: a new one loads them again."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from saccade.engine.config import EngineConfig
from saccade.engine.core.messages import AddAdapter, RemoveAdapter
from saccade.engine.frontend.open_requests import OpenRequests
from saccade.errors import RequestError, UserError

logger = logging.getLogger(__name__)


def with_slots(config: EngineConfig, adapters: Mapping[str, str | Path]) -> EngineConfig:
    """The configuration with a slot for each of these adapters, so that the core can load them."""
    if not adapters:
        return config
    from saccade.model.adapters import adapter_rank  # imports torch

    ranks = [config.max_adapter_rank]
    for folder in adapters.values():
        with contextlib.suppress(UserError):  # a broken one is refused later, alone
            ranks.append(adapter_rank(folder))
    return replace(config, max_adapters=max(config.max_adapters, len(adapters)), max_adapter_rank=max(ranks))


class Adapters:
    """Adapters by name: wanted, and loaded or refused by the core. Thread-safe."""

    def __init__(self, requests: OpenRequests, wanted: Mapping[str, Path]) -> None:
        """`wanted` adapters are loaded by `load_wanted`."""
        self._requests = requests
        self._lock = threading.Lock()
        self._wanted, self._loaded = dict(wanted), dict[str, Path]()
        self.refused: dict[str, str] = {}
        """Adapters that the core refused when it started, and why. The next core tries again."""

    @property
    def loaded(self) -> dict[str, Path]:
        """Folders of the adapters that requests can name."""
        with self._lock:
            return dict(self._loaded)

    def add(self, name: str, folder: Path, timeout_s: float | None = None) -> None:
        """Load an adapter. RequestError: it is refused, and says why."""
        reply = self._requests.ask(lambda reply_id: AddAdapter(name=name, folder=str(folder), reply_id=reply_id))
        reply.result(timeout_s)
        with self._lock:
            self._loaded[name] = self._wanted[name] = folder
            self.refused.pop(name, None)

    def remove(self, name: str, timeout_s: float | None = None) -> None:
        """Remove an adapter. Requests that run with it continue."""
        if name not in self.refused:
            reply = self._requests.ask(lambda reply_id: RemoveAdapter(name=name, reply_id=reply_id))
            reply.result(timeout_s)
        with self._lock:
            for adapters in (self._loaded, self._wanted, self.refused):
                adapters.pop(name, None)

    def load_wanted(self) -> None:
        """Load the wanted adapters into a new core. The log names those that are broken; the others are served."""
        with self._lock:
            self._loaded.clear()
            wanted = dict(self._wanted)
        for name, folder in wanted.items():
            try:
                self.add(name, folder)
            except RequestError as error:
                if self._requests.has_failed:  # the next core loads them
                    return
                self.refused[name] = str(error)
                logger.error("adapter %s is refused: %s", name, error)
