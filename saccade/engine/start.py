"""Starts what an engine is made of: media workers, and a core in a thread or a process."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from saccade.device import resolve_device
from saccade.engine.config import EngineConfig
from saccade.engine.frontend.core_client import Connect
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor, default_num_workers
from saccade.engine.load_core import load_core
from saccade.engine.transport.thread import CoreThread
from saccade.processor import Processor
from saccade.processor.image import MediaLimits


class _Closable(Protocol):
    def close(self) -> None: ...


_Engine = TypeVar("_Engine", bound=_Closable)


def start(
    folder: Path,
    config: EngineConfig,
    make: Callable[[Connect, Preprocessor], _Engine],
    load_adapters: Callable[[_Engine], None],
    *,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
    limits: MediaLimits | None,
    processor: Processor | None = None,
) -> _Engine:
    """Start the media workers and the core of a checkpoint folder, and what `make` makes of them.

    `make` starts the core; then `load_adapters` is called. `dtype` auto or None: as stored. `processor`: the folder's,
    if the caller has it.
    """
    with contextlib.ExitStack() as opened:
        preprocessor = opened.enter_context(media_preprocessor(folder, config, limits, device))
        connect = _connect(folder, config, processor, device, None if dtype == "auto" else dtype)
        engine = make(connect, preprocessor)
        opened.pop_all()  # the engine closes it
        opened.callback(engine.close)
        load_adapters(engine)
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
        patchifies_on_device=resolve_device(device).type == "cuda",
    )


def _connect(
    folder: Path,
    config: EngineConfig,
    processor: Processor | None,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
) -> Connect:
    """How to start the core: in a process, or in a thread, for which the model is loaded here."""
    if not config.core_process:
        processor = processor or Processor.load(folder, chat_template=config.chat_template)
        return partial(CoreThread, load_core(folder, config, processor, device=device, dtype=dtype))
    from saccade.engine.transport.process import CoreProcess

    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return partial(CoreProcess, folder, config, str(device), name)
