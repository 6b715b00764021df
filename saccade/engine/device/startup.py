"""Prepare an engine before it is ready: compile kernels, capture CUDA graphs, run a first request.

The kernels that a model needs depend on its widths, not on its weights. So while the weights are loaded, a randomly
initialized model with few layers runs every declared step size, with kernels that are compiled in parallel and not
launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from saccade.device import resolve_device, resolve_dtype
from saccade.engine.config import EngineConfig
from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS
from saccade.engine.core.step import ENCODER_PARTS, Chunk, ImageFeatures, ImageToEncode, SlotStart, StepPlan
from saccade.engine.device.rank_exchange import LoneRank
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import Failure, ImageSpan, Request
from saccade.kernels import launch
from saccade.model.config import ModelConfig
from saccade.model.families import family_named, load_model_config
from saccade.model.merged_projections import merge_storage
from saccade.model.quantization import QuantizationConfig, parse_quantization
from saccade.model.quantized_linear import QuantizedLinear, quantize_storage
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import connect, shard_model
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config

logger = logging.getLogger(__name__)

ONE_RANK = TensorRank()
_VOCABULARY = 1024
"""Vocabulary size of the small model."""
_MAX_THREADS = 16
"""Maximum number of compiling threads."""


@contextlib.contextmanager
def compile_kernels(
    folder: str | Path, config: EngineConfig, *, device: str | torch.device, dtype: str | torch.dtype | None,
    rank: TensorRank = ONE_RANK,
) -> Iterator[None]:  # fmt: skip
    """Compile the kernels of a checkpoint's model in a thread while the body runs. No effect on a CPU.

    `rank`: the part of the model that this process runs.
    """
    device = resolve_device(device)
    if device.type != "cuda":
        yield
        return
    arguments = (folder, config, device, dtype, rank)
    thread = threading.Thread(target=_compile, args=arguments, name="saccade-warmup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _compile(
    folder: str | Path, config: EngineConfig, device: torch.device, dtype: str | torch.dtype | None, rank: TensorRank
) -> None:
    """Compile kernels. Errors are only logged: a real one is raised again when the engine starts."""
    try:
        raw = read_config(Path(folder))
        stored = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        runner = small_runner(
            load_model_config(folder),
            config,
            device=device,
            dtype=resolve_dtype(dtype or stored) or torch.bfloat16,
            quantization=parse_quantization(raw),
            rank=rank,
        )
        with launch.compile_only(max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // rank.size))):
            compile_all_sizes(runner)
        load_kernels(runner)
        runner.close()
    except Exception as error:
        logger.debug("warm-up failed, kernels are compiled on first use: %r", error)


def small_runner(
    model_config: ModelConfig, config: EngineConfig, *, device: torch.device, dtype: torch.dtype,
    quantization: QuantizationConfig | None = None, rank: TensorRank = ONE_RANK,
) -> Runner:  # fmt: skip
    """A runner of a randomly initialized model with the same widths and few layers, or of a rank's part of it."""
    model_config, exchange = _with_few_layers(model_config, rank.size), None
    with torch.device(device if rank.size == 1 else "meta"):
        model = VLM(model_config).to(dtype).eval().requires_grad_(False)
    if quantization is not None:
        quantize_storage(model, quantization, family_named(model_config.family))
        for module in model.modules():
            if isinstance(module, QuantizedLinear) and rank.size == 1:
                module.to_empty(device=device).to(dtype)
                for parameter in module.parameters():
                    parameter.zero_()  # a permutation of inputs must have valid indices
    if rank.size > 1:
        exchange = LoneRank(rank.rank, rank.size)
        shard_model(model, rank)
        model.to_empty(device=device).to(dtype).requires_grad_(False)
        for parameter in model.parameters():
            parameter.zero_()
        model.tie_head()
        connect(model, exchange)
    merge_storage(model)
    max_length = config.max_length or model_config.language.max_positions
    small = dataclasses.replace(config, encoder_cache_tokens=1024)
    grey = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)
    return Runner(model, small, pixels=grey, num_pages=1, max_length=max_length, exchange=exchange)


def _with_few_layers(config: ModelConfig, num_ranks: int = 1) -> ModelConfig:
    """The same widths with two decoder layers (the first adds no residual) and one encoder layer of each kind.

    The vocabulary size keeps its remainder by 16, on which kernels are specialized.
    """
    vision = config.vision.with_few_layers()
    vocab_size = config.language.vocab_size
    if num_ranks == 1:
        vocab_size = min(vocab_size, _VOCABULARY + vocab_size % 16)
    language = dataclasses.replace(
        config.language, num_layers=min(2, config.language.num_layers), vocab_size=vocab_size
    )
    return dataclasses.replace(config, vision=vision, language=language)


