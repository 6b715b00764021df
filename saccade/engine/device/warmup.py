"""Compile kernels while the weights are loaded.

Which kernels are compiled depends on the widths of a model, not on its weights: a randomly initialized model of two layers runs every
declared size of a step with kernels that are compiled in parallel and not launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from saccade.device import resolve_device, resolve_dtype
from saccade.engine.config import EngineConfig
from saccade.engine.device.runner import PixelScale, Runner
from saccade.kernels import launch
from saccade.model.config import ModelConfig
from saccade.model.families import family_named, load_model_config
from saccade.model.merged_projections import merge_storage
from saccade.model.quantization import QuantizationConfig, parse_quantization
from saccade.model.quantized_linear import QuantizedLinear, quantize_storage
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config

logger = logging.getLogger(__name__)

_VOCABULARY = 1024
_MAX_THREADS = 16


@contextlib.contextmanager
def compile_kernels(
    folder: str | Path, config: EngineConfig, *, device: str | torch.device, dtype: str | torch.dtype | None
) -> Iterator[None]:
    """Compile the kernels of the folder's model in a thread while the body runs. No effect on a CPU."""
    device = resolve_device(device)
    if device.type != "cuda":
        yield
        return
    thread = threading.Thread(target=_compile, args=(folder, config, device, dtype), name="saccade-warmup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _compile(folder: str | Path, config: EngineConfig, device: torch.device, dtype: str | torch.dtype | None) -> None:
    """Errors are only logged: nothing depends on this, and real ones are raised again by the engine."""
    try:
        raw = read_config(Path(folder))
        stored = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        runner = small_runner(
            load_model_config(folder),
            config,
            device=device,
            dtype=resolve_dtype(dtype or stored) or torch.bfloat16,
            quantization=parse_quantization(raw),
        )
        with launch.compile_only(min(_MAX_THREADS, len(os.sched_getaffinity(0)))):
            runner.compile_kernels()
        runner.close()
    except Exception as error:
        logger.debug("warm-up failed, kernels are compiled on first use: %r", error)


def small_runner(
    model_config: ModelConfig, config: EngineConfig, *, device: torch.device, dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
) -> Runner:  # fmt: skip
    """A runner of a randomly initialized model of these widths, with few layers."""
    model_config = _with_few_layers(model_config)
    with torch.device(device):
        model = VLM(model_config).to(dtype).eval().requires_grad_(False)
    if quantization is not None:
        quantize_storage(model, quantization, family_named(model_config.family))
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.to_empty(device=device).to(dtype)
                for parameter in module.parameters():
                    parameter.zero_()  # a weight may be random memory, an order of inputs may not
    merge_storage(model)
    max_length = config.max_length or model_config.language.max_positions
    small = dataclasses.replace(config, encoder_cache_tokens=1024)
    grey = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)
    return Runner(model, small, pixels=grey, num_pages=1, max_length=max_length)


def _with_few_layers(config: ModelConfig) -> ModelConfig:
    """The same widths with two decoder layers (the first has no residual to add) and encoder layers of each kind.

    The vocabulary keeps its remainder by 16, which kernels are specialized for.
    """
    vision = config.vision.with_few_layers()
    vocab_size = min(config.language.vocab_size, _VOCABULARY + config.language.vocab_size % 16)
    language = dataclasses.replace(
        config.language, num_layers=min(2, config.language.num_layers), vocab_size=vocab_size
    )
    return dataclasses.replace(config, vision=vision, language=language)
