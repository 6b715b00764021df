"""Starts what an engine is made of: media workers, and a core in a thread or a process.

`RunningEngine` is what `Engine`, whose output is text, and `EngineHost`, whose output is tokens, have in common.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from saccade.engine.config import EngineConfig
from saccade.engine.core.messages import CoreInfo
from saccade.engine.core.statistics import Statistics
from saccade.engine.frontend.adapters import Adapters
from saccade.engine.frontend.core_client import Connect
from saccade.engine.frontend.open_requests import OpenRequests
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor, default_num_workers
from saccade.engine.transport.spawn import SpareCore, is_cpu
from saccade.engine.transport.thread import CoreThread
from saccade.processor import Processor
from saccade.processor.image import MediaLimits

if TYPE_CHECKING:  # a front end without a GPU imports no torch
    import torch


class RunningEngine:
    """Media workers, a core with its open requests, and adapters. Close it to end its threads and processes."""

    def __init__(
        self, requests: OpenRequests, preprocessor: Preprocessor, adapters: Mapping[str, str | Path] | None
    ) -> None:
        self._requests, self._preprocessor = requests, preprocessor
        folders = {name: Path(folder).absolute() for name, folder in (adapters or {}).items()}
        self._adapters = Adapters(requests, folders)

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the adapters that requests can name."""
        return self._adapters.loaded

    @property
    def refused_adapters(self) -> dict[str, str]:
        """Adapters that the core refused when it started, and why. The next core tries again."""
        return self._adapters.refused

    def load_adapters(self) -> None:
        """Load the adapters into a core that has just started."""
        self._adapters.load_wanted()

    @property
    def info(self) -> CoreInfo:
        """Limits and sizes of the core."""
        return self._requests.info

    @property
    def statistics(self) -> Statistics:
        """Counters since the start of the core."""
        return self._requests.core.statistics

    @property
    def core_pid(self) -> int | None:
        """Process id of the core; None if it runs in a thread."""
        return getattr(self._requests.core, "pid", None)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; the last that its callback gets has the finish reason `cancelled`.

        No effect on a request that has ended.
        """
        self._requests.cancel(request_id)

    @property
    def has_failed(self) -> bool:
        """Whether the core has died or the engine is closed. True before the first open request is failed for it."""
        return self._requests.has_failed

    def close(self) -> None:
        """Stop the engine and free its memory; open requests fail. No effect in a forked child."""
        if self._requests.close():
            self._preprocessor.close()
            gc.unfreeze()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_Engine = TypeVar("_Engine", bound=RunningEngine)


def start(
    folder: Path,
    config: EngineConfig,
    make: Callable[[Connect, Preprocessor], _Engine],
    *,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
    limits: MediaLimits | None,
    spare: SpareCore,
    processor: Processor | None = None,
) -> _Engine:
    """Start the media workers and the core of a checkpoint folder, and what `make` makes of them.

    `make` starts the core, which then loads the adapters. `dtype` auto or None: as stored. `spare`: the first process
    of a core in a process of its own. `processor`: the folder's, if the caller has it.
    """
    with contextlib.ExitStack() as opened:
        preprocessor = opened.enter_context(media_preprocessor(folder, config, limits, device))
        connect = _connect(folder, config, processor, device, None if dtype == "auto" else dtype, spare)
        engine = make(connect, preprocessor)
        opened.pop_all()  # the engine closes it
        opened.callback(engine.close)
        engine.load_adapters()
        preprocessor.wait_until_ready()  # its workers started while the weights were loaded
        opened.pop_all()
    gc.freeze()  # until the engine is closed: a full collection of all that torch has imported delays outputs by 0.1 s
    atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
    return engine


def media_preprocessor(
    folder: Path, config: EngineConfig, limits: MediaLimits | None, device: str | torch.device
) -> Preprocessor:
    """Start the media workers of an engine or an encoder."""
    return Preprocessor(
        folder,
        num_workers=default_num_workers() if config.num_workers is None else config.num_workers,
        processed_image_cache_bytes=config.processed_image_cache_bytes,
        timeout_s=config.preprocess_timeout_s,
        max_images=config.max_images_per_request,
        limits=limits,
        chat_template=config.chat_template,
        patchifies_on_device=not is_cpu(str(device)),
    )


def _connect(
    folder: Path,
    config: EngineConfig,
    processor: Processor | None,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
    spare: SpareCore,
) -> Connect:
    """How to start the core: in a process, or in a thread, for which the model is loaded here."""
    if not config.has_core_process:
        from saccade.engine.load_core import load_core

        processor = processor or Processor.load(folder, chat_template=config.chat_template)
        return partial(CoreThread, load_core(folder, config, processor, device=device, dtype=dtype))
    from saccade.engine.transport.process import CoreProcess

    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return partial(CoreProcess, folder, config, str(device), name, spare.take)
