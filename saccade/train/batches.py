"""Batch iterator: packed sequences from the data stream to micro-batches on the device.

    stream -> add labels -> pinned memory -> copy on a side CUDA stream while the previous micro-batch computes

Every rank runs the same number of micro-batches per step: ranks with fewer packed sequences add empty ones.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.data.collate import PackedSequence
from saccade.data.config import Source
from saccade.data.index import open_index
from saccade.data.index_files import ShardProgress
from saccade.data.loader import Stream, open_stream
from saccade.data.rank_batches import Exchange
from saccade.model.config import ModelConfig
from saccade.processor.inputs import ModelInputs
from saccade.train.config import TrainConfig
from saccade.train.context_batches import ONE_RANK, ContextGroup, SequenceShare, pad_inputs
from saccade.train.flops import Work, micro_batch_work
from saccade.train.loss import IGNORED, count_labels, empty_micro_batch, labels_by_source, next_token_labels
from saccade.train.objectives.objective import Objective
from saccade.train.stage_config import StageConfig

logger = logging.getLogger(__name__)


def open_stage_stream(
    config: TrainConfig,
    stage: StageConfig,
    *,
    state: dict[str, int | str] | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    context: ContextGroup = ONE_RANK,
    ranks_per_node: int | None = None,
    exchange: Exchange | None = None,
    check_files: bool = True,
) -> Stream:
    """This rank's data stream of a stage, from `state` on. Ranks are those of the data; see `open_stream`."""
    data = stage.data
    return open_stream(
        data.sources,
        checkpoint=config.model.folder,
        pairs=stage.objective.reads_pairs,
        max_seq_len=data.max_seq_len,
        max_patches=data.max_patches,
        global_batch_size=data.global_batch_size,
        seed=config.seed,
        num_epochs=stage.epochs,
        window_shards=data.window_shards,
        num_lanes=data.num_lanes,
        unit_bytes=data.unit_bytes,
        packing_buffer_size=data.packing_buffer_size,
        rank=rank,
        num_ranks=num_ranks,
        context_rank=context.rank,
        num_context_ranks=context.num_ranks,
        has_images=context.has_images,
        has_sharers=context.num_sharers > 1,
        ranks_per_node=ranks_per_node,
        exchange=exchange,
        check_files=check_files,
        state=state,
        resize=data.resize,
        augment=data.augment,
        token_dropout=data.token_dropout,
        num_workers=data.num_workers,
        max_bad_share=data.max_bad_share,
        bad_log=config.run / "bad_samples.jsonl",
        on_progress=log_indexing,
        storage=data.storage,
    )


def open_validation_stream(
    config: TrainConfig,
    stage: StageConfig,
    *,
    sources: Sequence[Source],
    num_samples: int,
    rank: int = 0,
    num_ranks: int = 1,
    context: ContextGroup = ONE_RANK,
) -> Stream:
    """The first `num_samples` samples of `sources`, packed like the data of the stage, not augmented.

    They are few, so no workers decode them.
    """
    data = stage.data
    indexes = [open_index(source.path, config=data.storage) for source in sources]
    return open_stream(
        sources,
        checkpoint=config.model.folder,
        pairs=stage.objective.reads_pairs,
        max_seq_len=data.max_seq_len,
        max_patches=data.max_patches,
        global_batch_size=num_ranks,
        num_samples=min(num_samples, int(sum(index.kept_sizes.sum() for index in indexes))),
        rank=rank,
        num_ranks=num_ranks,
        context_rank=context.rank,
        num_context_ranks=context.num_ranks,
        has_images=context.has_images,
        has_sharers=context.num_sharers > 1,
        resize=data.resize,
        num_workers=0,
        max_bad_share=data.max_bad_share,
        on_progress=log_indexing,
        storage=data.storage,
    )


def log_indexing(what: str, done: ShardProgress) -> None:
    """Log how far an index or lengths file is."""
    logger.info("%s: %d of %d shards", what, done.num_done, done.num_shards)


