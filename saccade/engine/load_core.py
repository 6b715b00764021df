"""Load an engine core: the runner on its device, the grammars, and the loop that uses both."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.grammar import GrammarCompiler, Grammars
from saccade.engine.core.loop import EngineCore
from saccade.engine.device.loading import load_runner
from saccade.engine.device.runner import PixelScale
from saccade.model.families import load_model_config
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
        runner = load_runner(folder, config, pixels=pixels, device=device, dtype=dtype)
    except BaseException:
        grammars.close()
        raise
    return EngineCore(runner, grammars=grammars)


def load_grammars(folder: Path, processor: Processor) -> Grammars:
    """Grammars over the tokens of a checkpoint, set up in a thread while the weights are loaded."""
    vocab_size = load_model_config(folder).language.vocab_size
    grammars = Grammars(partial(GrammarCompiler, processor.tokenizer, eos_ids=processor.eos_ids, vocab_size=vocab_size))
    grammars.prepare()
    return grammars
