"""Calibration samples: conversations with their images from shard folders, spread evenly over sources and image sizes.

    shard folders -> strata (folder, source, image size) -> one sample of each stratum in turn
    -> conversations -> packed batches

Samples are drawn in one order for a seed: the first are for calibration, those after them for verification (`skip`), so
that no sample is used for both. For comparison, images can be left out (`text`), or tokens drawn at random (`random`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import TextRules, conversations
from saccade.errors import ConfigError, DataError, StorageError, UserError
from saccade.processor.inputs import ModelInputs
from saccade.processor.messages import Message
from saccade.processor.processor import Processor

logger = logging.getLogger(__name__)

Kind = Literal["images", "text", "random"]
_MAX_SHARDS = 64
"""Shards of a folder that samples are drawn from."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Which samples a model is calibrated with."""

    shards: tuple[str, ...]
    """Shard folders."""
    num_samples: int = 128
    """Samples to draw."""
    kind: Kind = "images"
    """images: as they are; text: without their images; random: random tokens of the same lengths."""
    image_weight: float | Literal["balanced"] = 1.0
    """How much an image token counts in the decoder; a text token counts 1.

    balanced: all image tokens together count as much as all text tokens."""
    max_tokens: int = 4096
    """Tokens of a packed batch; longer samples are left out."""
    seed: int = 0
    """Seed of the draw."""

    def __post_init__(self) -> None:
        if not self.shards:
            raise ConfigError("calibration needs shard folders: --calibration SHARDS")
        if self.num_samples < 1:
            raise ConfigError(f"num_samples is {self.num_samples}; it must be above 0")
        if isinstance(self.image_weight, float) and not 0 <= self.image_weight < math.inf:
            raise ConfigError(f"image_weight is {self.image_weight}; give a number from 0, or balanced")


class NoSamplesLeftError(DataError):
    """Calibration draws all samples of the shards, so none are left to compare on."""


def load_batches(
    config: CalibrationConfig, processor: Processor, vocab_size: int, *, skip: int = 0
) -> list[ModelInputs]:
    """The packed batches of a draw. `skip`: samples at its beginning that are left out."""
    draw = _draw(config, processor)
    num_skipped = sum(1 for _ in islice(draw, skip))
    samples = list(islice(draw, config.num_samples))
    if not samples:
        kind = NoSamplesLeftError if num_skipped else DataError
        raise kind(
            f"{', '.join(config.shards)}: no sample can be used (up to {config.max_tokens} tokens each, "
            f"{skip} left for calibration). Give more samples"
        )
    if config.kind == "random":
        generator = torch.Generator().manual_seed(config.seed)
        samples = [_random_tokens(inputs, vocab_size, generator) for inputs in samples]
    return _packed(samples, config.max_tokens)


def image_weight(config: CalibrationConfig, batches: list[ModelInputs]) -> float:
    """The weight of an image token as a number."""
    if isinstance(config.image_weight, float):
        return config.image_weight
    num_image = sum(len(batch.image_token_index) for batch in batches)
    num_text = sum(batch.num_tokens for batch in batches) - num_image
    return num_text / num_image if num_image else 1.0


def fingerprint(config: CalibrationConfig) -> str:
    """A hash of the settings and of the shards' indexes: equal for an equal draw."""
    indexes = [open_index(path).fingerprint for path in config.shards]
    return hashlib.sha256(json.dumps([dataclasses.asdict(config), indexes]).encode()).hexdigest()[:16]


# ------------------------------------------------------------------ drawing


def _draw(config: CalibrationConfig, processor: Processor) -> Iterator[ModelInputs]:
    """Draw usable samples. Those that cannot be read or are too long are left out and counted."""
    rules, num_bad = TextRules(), 0
    for index, shard, row in _in_turn(config):
        try:
            messages = conversations(index.read_sample(shard, row), rules)[0]
            if config.kind != "images":
                messages = [_without_images(message) for message in messages]
            inputs = processor.preprocess(messages)
            if inputs.num_tokens > config.max_tokens:
                raise DataError(f"{inputs.num_tokens} tokens")
        except StorageError:
            raise
        except UserError as error:
            num_bad += 1
            logger.debug("calibration sample left out: %s", error)
            continue
        yield inputs
    if num_bad:
        logger.warning(
            "%d calibration samples were left out: unreadable, or over %d tokens", num_bad, config.max_tokens
        )


def _in_turn(config: CalibrationConfig) -> Iterator[tuple[ShardIndex, int, int]]:
    """Samples of every stratum in turn, each stratum in random order."""
    strata = _strata(config)
    rng = random.Random(config.seed)  # noqa: S311
    queues = []
    for name in sorted(strata, key=repr):
        rng.shuffle(strata[name])
        queues.append(strata[name])
    rng.shuffle(queues)
    while queues:
        queues = [queue for queue in queues if queue]
        for queue in queues:
            yield queue.pop()


def _strata(config: CalibrationConfig) -> dict[Any, list[tuple[ShardIndex, int, int]]]:
    """Samples by folder, source and image size. Sizes are octaves of the pixels of a sample."""
    strata: dict[Any, list[tuple[ShardIndex, int, int]]] = {}
    for path in config.shards:
        index = open_index(path)
        shards = list(range(len(index.shards)))
        if len(shards) > _MAX_SHARDS:
            shards = random.Random(config.seed).sample(shards, _MAX_SHARDS)  # noqa: S311
        for shard in sorted(shards):
            table = index.read(shard, ["source", "widths", "heights"])
            sources, widths, heights = (table[name].to_pylist() for name in ("source", "widths", "heights"))
            for row in index.kept(shard).tolist():
                pixels = sum(width * height for width, height in zip(widths[row], heights[row], strict=True))
                stratum = (path, sources[row], int(math.log2(pixels)) if pixels else 0)
                strata.setdefault(stratum, []).append((index, shard, row))
    return strata


def _without_images(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message
    texts = [part["text"] for part in content if part["type"] == "text"]
    return {**message, "content": "".join(texts)}


def _random_tokens(inputs: ModelInputs, vocab_size: int, generator: torch.Generator) -> ModelInputs:
    token_ids = torch.randint(0, vocab_size, inputs.token_ids.shape, generator=generator)
    return dataclasses.replace(inputs, token_ids=token_ids)


def _packed(samples: list[ModelInputs], max_tokens: int) -> list[ModelInputs]:
    """Batches of up to `max_tokens` tokens, samples in order."""
    batches: list[list[ModelInputs]] = [[]]
    for inputs in samples:
        if batches[-1] and sum(one.num_tokens for one in batches[-1]) + inputs.num_tokens > max_tokens:
            batches.append([])
        batches[-1].append(inputs)
    return [ModelInputs.pack(batch) for batch in batches]
