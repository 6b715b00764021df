"""From a checkpoint folder to a runner with as many pages as the device has room for."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from saccade.device import resolve_device
from saccade.engine.compiling import compiling
from saccade.engine.config import EngineConfig
from saccade.engine.kv_cache import bytes_per_page, pages_for
from saccade.engine.runner import PixelScale, Runner
from saccade.errors import ConfigError
from saccade.fork_server import keep_freed_memory
from saccade.model.merge import merge_projections
from saccade.model.vlm import VLM
from saccade.model.weights import load_model

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 2 << 30
"""What the cache may take of a CPU's memory unless `num_pages` says otherwise."""
_GIB = 2**30


def load_runner(
    folder: str | Path, config: EngineConfig, *, pixels: PixelScale, device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
) -> Runner:  # fmt: skip
    """The model of a folder, ready to run steps."""
    device = resolve_device(device)
    if device.type == "cpu":
        keep_freed_memory()  # what a layer frees the next one takes; fresh memory from the system costs a tenth of a step
    with compiling(folder, config, device=device, dtype=dtype):
        model = load_model(folder, device=device, dtype=dtype)
    return make_runner(model, config, pixels=pixels)


def make_runner(model: VLM, config: EngineConfig, *, pixels: PixelScale) -> Runner:
    """A runner of a loaded model, whose projections are merged by this."""
    merge_projections(model)
    most = model.config.language.max_positions
    if config.max_length is not None and config.max_length > most:
        raise ConfigError(f"max_length is {config.max_length}, but the model was made for {most} tokens. Lower it")
    max_length = config.max_length or most
    num_pages = config.num_pages or _pages_that_fit(model, config, pixels, max_length)
    if num_pages * config.page_size < max_length:
        if config.max_length is not None:
            raise ConfigError(
                f"the cache has {num_pages} pages of {config.page_size} tokens, max_length is {max_length}. Lower max_length, raise "
                "memory_share or num_pages, or use kv_format fp8"
            )
        max_length = num_pages * config.page_size
    return Runner(model, config, pixels=pixels, num_pages=num_pages, max_length=max_length)


def _pages_that_fit(model: VLM, config: EngineConfig, pixels: PixelScale, max_length: int) -> int:
    """Measured, not guessed: the largest step is run once with a cache of one page, and what it left free is for pages."""
    weight, language = model.head.weight, model.config.language
    bytes_each = bytes_per_page(language, config.page_size, config.kv_format, weight.dtype)
    most = config.max_requests * pages_for(max_length, config.page_size)
    if weight.device.type != "cuda":
        return max(1, min(most, _CPU_CACHE_BYTES // bytes_each))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(weight.device)
    small = dataclasses.replace(config, cuda_graphs=False)
    rehearsal = Runner(model, small, pixels=pixels, num_pages=1, max_length=max_length)
    rehearsal.rehearse()
    free, total = torch.cuda.mem_get_info(weight.device)
    outside = total - free - torch.cuda.memory_reserved(weight.device)  # other programs, and CUDA itself
    peak = torch.cuda.max_memory_allocated(weight.device)
    del rehearsal
    torch.cuda.empty_cache()
    room = int(total * config.memory_share) - outside - peak - _spare_bytes(config, language.vocab_size)
    num_pages = min(most, room // bytes_each)
    if num_pages < 1:
        raise ConfigError(
            f"no room for a key/value cache: a step takes {peak / _GIB:.1f} GiB with the weights, other programs {outside / _GIB:.1f}, of "
            f"{total / _GIB:.1f} GiB. Raise memory_share ({config.memory_share}), lower max_step_tokens, or use a compressed checkpoint"
        )
    logger.info(
        "%d pages of %d tokens, %.1f GiB; a step with the weights %.1f GiB",
        num_pages, config.page_size, num_pages * bytes_each / _GIB, peak / _GIB,
    )  # fmt: skip
    return num_pages


def _spare_bytes(config: EngineConfig, vocab_size: int) -> int:
    """For recorded steps, pieces the allocator cannot join, and the sampler's counts (`Sampler.penalty_bytes`)."""
    return _GIB + config.max_requests * vocab_size * 5
