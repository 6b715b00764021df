"""Compile kernels while the weights are loaded.

Which kernels are compiled depends on the widths of a model, not on its weights: a model of two layers serves one request with an
image, in a thread. Both share one interpreter, so the first token comes hardly sooner; but decode steps, which use other kernels,
compile nothing: without this the first one took 3.4 s on an H200 with an empty kernel cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from saccade.device import resolve_device, resolve_dtype
from saccade.engine.config import EngineConfig
from saccade.engine.core import AddRequest, EngineCore
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import ImageSpan, Request, SamplingParams
from saccade.engine.runner import PixelScale, Runner
from saccade.model.config import ModelConfig
from saccade.model.families import load_model_config
from saccade.model.merge import merge_projections
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config
from saccade.processor.positions import TextSpan, VisionSpan, mrope_positions

logger = logging.getLogger(__name__)

_SIDE_TOKENS = 16
_NUM_TEXT = 64
_VOCABULARY = 1024


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
        model_config = load_model_config(folder)
        serve_once(model_config, config, device=device, dtype=resolve_dtype(dtype or stored) or torch.bfloat16)
    except Exception as error:
        logger.debug("warm-up failed, kernels are compiled on first use: %r", error)


def serve_once(model_config: ModelConfig, config: EngineConfig, *, device: torch.device, dtype: torch.dtype) -> None:
    """Serve one request with an image on a randomly initialized model of these widths."""
    model_config = _with_few_layers(model_config)
    with torch.device(device):
        model = VLM(model_config).to(dtype).eval().requires_grad_(False)
    merge_projections(model)
    prompt = _image_prompt(model_config)
    max_length = max(min(config.max_length or 8192, 8192), len(prompt.token_ids) + 2)
    small = dataclasses.replace(
        config,
        max_requests=min(config.max_requests, 16),
        max_step_tokens=max(config.max_step_tokens, len(prompt.token_ids)),
        encoder_cache_tokens=4 * _SIDE_TOKENS**2,
        max_draft_tokens=0,
    )
    grey = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)
    num_pages = -(-max_length // config.page_size)
    runner = Runner(model, small, pixels=grey, num_pages=num_pages, max_length=max_length)
    runner.profile_largest_step()
    core = EngineCore(runner)
    request = Request(
        id="warm-up",
        token_ids=prompt.token_ids,
        images=tuple(image.span for image in prompt.images),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )
    core.handle(AddRequest(request=request, prompt=prompt))
    while core.has_work:
        core.step()


def _with_few_layers(config: ModelConfig) -> ModelConfig:
    """The same widths with two decoder layers (the first has no residual to add) and one encoder layer of each kind.

    The vocabulary keeps its remainder by 16, which kernels are specialized for.
    """
    kinds = [layer in config.vision.full_attention_layers for layer in range(config.vision.num_layers)]
    is_full = sorted(set(kinds))
    vision = dataclasses.replace(
        config.vision,
        num_layers=len(is_full),
        full_attention_layers=tuple(index for index, full in enumerate(is_full) if full),
    )
    vocab_size = min(config.language.vocab_size, _VOCABULARY + config.language.vocab_size % 16)
    language = dataclasses.replace(
        config.language, num_layers=min(2, config.language.num_layers), vocab_size=vocab_size
    )
    return dataclasses.replace(config, vision=vision, language=language)


def _image_prompt(config: ModelConfig) -> TokenPrompt:
    """A prompt with a blank image between text."""
    vision = config.vision
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side, num_tokens = _SIDE_TOKENS * vision.merge_size, _SIDE_TOKENS**2
    span = ImageSpan(key=bytes(32), start=1, num_tokens=num_tokens, num_patches=side * side)
    image = PromptImage(span=span, grid=(1, side, side), patches=np.zeros((side * side, patch_dim), np.uint8))
    spans: list[TextSpan | VisionSpan] = [TextSpan(1), VisionSpan(1, _SIDE_TOKENS, _SIDE_TOKENS), TextSpan(_NUM_TEXT)]
    return TokenPrompt(token_ids=[1] * (1 + num_tokens + _NUM_TEXT), positions=mrope_positions(spans), images=(image,))
