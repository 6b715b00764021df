"""Turn sample references into a packed sequence: read, verify, decode, pack.

    SampleRef -> verified bytes -> conversation -> tokens, patches in the memory of the sequence -> PackedSequence

A sample with bad content is left out of its sequence and reported; the batch stays as sampled, so that all ranks agree
on what comes next and every good sample comes exactly once. Storage that fails is retried and then an error, never a
bad sample. Lengths are measured beforehand from text and image headers; a sample of another length is bad, because its
lengths file is stale.

Ranks that share packed sequences share the decoding of their images too (`image_shares.py`). A sample that is bad in
its text or in a header is left out by all of them. Pixels that cannot be decoded are found by one rank: the sample
stays, with grey pixels, and is named in `PackedSequence.undecoded`, so that all ranks can leave it out of the loss.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade.data.augment import AugmentConfig, augment, generator, has_sides
from saccade.data.bad_samples import BadSample
from saccade.data.config import StreamConfig
from saccade.data.image_shares import SharedConversation, share_images
from saccade.data.packing_buffer import SampleRef
from saccade.data.sample import Sample, training_conversations
from saccade.data.sources import IndexedSource
from saccade.data.takedown import TakenDownError
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
    image_ranks: list[int] = field(default_factory=list)
    """With ranks that share the sequence: the rank that encodes each image. Only those of this rank have patches."""
    image_tokens: list[int] = field(default_factory=list)
    """With ranks that share the sequence: tokens of each image."""
    undecoded: list[int] = field(default_factory=list)
    """Numbers of samples that have images which this rank could not decode."""

    @property
    def model_inputs(self) -> ModelInputs:
        """The inputs with the tokens that the model reads."""
        if not self.replaced_index:
            return self.inputs
        token_ids = self.inputs.token_ids.clone()
        token_ids[self.replaced_index] = torch.tensor(self.replaced_by)
        return dataclasses.replace(self.inputs, token_ids=token_ids)

    def without_loss(self, samples: Collection[int]) -> PackedSequence:
        """The sequence without loss on these samples, which count no longer."""
        if not samples:
            return self
        per_sample = self.inputs.num_conversations // len(self.sample_ids)
        loss_mask, starts = self.inputs.loss_mask.clone(), self.inputs.cu_seqlens.tolist()
        for sample in samples:
            loss_mask[starts[sample * per_sample] : starts[(sample + 1) * per_sample]] = False
        sample_ids = [name for number, name in enumerate(self.sample_ids) if number not in samples]
        inputs = dataclasses.replace(self.inputs, loss_mask=loss_mask)
        return dataclasses.replace(self, inputs=inputs, sample_ids=sample_ids)


@dataclass(frozen=True)
class CollateResult:
    """A packed sequence, and the samples skipped."""

    sequence: PackedSequence
    bad: list[BadSample]


_Conversations = Sequence[list[Message] | SharedConversation]
_Prepared = _Conversations | Exception
"""A sample's conversations, or the error that makes it bad."""
_GREY = 127
"""Value of pixels that could not be decoded."""


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

    def make(self, refs: Sequence[SampleRef], into: Pixels | None = None, *, is_own: bool = True) -> CollateResult:
        """Pack these samples. Patches are written to `into`, which has room for all of them.

        `is_own`: whether their data belongs in this node's cache; another node caches that of the others.
        """
        if into is None:
            into = np.empty((sum(ref.patches for ref in refs), self.patch_dim), dtype=np.uint8)
        packed, sources, bad = [self._empty], [], []
        sample_ids: list[str] = []
        num_patches, num_tokens = 0, 0
        replaced: dict[int, int] = {}
        shared: list[SharedConversation] = []
        undecoded: list[int] = []
        for ref, prepared in self._prepare(refs, is_own):
            source = self._sources[ref.source]
            sample_id = source.sample_id(ref.shard, ref.kept_row)
            try:
                if isinstance(prepared, Exception):
                    raise prepared
                inputs, error = self._preprocess(prepared, ref, source, into[num_patches:])
            except StorageError:
                raise
            except Exception as failure:  # bad content must not end the run; past max_bad_share the stream does
                bad.append(BadSample(sample_id, _reason(failure), isinstance(failure, TakenDownError)))
                continue
            if error is not None:
                undecoded.append(len(sample_ids))
                bad.append(BadSample(sample_id, _reason(error)))
            packed.append(dataclasses.replace(inputs, patches=self._empty.patches))
            sample_ids.append(sample_id)
            sources += [ref.source] * inputs.num_conversations
            shared += [one for one in prepared if isinstance(one, SharedConversation)]
            drawn = self._draw_dropped(inputs, sample_id, ref.epoch)
            replaced |= {num_tokens + position: token_id for position, token_id in drawn.items()}
            num_patches += len(inputs.patches)
            num_tokens += ref.tokens
        inputs = dataclasses.replace(ModelInputs.pack(packed), patches=torch.from_numpy(into[:num_patches]))
        sequence = PackedSequence(
            inputs=inputs,
            sample_ids=sample_ids,
            source_of_conversation=sources,
            source_names=[source.name for source in self._sources],
            replaced_index=list(replaced),
            replaced_by=list(replaced.values()),
            image_ranks=[rank for one in shared for rank in one.ranks],
            image_tokens=[tokens for one in shared for tokens in one.tokens],
            undecoded=undecoded,
        )
        return CollateResult(sequence, bad)

    def _draw_dropped(self, inputs: ModelInputs, name: str, epoch: int) -> dict[int, int]:
        """The tokens of a sample that token dropout replaces."""
        if self._token_dropout is None:
            return {}
        return self._token_dropout.draw(inputs, generator(self._config.seed, f"tokens of {name}", epoch))

    def _read(self, source: IndexedSource, ref: SampleRef, is_own: bool) -> Sample:
        """Read and verify a sample. Storage that fails is retried for `max_wait_s`."""
        storage = self._config.storage
        began, wait_s = time.monotonic(), storage.first_wait_s
        while True:
            try:
                return source.read(ref.shard, ref.kept_row, self._config.unit_bytes, is_cached=is_own)
            except StorageError as error:
                waited_s = time.monotonic() - began
                if waited_s >= storage.max_wait_s:
                    raise StorageError(f"{error}. Waited {waited_s:.0f} s; resume when the storage is back") from error
                logger.warning("%s. Retrying for up to %.0f s", error, storage.max_wait_s - waited_s)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 16.0)

    def _prepare(self, refs: Sequence[SampleRef], is_own: bool) -> Iterator[tuple[SampleRef, _Prepared]]:
        """Each sample's conversations, or the error that makes it bad.

        Without sharing a sample is read when it is needed; with sharing all of them are read first, and the ranks of
        their images are chosen.
        """
        each = ((ref, self._conversations(ref, is_own)) for ref in refs)
        if not self._config.is_shared:
            yield from each
            return
        prepared = [(ref, self._read_headers(found)) for ref, found in each]
        found = [one for _, several in prepared if isinstance(several, list) for one in several]
        share_images([one for one in found if isinstance(one, SharedConversation)], self._config.num_context_ranks)
        yield from prepared

    def _conversations(self, ref: SampleRef, is_own: bool) -> list[list[Message]] | Exception:
        """Read a sample: its conversations of this epoch."""
        source = self._sources[ref.source]
        try:
            sample = self._read(source, ref, is_own)
            variants = training_conversations(sample, source.config.rules, pairs=self._config.pairs)
            return variants[ref.epoch % len(variants)]
        except StorageError:
            raise
        except Exception as error:
            return error

    def _read_headers(self, found: list[list[Message]] | Exception) -> list[SharedConversation] | Exception:
        if isinstance(found, Exception):
            return found
        try:
            return [SharedConversation.of(messages, self._processor) for messages in found]
        except Exception as error:
            return error

    def _preprocess(
        self, conversations: _Conversations, ref: SampleRef, source: IndexedSource, into: Pixels
    ) -> tuple[ModelInputs, Exception | None]:
        """The sample packed; and the error of its images, if it is shared and they cannot be decoded."""
        rank = self._config.context_rank if self._config.has_images else None
        try:
            return self._pack(conversations, ref, source, into, rank=rank), None
        except StorageError:
            raise
        except Exception as error:
            shared = [one for one in conversations if isinstance(one, SharedConversation)]
            if not shared:
                raise
            inputs = self._pack(conversations, ref, source, into, rank=None)  # raises errors that all ranks find
            grey = into[: sum(one.patches_of(rank) for one in shared)]
            grey[...] = _GREY
            return dataclasses.replace(inputs, patches=torch.from_numpy(grey)), error

    def _pack(
        self,
        conversations: _Conversations,
        ref: SampleRef,
        source: IndexedSource,
        into: Pixels,
        *,
        rank: int | None,
    ) -> ModelInputs:
        """The sample's conversations packed; of shared ones the images of `rank` are decoded, or none."""
        parts, num_patches, num_elsewhere = [], 0, 0
        for one in conversations:
            if isinstance(one, SharedConversation):
                elsewhere = one.elsewhere(rank)
                num_elsewhere += sum(one.patches[number] for number in elsewhere)
                inputs = self._preprocess_one(one.messages, ref, source, into[num_patches:], elsewhere)
            else:
                inputs = self._preprocess_one(one, ref, source, into[num_patches:])
            parts.append(inputs)
            num_patches += len(inputs.patches)
        inputs = parts[0]
        if len(parts) > 1:
            packed = [dataclasses.replace(part, patches=self._empty.patches) for part in parts]
            inputs = dataclasses.replace(ModelInputs.pack(packed), patches=torch.from_numpy(into[:num_patches]))
        if (inputs.num_tokens, num_patches + num_elsewhere) != (ref.tokens, ref.patches):
            raise DataError(
                f"sample {source.sample_id(ref.shard, ref.kept_row)} has {inputs.num_tokens} tokens and "
                f"{num_patches + num_elsewhere} patches, its lengths file says {ref.tokens} and {ref.patches}. The "
                "file is stale: remove the folder's index/lengths-* and start again"
            )
        return inputs

    def _preprocess_one(
        self,
        messages: list[Message],
        ref: SampleRef,
        source: IndexedSource,
        into: Pixels,
        elsewhere: Mapping[int, tuple[int, int]] | None = None,
    ) -> ModelInputs:
        """One conversation. Both of a pair are augmented alike: they have the same images.

        `elsewhere`: images that are not decoded, and their sizes.
        """
        if self._config.augment is not None:
            rng = generator(self._config.seed, source.sample_id(ref.shard, ref.kept_row), ref.epoch)
            messages = self._augmented(messages, self._config.augment, rng, elsewhere or {})
        return self._processor.preprocess(messages, into=into, not_decoded=elsewhere)

    def _augmented(
        self,
        messages: list[Message],
        config: AugmentConfig,
        rng: random.Random,
        elsewhere: Mapping[int, tuple[int, int]],
    ) -> list[Message]:
        """The conversation with its images changed, at the size that the processor gives them."""
        can_flip, numbers = not has_sides(messages), itertools.count()

        def changed(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image":
                return part
            if (size := elsewhere.get(next(numbers))) is not None:
                augment(Image.new("L", size), (1, 1), config, rng, can_flip=can_flip)  # draws the same numbers
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


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else repr(error)
