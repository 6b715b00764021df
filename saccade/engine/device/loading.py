"""Load a checkpoint folder into a runner whose KV cache fills the available memory."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import torch

from saccade.device import resolve_device
from saccade.engine.config import EngineConfig
from saccade.engine.device.kv_cache import bytes_per_page, kv_shape, pages_for
from saccade.engine.device.peer_memory import open_peers
from saccade.engine.device.rank_exchange import RankExchange
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.device.sampler import penalty_bytes
from saccade.engine.device.startup import ONE_RANK, compile_kernels, profile_largest_step, warm_up
from saccade.errors import ConfigError
from saccade.model.prepacked_linear import prepack_storage
from saccade.model.quantization import kv_cache_form
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import connect
from saccade.model.vlm import VLM
from saccade.model.weights import load_model
from saccade.processor.folder import read_config
from saccade.workers.process import keep_freed_memory

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 2 << 30
_CPU_CACHE_TOKENS = 65536
"""Default limits of the KV cache on a CPU; the second is raised to one request of the maximum length."""
_GIB = 2**30


def load_runner(
    folder: str | Path, config: EngineConfig, *, pixels: PixelScale, device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None, exchange: RankExchange | None = None, kind: type[Runner] = Runner,
) -> Runner:  # fmt: skip
    """Load the model of a checkpoint folder into a runner that is ready to run steps.

    `exchange`: of this rank of a tensor-parallel engine; all ranks load the folder. `kind`: class of the runner.
    """
    device, config = resolve_device(device), _with_stored_kv_format(config, Path(folder))
    if device.type == "cpu":
        keep_freed_memory()  # fresh memory from the system would cost a tenth of a step
    rank = ONE_RANK if exchange is None else TensorRank(exchange.rank, exchange.size)
    with compile_kernels(folder, config, device=device, dtype=dtype, rank=rank):
        model = load_model(folder, device=device, dtype=dtype, tensor_rank=rank)
    runner = make_runner(model, config, pixels=pixels, exchange=exchange, kind=kind)
    warm_up(runner)
    return runner


def _with_stored_kv_format(config: EngineConfig, folder: Path) -> EngineConfig:
    """The config with the KV cache format that the checkpoint names, unless the config sets one."""
    stored = kv_cache_form(read_config(folder)) if config.kv_format == "auto" else None
    if stored is None:
        return config
    logger.info("KV cache in %s, as config.json says", stored)
    return dataclasses.replace(config, kv_format=stored)


def make_runner(
    model: VLM, config: EngineConfig, *, pixels: PixelScale, exchange: RankExchange | None = None,
    kind: type[Runner] = Runner,
) -> Runner:  # fmt: skip
    """A runner of a loaded model. On a CPU the weights are prepacked in place."""
    prepack_storage(model)
    if exchange is not None:
        exchange.peers = open_peers(exchange, model.config.language.hidden_size, model.dtype)
        connect(model, exchange)
    context_length = model.config.language.max_positions
    if config.max_length is not None and config.max_length > context_length:
        raise ConfigError(
            f"max_length is {config.max_length}, but the model's context length is {context_length}. Lower it"
        )
    max_length = config.max_length or context_length
    if config.num_pages is not None:
        _check_num_pages(model, config, config.num_pages)
    num_pages = config.num_pages or _num_pages_that_fit(model, config, pixels, max_length, exchange)
    if exchange is not None:
        num_pages = exchange.least(num_pages, model.device)  # every rank has the keys and values of its heads
    if num_pages * config.page_size < max_length:
        if config.max_length is not None:
            raise ConfigError(
                f"the KV cache has {num_pages} pages of {config.page_size} tokens, max_length is {max_length}. "
                "Lower max_length, raise gpu_memory_utilization or num_pages, or use kv_format fp8"
            )
        max_length = num_pages * config.page_size
    return kind(model, config, pixels=pixels, num_pages=num_pages, max_length=max_length, exchange=exchange)


def _check_num_pages(model: VLM, config: EngineConfig, num_pages: int) -> None:
    """Refuse a KV cache that cannot fit, before an allocator fails."""
    num_bytes = num_pages * bytes_per_page(kv_shape(model), config.page_size, config.cache_format, model.dtype)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        available = free + torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > available:
        raise ConfigError(
            f"num_pages is {num_pages}, a KV cache of {num_bytes / _GIB:.1f} GiB; {available / _GIB:.1f} GiB are "
            "available. Lower it"
        )
    if num_pages * config.page_size >= 2**31:
        raise ConfigError(f"num_pages is {num_pages}; a KV cache may hold up to 2^31 tokens. Lower it")


def _num_pages_that_fit(
    model: VLM, config: EngineConfig, pixels: PixelScale, max_length: int, exchange: RankExchange | None
) -> int:
    """Profile the largest step with a KV cache of one page; the remaining memory is for pages."""
    device, language = model.device, model.config.language
    page_bytes = bytes_per_page(kv_shape(model), config.page_size, config.cache_format, model.dtype)
    if device.type != "cuda":
        return cpu_pages(config, page_bytes, max_length)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    eager = dataclasses.replace(config, cuda_graphs=False)
    runner = Runner(model, eager, pixels=pixels, num_pages=1, max_length=max_length, exchange=exchange)
    profile_largest_step(runner)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)  # other processes, and CUDA itself
    peak = torch.cuda.max_memory_allocated(device)
    del runner
    torch.cuda.empty_cache()
    num_pages = gpu_pages(config, page_bytes, max_length, language.vocab_size, total=total, outside=outside, peak=peak)
    if num_pages < 1:
        raise ConfigError(
            f"no memory for a KV cache: a step takes {peak / _GIB:.1f} GiB with the weights, other processes "
            f"{outside / _GIB:.1f}, of {total / _GIB:.1f} GiB. Raise gpu_memory_utilization "
            f"({config.gpu_memory_utilization}), lower max_step_tokens, or use a compressed checkpoint"
        )
    logger.info(
        "KV cache: %d pages of %d tokens, %.1f GiB; weights and largest step: %.1f GiB",
        num_pages, config.page_size, num_pages * page_bytes / _GIB, peak / _GIB,
    )  # fmt: skip
    return num_pages


def most_pages(config: EngineConfig, max_length: int) -> int:
    """Pages that the maximum number of requests of maximum length use."""
    return config.max_requests * pages_for(max_length, config.page_size)


def gpu_pages(
    config: EngineConfig, page_bytes: int, max_length: int, vocab_size: int, *, total: int, outside: int, peak: int
) -> int:
    """Pages that fit on a GPU of `total` bytes. May be negative.

    `outside`: bytes used by other processes and CUDA itself; `peak`: bytes of the weights and the largest step.
    """
    spare = 2 * _GIB + penalty_bytes(config.max_requests, vocab_size)  # CUDA graphs, fragmentation, penalty counts
    available = int(total * config.gpu_memory_utilization) - outside - peak - spare
    return min(most_pages(config, max_length), available // page_bytes)


def cpu_pages(config: EngineConfig, page_bytes: int, max_length: int) -> int:
    """Default number of pages on a CPU."""
    most = min(most_pages(config, max_length), pages_for(max(max_length, _CPU_CACHE_TOKENS), config.page_size))
    return max(1, min(most, _CPU_CACHE_BYTES // page_bytes))
