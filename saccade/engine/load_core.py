"""Load an engine core: the runner on its device, the grammars, and the loop that uses both."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.grammar.compiler import GrammarCompiler
from saccade.engine.core.grammar.grammars import Grammars
from saccade.engine.core.loop import EngineCore
from saccade.engine.device.loading import load_runner
from saccade.engine.device.runner import PixelScale, Runner
from saccade.model.families import load_model_config
from saccade.model.tensor_parallel import check_divisible
from saccade.processor import Processor


def load_core(
    folder: Path,
    config: EngineConfig,
    processor: Processor,
    *,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
) -> EngineCore:
    """Load the model of a checkpoint folder into a core that is ready to serve."""
    grammars = load_grammars(folder, processor)
    try:
        pixels = PixelScale(mean=processor.images.mean, std=processor.images.std)
        runner = _load_runner(folder, config, pixels, device, dtype)
    except BaseException:
        grammars.close()
        raise
    return EngineCore(runner, grammars=grammars)


def _load_runner(
    folder: Path, config: EngineConfig, pixels: PixelScale, device: str | torch.device, dtype: str | torch.dtype | None
) -> Runner:
    if config.tensor_parallel_size == 1:
        return load_runner(folder, config, pixels=pixels, device=device, dtype=dtype)
    from saccade.engine.ranks.launch import Ranks, rank_devices

    check_divisible(load_model_config(folder).language, config.tensor_parallel_size)  # before processes start
    ranks = Ranks(rank_devices(device, config.tensor_parallel_size), timeout_s=config.rank_timeout_s)
    try:
        return ranks.load(folder, config, pixels=pixels, dtype=dtype)
    except BaseException:
        ranks.kill()
        raise


def load_grammars(folder: Path, processor: Processor) -> Grammars:
    """Grammars over the tokens of a checkpoint, set up in a thread while the weights are loaded."""
    vocab_size = load_model_config(folder).language.vocab_size
    grammars = Grammars(partial(GrammarCompiler, processor.tokenizer, eos_ids=processor.eos_ids, vocab_size=vocab_size))
    grammars.prepare()
    return grammars
