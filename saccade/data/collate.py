"""From planned refs to a packed row: read, check, decode, pack.

    ref -> bytes, compared with their checksum -> conversation -> patches into the row's memory, tokens -> PackedSequence

A sample that fails on the way is left out of its row and named; the row keeps its place, and the plan does not change. So every
rank still agrees on what comes next, and every good sample comes exactly once. Lengths are measured beforehand from text and
image headers, and must be met exactly: a sample of another length than planned is a bad one, its lengths file is stale.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from saccade.data.bad_samples import BadSample
from saccade.data.batch_sampler import SampleRef
from saccade.data.header import upright_size
from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import Sample, TextRules, conversations, images
from saccade.data.storage import StorageConfig
from saccade.errors import DataError, UserError
from saccade.processor.image import MediaLimits, Pixels
from saccade.processor.inputs import ModelInputs
from saccade.processor.processor import Processor, ResizeName

_LENGTHS_VERSION = 1
"""Raised when the same sample is to be measured differently: lengths of an older version are then measured anew."""


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """One packed row to learn from."""

    inputs: ModelInputs
    """Patches are uint8; `normalized_patches` is left to the device. A row whose samples are all bad has no tokens."""
    sample_ids: list[str]
    """source/shard/key of each conversation."""
    source_of_conversation: list[int]
    """Index into `source_names` of each conversation."""
    source_names: list[str]
    """The sources of the stream."""


@dataclass(frozen=True)
class CollateResult:
    """A row, what was left out of it, and the bytes of samples read for it."""

    sequence: PackedSequence
    bad: list[BadSample]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class CollatorSource:
    """A source as those see it who make rows."""

    name: str
    """In sample ids."""
    path: str
    """Its shards."""
    fingerprint: str
    """Of its index, so that shard numbers mean the same to all."""
    rules: TextRules
    """How its text becomes conversations."""


@dataclass(frozen=True, kw_only=True)
class CollatorConfig:
    """All that is needed to make rows, in plain values, so that it can be told to another process."""

    checkpoint: str
    """The folder the processor is loaded from."""
    resize: ResizeName
    """How images are resized."""
    sources: tuple[CollatorSource, ...]
    """In the order refs number them."""
    storage: StorageConfig
    """How remote shards are read."""

    def to_json(self) -> dict[str, Any]:
        """For a message to another process."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> CollatorConfig:
        """The same setup in the other process."""
        sources = [source | {"rules": TextRules(**source["rules"])} for source in content["sources"]]
        return CollatorConfig(
            checkpoint=content["checkpoint"],
            resize=content["resize"],
            sources=tuple(CollatorSource(**source) for source in sources),
            storage=StorageConfig(**content["storage"]),
        )


class Collator:
    """Makes rows from refs."""

    def __init__(self, setup: CollatorConfig) -> None:
        self._processor = Processor.load(setup.checkpoint, resize=setup.resize)
        self._sources = setup.sources
        self._indexes = [_open(source, setup.storage) for source in setup.sources]
        self._empty = _empty_row(self._processor)

    @property
    def patch_dim(self) -> int:
        """Bytes of one patch."""
        return self._processor.images.patch_dim

    def make(self, refs: Sequence[SampleRef], into: Pixels | None = None) -> CollateResult:
        """The row of these refs. Patches are written to `into`, which has room for all that are planned."""
        if into is None:
            into = np.empty((sum(ref.patches for ref in refs), self.patch_dim), dtype=np.uint8)
        rows, sample_ids, sources, bad = [self._empty], [], [], []
        num_patches, num_bytes = 0, 0
        for ref in refs:
            source, index = self._sources[ref.source], self._indexes[ref.source]
            try:
                sample = index.read_sample(ref.shard, _row(index, ref), verify=True)
                row = self._prepare(sample, ref, source.rules, into[num_patches:])
            except Exception as error:  # whatever is wrong with one sample must not end the run; past a share it does
                reason = str(error) if isinstance(error, UserError) else repr(error)
                bad.append(BadSample(source.name, index.shards[ref.shard], sample_key(index, ref), reason))
                continue
            rows.append(dataclasses.replace(row, patches=self._empty.patches))
            sample_ids.append(f"{source.name}/{index.shards[ref.shard].removesuffix('.tar')}/{sample.key}")
            sources.append(ref.source)
            num_patches += ref.patches
            num_bytes += sum(map(len, sample.members.values()))
        inputs = dataclasses.replace(ModelInputs.pack(rows), patches=torch.from_numpy(into[:num_patches]))
        made = PackedSequence(
            inputs=inputs,
            sample_ids=sample_ids,
            source_of_conversation=sources,
            source_names=[source.name for source in self._sources],
        )
        return CollateResult(made, bad, num_bytes)

    def _prepare(self, sample: Sample, ref: SampleRef, rules: TextRules, into: Pixels) -> ModelInputs:
        variants = conversations(sample, rules)
        row = self._processor.preprocess(variants[ref.epoch % len(variants)], into=into)
        if (row.num_tokens, len(row.patches)) != (ref.tokens, ref.patches):
            raise DataError(
                f"sample {sample.key} has {row.num_tokens} tokens and {len(row.patches)} patches, its lengths file says "
                f"{ref.tokens} and {ref.patches}. The file is stale: remove the folder's index/lengths-* and start again"
            )
        return row


def sample_key(index: ShardIndex, ref: SampleRef) -> str:
    """The key of a planned sample."""
    key: str = index.read(ref.shard, ["key"])["key"][_row(index, ref)].as_py()
    return key


def _row(index: ShardIndex, ref: SampleRef) -> int:
    return int(index.kept(ref.shard)[ref.kept_row])


def _open(source: CollatorSource, storage: StorageConfig) -> ShardIndex:
    index = open_index(source.path, build=False, check_files=False, config=storage)
    if index.fingerprint != source.fingerprint:
        raise DataError(f"{source.path}: the index was rewritten while it was in use. Start again from the last state")
    return index


def _empty_row(processor: Processor) -> ModelInputs:
    """A row of no conversations."""
    images = processor.images
    return ModelInputs.empty(patch_dim=images.patch_dim, pixel_mean=images.mean, pixel_std=images.std)


# ------------------------------------------------------------------ lengths


def measure(sample: Sample, processor: Processor, rules: TextRules) -> tuple[list[int], int]:
    """Tokens of each text variant, and patches, as `Collator` will find them. Text is tokenised, no pixel is decoded."""
    sizes = [upright_size(data) for data in images(sample)]
    lengths = [processor.measure(messages, sizes) for messages in conversations(sample, rules)]
    return [tokens for tokens, _ in lengths], lengths[0][1]


@dataclass(frozen=True)
class Measurer:
    """`measure` for one checkpoint and one set of rules, in a form that can be sent to another process."""

    checkpoint: str
    rules: TextRules

    def __call__(self, sample: Sample) -> tuple[list[int], int]:
        """Tokens of each variant, and patches."""
        return measure(sample, _processor(self.checkpoint), self.rules)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the lengths it finds: equal for equal tokenizer, template, image settings and rules."""
        decisive = (_LENGTHS_VERSION, Processor.fingerprint(self.checkpoint), self.rules, MediaLimits())
        return hashlib.sha256(repr(decisive).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def _processor(checkpoint: str) -> Processor:
    return Processor.load(checkpoint)
