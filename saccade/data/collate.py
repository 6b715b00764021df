"""From sample references to a packed sequence: read, verify, decode, pack.

    SampleRef -> verified bytes -> conversation -> tokens, patches in the memory of the sequence -> PackedSequence

A sample with bad content is left out of its sequence and reported; the batch stays as sampled, so that all ranks agree
on what comes next and every good sample comes exactly once. Storage that fails is retried and then an error, never a
bad sample. Lengths are measured beforehand from text and image headers; a sample of another length is bad, because its
lengths file is stale.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade.data.augment import AugmentConfig, augment, generator, has_sides
from saccade.data.bad_samples import BadSample
from saccade.data.batch_sampler import SampleRef
from saccade.data.config import StreamConfig
from saccade.data.sample import Sample, training_conversations
from saccade.data.sources import IndexedSource
from saccade.data.token_dropout import TokenDropout
from saccade.errors import DataError, StorageError, UserError
from saccade.processor.image import Pixels, load_image
from saccade.processor.inputs import ModelInputs
from saccade.processor.messages import Message
from saccade.processor.processor import Processor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """Conversations packed into one sequence to train on."""

    inputs: ModelInputs
    """Patches are uint8; the device normalizes them. A sequence whose samples are all bad has no tokens."""
    sample_ids: list[str]
    """source/shard/key of each sample: a conversation, or a pair of them."""
    source_of_conversation: list[int]
    """Index into `source_names` of each conversation."""
    source_names: list[str]
    """The sources of the stream."""
    replaced_index: list[int] = field(default_factory=list)
    """Tokens that the model does not read, because of token dropout. `inputs` has them: they are predicted."""
    replaced_by: list[int] = field(default_factory=list)
    """The token that it reads instead of each."""

    @property
    def model_inputs(self) -> ModelInputs:
        """The inputs with the tokens that the model reads."""
        if not self.replaced_index:
            return self.inputs
        token_ids = self.inputs.token_ids.clone()
        token_ids[self.replaced_index] = torch.tensor(self.replaced_by)
        return dataclasses.replace(self.inputs, token_ids=token_ids)


@dataclass(frozen=True)
class CollateResult:
    """A packed sequence, and the samples skipped."""

    sequence: PackedSequence
    bad: list[BadSample]


class Collator:
    """Makes packed sequences from sample references."""

    def __init__(self, sources: Sequence[IndexedSource], config: StreamConfig) -> None:
        self._sources, self._config = sources, config
        self._processor = Processor.load(config.checkpoint, resize=config.resize)
        self._token_dropout = (
            TokenDropout(config.token_dropout, self._processor.tokenizer) if config.token_dropout else None
        )
        settings = self._processor.images
        self._empty = ModelInputs.empty(patch_dim=settings.patch_dim, pixel_mean=settings.mean, pixel_std=settings.std)

    @property
    def patch_dim(self) -> int:
        """Bytes of one patch."""
        return self._processor.images.patch_dim

    def make(self, refs: Sequence[SampleRef], into: Pixels | None = None) -> CollateResult:
        """Pack these samples. Patches are written to `into`, which has room for all of them."""
        if into is None:
            into = np.empty((sum(ref.patches for ref in refs), self.patch_dim), dtype=np.uint8)
        packed, sample_ids, sources, bad = [self._empty], [], [], []
        num_patches, num_tokens = 0, 0
        replaced: dict[int, int] = {}
        for ref in refs:
            source = self._sources[ref.source]
            try:
                sample = self._read(source, ref)
                inputs = self._preprocess(sample, ref, source, into[num_patches:])
            except StorageError:
                raise
            except Exception as error:  # bad content must not end the run; past max_bad_share the stream does
                reason = str(error) if isinstance(error, UserError) else repr(error)
                bad.append(BadSample(source.sample_id(ref.shard, ref.kept_row), reason))
                continue
            packed.append(dataclasses.replace(inputs, patches=self._empty.patches))
            sample_ids.append(source.sample_id(ref.shard, ref.kept_row))
            sources += [ref.source] * inputs.num_conversations
            drawn = self._draw_dropped(inputs, sample_ids[-1], ref.epoch)
            replaced |= {num_tokens + position: token_id for position, token_id in drawn.items()}
            num_patches += ref.patches
            num_tokens += ref.tokens
        inputs = dataclasses.replace(ModelInputs.pack(packed), patches=torch.from_numpy(into[:num_patches]))
        sequence = PackedSequence(
            inputs=inputs,
            sample_ids=sample_ids,
            source_of_conversation=sources,
            source_names=[source.name for source in self._sources],
            replaced_index=list(replaced),
            replaced_by=list(replaced.values()),
        )
        return CollateResult(sequence, bad)

    def _draw_dropped(self, inputs: ModelInputs, name: str, epoch: int) -> dict[int, int]:
        """The tokens of a sample that token dropout replaces."""
        if self._token_dropout is None:
            return {}
        return self._token_dropout.draw(inputs, generator(self._config.seed, f"tokens of {name}", epoch))

    def _read(self, source: IndexedSource, ref: SampleRef) -> Sample:
        """Read and verify a sample. Storage that fails is retried for `max_wait_s`."""
        storage = self._config.storage
        began, wait_s = time.monotonic(), storage.first_wait_s
        while True:
            try:
                return source.read(ref.shard, ref.kept_row)
            except StorageError as error:
                waited_s = time.monotonic() - began
                if waited_s >= storage.max_wait_s:
                    raise StorageError(f"{error}. Waited {waited_s:.0f} s; resume when the storage is back") from error
                logger.warning("%s. Retrying for up to %.0f s", error, storage.max_wait_s - waited_s)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 16.0)

    def _preprocess(self, sample: Sample, ref: SampleRef, source: IndexedSource, into: Pixels) -> ModelInputs:
        variants = training_conversations(sample, source.config.rules, pairs=self._config.pairs)
        parts, num_patches = [], 0
        for messages in variants[ref.epoch % len(variants)]:
            parts.append(self._preprocess_one(messages, ref, source, into[num_patches:]))
            num_patches += len(parts[-1].patches)
        inputs = parts[0]
        if len(parts) > 1:
            packed = [dataclasses.replace(part, patches=self._empty.patches) for part in parts]
            inputs = dataclasses.replace(ModelInputs.pack(packed), patches=torch.from_numpy(into[:num_patches]))
        if (inputs.num_tokens, len(inputs.patches)) != (ref.tokens, ref.patches):
            raise DataError(
                f"sample {sample.key} has {inputs.num_tokens} tokens and {len(inputs.patches)} patches, its lengths "
                f"file says {ref.tokens} and {ref.patches}. The file is stale: remove the folder's index/lengths-* and "
                "start again"
            )
        return inputs

    def _preprocess_one(
        self, messages: list[Message], ref: SampleRef, source: IndexedSource, into: Pixels
    ) -> ModelInputs:
        """One conversation. Both of a pair are augmented alike: they have the same images."""
        if self._config.augment is not None:
            rng = generator(self._config.seed, source.sample_id(ref.shard, ref.kept_row), ref.epoch)
            messages = self._augmented(messages, self._config.augment, rng)
        return self._processor.preprocess(messages, into=into)

    def _augmented(self, messages: list[Message], config: AugmentConfig, rng: random.Random) -> list[Message]:
        """The conversation with its images changed, at the size that the processor gives them."""
        can_flip = not has_sides(messages)

        def changed(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image":
                return part
            pixels = load_image(part["image"], self._processor.limits)
            height, width = self._processor.images.resized(*pixels.shape[:2])
            image = Image.fromarray(pixels)
            return part | {"image": augment(image, (width, height), config, rng, can_flip=can_flip)}

        return [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [*map(changed, message["content"])]}
            for message in messages
        ]
