"""Kernels compiled while the weights are being read.

What has to be compiled follows from the widths of a model and not from its weights: a model of two layers answers one request with an
image, in a thread of its own. Both work in one interpreter, so the first token comes hardly sooner; but the tokens behind it, which are
made by other kernels, come at once: without this the first of them took 3.4 s on an H200 with an empty kernel cache.
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
from saccade.engine.core import EngineCore
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import ImageSpan, Request, SamplingParams
from saccade.engine.runner import PixelScale, Runner
from saccade.model.config import ModelConfig
from saccade.model.families import vision_language_family
from saccade.model.merge import merge_projections
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config
from saccade.processor.positions import TextSpan, VisionSpan, mrope_positions

logger = logging.getLogger(__name__)

_SIDE_TOKENS = 16
_NUM_TEXT = 64
_VOCABULARY = 1024


@contextlib.contextmanager
def compiling(
    folder: str | Path, config: EngineConfig, *, device: str | torch.device, dtype: str | torch.dtype | None
) -> Iterator[None]:
    """Compile what the folder's model will need, beside what is done inside. On a GPU; elsewhere there is nothing to compile."""
    device = resolve_device(device)
    if device.type != "cuda":
        yield
        return
    thread = threading.Thread(
        target=_try_all, args=(folder, config, device, dtype), name="saccade-compiling", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _try_all(folder: str | Path, config: EngineConfig, device: torch.device, dtype: str | torch.dtype | None) -> None:
    """Nothing depends on this: what goes wrong here goes wrong again, and is then told."""
    try:
        raw = read_config(Path(folder))
        stored = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        model_config = vision_language_family(raw.get("model_type")).parse_config(raw)
        answer_once(model_config, config, device=device, dtype=resolve_dtype(dtype or stored) or torch.bfloat16)
    except Exception as error:
        logger.debug("kernels are compiled when they are first needed: %r", error)


def answer_once(model_config: ModelConfig, config: EngineConfig, *, device: torch.device, dtype: torch.dtype) -> None:
    """Have a model of these widths answer one request, with an image."""
    model_config = _of_few_layers(model_config)
    with torch.device(device):
        model = VLM(model_config).to(dtype).eval().requires_grad_(False)
    merge_projections(model)
    prompt = _image_prompt(model_config)
    max_length = max(min(config.max_length or 8192, 8192), len(prompt.token_ids) + 2)
    small = dataclasses.replace(
        config,
        max_requests=min(config.max_requests, 16),
        max_step_tokens=max(config.max_step_tokens, len(prompt.token_ids)),
        image_pool_tokens=4 * _SIDE_TOKENS**2,
        max_draft_tokens=0,
    )
    grey = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)
    num_pages = -(-max_length // config.page_size)
    runner = Runner(model, small, pixels=grey, num_pages=num_pages, max_length=max_length)
    runner.rehearse()
    core = EngineCore(runner)
    request = Request(
        id="first",
        token_ids=list(prompt.token_ids),
        num_prompt_tokens=len(prompt.token_ids),
        images=tuple(image.span for image in prompt.images),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )
    core.add(request, prompt, 0, lambda update: None)
    while core.has_work:
        core.step()


def _of_few_layers(config: ModelConfig) -> ModelConfig:
    """As wide, but two layers (the first adds nothing to what it normalises), and one of each kind in the tower. The vocabulary has the
    same rest by 16, which kernels are compiled for."""
    kinds = [layer in config.vision.full_attention_layers for layer in range(config.vision.num_layers)]
    is_full = sorted(set(kinds))
    vision = dataclasses.replace(
        config.vision,
        num_layers=len(is_full),
        full_attention_layers=tuple(place for place, full in enumerate(is_full) if full),
    )
    vocab_size = min(config.language.vocab_size, _VOCABULARY + config.language.vocab_size % 16)
    language = dataclasses.replace(
        config.language, num_layers=min(2, config.language.num_layers), vocab_size=vocab_size
    )
    return dataclasses.replace(config, vision=vision, language=language)


def _image_prompt(config: ModelConfig) -> TokenPrompt:
    """A blank image between text."""
    vision = config.vision
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side, num_tokens = _SIDE_TOKENS * vision.merge_size, _SIDE_TOKENS**2
    span = ImageSpan(key=bytes(32), start=1, num_tokens=num_tokens, num_patches=side * side)
    image = PromptImage(span=span, grid=(1, side, side), patches=np.zeros((side * side, patch_dim), np.uint8))
    spans: list[TextSpan | VisionSpan] = [TextSpan(1), VisionSpan(1, _SIDE_TOKENS, _SIDE_TOKENS), TextSpan(_NUM_TEXT)]
    return TokenPrompt(token_ids=[1] * (1 + num_tokens + _NUM_TEXT), positions=mrope_positions(spans), images=(image,))