@torch.inference_mode()
def compile_all_sizes(runner: Runner) -> None:
    """Run all declared sizes on padding. Within `launch.compile_only` this compiles kernels without launching them."""
    profile_largest_step(runner)
    with runner.on_stream():
        runner.forward_pass.run_padding()
        runner.warm_up_sampler(with_logprobs=False)
        runner.images.encoder.run_largest()
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


@torch.inference_mode()
def load_kernels(runner: Runner) -> None:
    """Launch the compiled kernels on padding: a kernel is loaded at its first launch, which cannot be captured."""
    with runner.on_stream():
        runner.forward_pass.run_padding()
        runner.images.encoder.run_largest()
    torch.cuda.synchronize(runner.device)


@torch.inference_mode()
def warm_up(runner: Runner) -> None:
    """Capture CUDA graphs of all declared step sizes and encoder budgets. No effect without CUDA graphs."""
    if runner.forward_pass.graphs is None:
        return
    with runner.on_stream():
        runner.forward_pass.capture()
        runner.warm_up_sampler()
        runner.images.encoder.warm_up()
    run_blank_request(runner)
    torch.cuda.synchronize(runner.device)
    runner.forget_warm_up()


@torch.inference_mode()
def profile_largest_step(runner: Runner) -> None:
    """Run the largest encoder pass and the largest step on padding: compiles kernels, allocates their peak memory."""
    model, max_patches = runner.model, runner.config.max_encoder_patches
    with runner.on_stream():
        if max_patches >= 4 * model.config.vision.patches_per_token:
            grid, num_patches = model.vision.square_grid(max_patches)
            pixels = torch.zeros(num_patches, model.config.vision.patch_dim, device=runner.device)
            model.encode_images(pixels, torch.tensor([grid]))
        runner.forward_pass.run_largest()
        if runner.device.type == "cuda":
            torch.cuda.current_stream(runner.device).synchronize()


@torch.inference_mode()
def run_blank_request(runner: Runner) -> Failure | None:
    """Run a request with a small image like any other, and copy a page. Returns its failure, if any.

    This loads what torch runs outside of captured graphs; otherwise the first request on a fresh machine waits a third
    of a second for it.
    """
    vision, page_size = runner.model.config.vision, runner.config.page_size
    grid, num_patches = runner.model.vision.square_grid(0)
    num_features = runner.model.vision.layout([grid]).sizes.num_tokens
    num_tokens = num_features + 1
    pages, slots = range(-(-num_tokens // page_size)), range(-(-num_features // ENCODER_SLOT_TOKENS))
    fits = num_tokens <= runner.info.max_length and len(pages) <= runner.cache.num_pages
    if not fits or len(slots) * ENCODER_SLOT_TOKENS > runner.images.num_features:
        return None
    request_id, span = "warm-up", ImageSpan(key=b"", start=0, num_tokens=num_features, num_patches=num_patches)
    patches = np.zeros((num_patches, vision.in_channels * vision.patch_size**2), np.uint8)
    prompt = TokenPrompt(
        token_ids=[0] * num_tokens,
        positions=np.tile(np.arange(num_tokens), (3, 1)),
        images=(PromptImage(span=span, grid=grid, patches=patches),),
    )
    chunk = Chunk(
        request_id=request_id, slot=0, start=0, num_tokens=num_tokens, new_pages=tuple(pages),
        images=(ImageFeatures(0, tuple(slots)),), reads_last_token=False, drafts=(), samples=True,
    )  # fmt: skip
    plan = StepPlan(
        number=-1,  # before the first step of the core
        chunks=(chunk,),
        images=(ImageToEncode(request_id, 0, span.key, tuple(slots)),),
        encoder_parts=ENCODER_PARTS,
        pass_parts=ENCODER_PARTS,
        page_copies=((0, runner.cache.num_pages - 1),) if len(pages) < runner.cache.num_pages else (),
        started=(SlotStart(request_id, 0, ()),),
    )
    runner.register(Request(id=request_id, token_ids=prompt.token_ids, images=(span,)), prompt)
    [result] = runner.sample(runner.forward(plan)).read().chunks
    runner.unregister(request_id)
    return result.failure