@dataclass(frozen=True)
class MicroBatch:
    """One packed sequence with its labels, in host memory or on the device."""

    inputs: ModelInputs
    labels: Tensor
    num_loss_tokens: int
    by_source: list[tuple[Tensor, int]]
    """Labels of each source and their count; empty if losses by source are not needed."""
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors that the objective needs."""


@dataclass(frozen=True)
class StepBatch:
    """This rank's micro-batches of one optimizer step."""

    num_micro_batches: int
    """The same on every rank; some may be empty."""
    on_device: Iterator[MicroBatch]
    """The micro-batches on the device; can be iterated once."""
    work: Work
    """Tokens, samples and FLOPs."""
    num_units: float
    """This rank's share of the objective's normaliser."""
    loss_tokens_by_source: list[int]
    """Number of loss tokens of each source; empty if losses by source are not needed."""
    sample_ids: list[list[str]]
    """Sample ids of each micro-batch that is not empty."""
    state: dict[str, int | str]
    """State of the data stream after this step."""


class BatchIterator:
    """Reads batches from a stream and copies them to the device."""

    def __init__(
        self,
        stream: Stream,
        config: ModelConfig,
        trained_parts: Collection[str],
        device: torch.device,
        objective: Objective,
        context: ContextGroup = ONE_RANK,
    ) -> None:
        """`trained_parts` are the trainable parts of the model; FLOPs are counted from them.

        With a `context` of several ranks they read the same sequences, and each gets its share of every micro-batch.
        """
        self._context = context
        self._objective, self._read_targets = objective, objective.target_reader(stream)
        self.source_names = stream.source_names
        self.wait_s = 0.0
        """Time the host waited for the last batch."""
        self._stream, self._config, self._trained_parts, self._device = stream, config, trained_parts, device
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._empty = pad_inputs(empty_micro_batch(config.vision), context.min_tokens)

    def remote_reads(self) -> dict[str, float]:
        """What this rank has read of remote shards so far, and the bytes of its node's cache; empty for local ones."""
        counters = self._stream.storage_counters
        return {**vars(counters), "cached_bytes": self._stream.cached_bytes} if counters.num_requests else {}

    def next(self, *, with_sources: bool) -> StepBatch | None:
        """The next step's micro-batches, with the first copy already started; None at the end of the data."""
        start = time.perf_counter()
        try:
            batch = next(self._stream)
        except StopIteration:
            return None
        finally:
            self.wait_s = time.perf_counter() - start
        agreed = zip(self._agree_on_bad(batch.sequences), batch.sequences, strict=True)
        pairs = [
            (sequence, whole) for sequence, whole in agreed if whole.inputs.num_tokens
        ]  # none: all samples are bad
        sequences = [sequence for sequence, _ in pairs]
        batches = [self._add_labels(sequence, whole, with_sources) for sequence, whole in pairs]
        work = sum_work(
            micro_batch_work(self._config, one.inputs, one.num_loss_tokens, self._trained_parts) for one in batches
        )
        work = work._replace(samples=sum(len(sequence.sample_ids) for sequence in sequences))
        num_units = sum(self._objective.num_units(one.inputs, one.num_loss_tokens) for one in batches)
        shares = [self._share(one, sequence) for one, sequence in zip(batches, sequences, strict=True)]
        if num_empty := batch.max_sequences_per_rank - len(batches):
            shares += [self._share(self._empty_batch(with_sources), None)] * num_empty
        return StepBatch(
            num_micro_batches=len(shares),
            on_device=self._to_device(shares),
            work=work,
            num_units=num_units,
            loss_tokens_by_source=[
                sum(counts) for counts in zip(*([n for _, n in one.by_source] for one in batches), strict=True)
            ],
            sample_ids=[sequence.sample_ids for sequence in sequences],
            state=batch.state,
        )

    def _agree_on_bad(self, sequences: Sequence[PackedSequence]) -> list[PackedSequence]:
        """Leave samples out of the loss that any rank with the same sequences could not decode."""
        if self._context.num_sharers == 1:
            return list(sequences)
        found = self._context.gather([sequence.undecoded for sequence in sequences])
        return [
            sequence.without_loss({sample for of_rank in found for sample in of_rank[number]})
            for number, sequence in enumerate(sequences)
        ]

    def _share(self, batch: MicroBatch, sequence: PackedSequence | None) -> MicroBatch:
        """This rank's share of a micro-batch; None: of an empty one."""
        if self._context.num_ranks == 1:
            return batch
        share = SequenceShare(
            batch.inputs,
            self._context,
            image_ranks=sequence.image_ranks if sequence else [],
            image_tokens=sequence.image_tokens if sequence else [],
            window=self._config.language.window,
        )
        labels, num_loss_tokens = share.labels(batch.labels)
        by_source = [share.labels(of_source) for of_source, _ in batch.by_source]
        targets = {name: share.loss_rows(batch.labels, rows) for name, rows in batch.targets.items()}
        return MicroBatch(share.inputs(), labels, num_loss_tokens, by_source, targets)

    def _add_labels(self, sequence: PackedSequence, whole: PackedSequence, with_sources: bool) -> MicroBatch:
        """Label a sequence; `whole`: with all samples in the loss."""
        sequence = dataclasses.replace(sequence, inputs=pad_inputs(sequence.inputs, self._context.min_tokens))
        labels = next_token_labels(sequence.inputs)
        num_sources = len(self.source_names) if with_sources else 0
        by_source = labels_by_source(sequence.inputs, labels, sequence.source_of_conversation, num_sources)
        targets = self._targets_of(whole, labels)
        counted = [(part, count_labels(part)) for part in by_source]
        return MicroBatch(sequence.model_inputs, labels, count_labels(labels), counted, targets)

    def _targets_of(self, sequence: PackedSequence, labels: Tensor) -> Mapping[str, Tensor]:
        """What the objective reads for these labels, which some samples of the sequence may have left."""
        if self._read_targets is None:
            return {}
        own = next_token_labels(sequence.inputs)
        targets = self._read_targets(sequence.sample_ids, sequence.inputs, own)
        is_kept = labels[: len(own)][own != IGNORED] != IGNORED
        return targets if is_kept.all() else {name: rows[is_kept] for name, rows in targets.items()}

    def _empty_batch(self, with_sources: bool) -> MicroBatch:
        labels = next_token_labels(self._empty)
        return MicroBatch(self._empty, labels, 0, [(labels, 0) for _ in self.source_names] if with_sources else [])

    def _to_device(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Start copying the first micro-batch now, and each next one when the previous is consumed."""
        first = self._start_copy(batches[0])

        def iterate() -> Iterator[MicroBatch]:
            pending = first
            for following in batches[1:]:
                current, pending = pending, self._start_copy(following)
                yield self._wait_for_copy(*current)
            yield self._wait_for_copy(*pending)

        return iterate()

    def _start_copy(self, batch: MicroBatch) -> tuple[MicroBatch, torch.cuda.Event | None]:
        """Copy asynchronously; the event marks the end of the copy."""
        if self._copy_stream is None:
            return batch, None
        with torch.cuda.stream(self._copy_stream):
            copied = _map_tensors(batch, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            return copied, self._copy_stream.record_event()

    def _wait_for_copy(self, batch: MicroBatch, copied: torch.cuda.Event | None) -> MicroBatch:
        """Make the compute stream, not the host, wait for the copy."""
        if copied is not None:
            compute_stream = torch.cuda.current_stream(self._device)
            compute_stream.wait_event(copied)
            _map_tensors(batch, lambda tensor: _record_stream(tensor, compute_stream))
        return batch


def sum_work(works: Iterable[Work]) -> Work:
    """Total work of several micro-batches."""
    total = Work()
    for work in works:
        total = total.plus(work)
    return total


def _record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Keep the tensor's memory, allocated on the copy stream, until `stream` has used it."""
    tensor.record_stream(stream)
    return tensor


def _map_tensors(batch: MicroBatch, function: Callable[[Tensor], Tensor]) -> MicroBatch:
    """The micro-batch with `function` applied to every tensor that belongs on the device."""
    inputs: dict[str, Any] = {
        field.name: function(value)
        for field in dataclasses.fields(batch.inputs)
        if isinstance(value := getattr(batch.inputs, field.name), Tensor) and field.name != "image_grids"
    }
    return MicroBatch(
        dataclasses.replace(batch.inputs, **inputs),
        function(batch.labels),
        batch.num_loss_tokens,
        [(function(labels), count) for labels, count in batch.by_source],
        {name: function(tensor) for name, tensor in batch.targets.items()},
    )
