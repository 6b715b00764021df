"""The stream a trainer reads: global batches of packed sequences, in an order that is a function of a few integers.

    sources -> index, lengths (built on first use) -> batch sampler -> sequences of this rank -> workers -> prefetched

Every rank computes the same batches and takes its share of their sequences. The state is the position after the last
batch returned: prefetched batches are collated again. It is valid for any number of ranks and workers.

Workers are processes, not threads: a quarter of a sample's time is Python (chat template, lists of tokens), which the
interpreter lock would serialise, also with the trainer's own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from saccade.data.bad_samples import BadSample, BadSampleLog
from saccade.data.batch_sampler import BatchSampler, BatchSpec, Position, SampleRef
from saccade.data.collate import CollateResult, Collator, PackedSequence
from saccade.data.config import StreamConfig
from saccade.data.prefetch import Prefetcher
from saccade.data.sources import IndexedSource, OnProgress, Shards, open_sources
from saccade.data.workers import CollatorPool


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch."""

    number: int
    sequences: list[PackedSequence]
    """This rank's packed sequences. A sequence whose samples are all bad is empty, but present."""
    sequences_per_rank: list[int]
    """Number of sequences of every rank; they differ by one at most."""
    bad: list[BadSample]
    """Samples of this rank that were skipped."""
    state: dict[str, Any]
    """State of the stream after this batch."""

    @property
    def num_sequences(self) -> int:
        """Packed sequences over all ranks."""
        return sum(self.sequences_per_rank)

    @property
    def max_sequences_per_rank(self) -> int:
        """Maximum number of sequences of any rank."""
        return max(self.sequences_per_rank)

    @property
    def sample_ids(self) -> list[str]:
        """source/shard/key of every sample in this rank's sequences."""
        return [sample_id for sequence in self.sequences for sample_id in sequence.sample_ids]


def open_stream(
    shards: Shards,
    config: StreamConfig | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> Stream:
    """Open a stream of packed batches, tokenised and preprocessed for the model in `checkpoint`.

    `options` are fields of `StreamConfig`, in place of a config or replacing some of its fields; `checkpoint` and
    `max_seq_len` are required.

    The stream ends after `num_epochs` passes (sources without weights) or `num_samples` samples, else never. Without
    weights, all samples of an epoch come before the first of the next; each epoch of a sample with several captions
    shows the next one.

    `state` resumes after the batch that had it, on any number of ranks. `max_seq_len`, `max_patches`,
    `global_batch_size` and `num_epochs` may differ from those it was saved with; data, order and `packing_buffer_size`
    must be the same.

    On first use the index and the lengths of a folder are built by `num_workers` processes: open the stream on one rank
    before the others, or run `saccade data measure` before the job.
    """
    config = StreamConfig(**options) if config is None else dataclasses.replace(config, **options)
    sources = open_sources(
        shards,
        checkpoint=config.checkpoint,
        pairs=config.pairs,
        num_workers=max(config.num_workers, 1),
        on_progress=on_progress,
        storage=config.storage,
    )
    stream = Stream(sources, config, state)
    if config.rank == 0:
        for source in sources:
            source.log_contents()
    return stream


class Stream:
    """An iterator over batches. Close it, or drop the last reference, and its processes end."""

    def __init__(self, sources: Sequence[IndexedSource], config: StreamConfig, state: Mapping[str, Any] | None) -> None:
        self.sources, self.config = sources, config
        sampler = BatchSampler(sources, config)
        position = Position() if state is None else sampler.restore(state)
        self._state = sampler.save(position)
        self._bad_samples = BadSampleLog(config.max_bad_share, config.bad_log)
        self._pool = CollatorPool(sources, config) if config.num_workers else None
        collate = self._pool.collate if self._pool else lambda sequences: map(Collator(sources, config).make, sequences)
        batches = _RankBatches(sampler, sources, config).read(position, collate)
        self._batches = Prefetcher(batches, config.prefetch, self._pool.close) if self._pool else batches
        self._finalizer = weakref.finalize(self, self._batches.close)

    @property
    def source_names(self) -> list[str]:
        """The names of the sources, in the order of `PackedSequence.source_of_conversation`."""
        return [source.name for source in self.sources]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
            self._bad_samples.add(batch.bad, num_good=len(batch.sample_ids))
        except Exception:
            self.close()
            raise
        self._state = batch.state
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch returned, under 200 bytes as JSON. For `open_stream(state=...)`."""
        return dict(self._state)

    @property
    def worker_pids(self) -> list[int]:
        """The worker processes."""
        return self._pool.pids if self._pool else []

    def close(self) -> None:
        """Stop the workers. A closed stream returns no more batches; its state stays."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _RankBatches:
    """One rank's share of the batches."""

    def __init__(self, sampler: BatchSampler, sources: Sequence[IndexedSource], config: StreamConfig) -> None:
        self._sampler, self._sources, self._config = sampler, sources, config

    def read(
        self, position: Position, collate: Callable[[Iterable[Sequence[SampleRef]]], Iterable[CollateResult]]
    ) -> Generator[Batch]:
        """The batches from `position`.

        Batches are sampled as `collate` consumes sequences, so it decides how far ahead.
        """
        rank = self._config.rank
        sampled: deque[tuple[BatchSpec, list[int]]] = deque()

        def sequences() -> Iterator[Sequence[SampleRef]]:
            for spec in self._sampler.batches(position):
                ranks = spec.per_rank(self._config.num_ranks)
                sampled.append((spec, [len(sequences) for sequences in ranks]))
                yield from (sequence.samples for sequence in ranks[rank])

        results: list[CollateResult] = []
        for result in collate(sequences()):
            results.append(result)
            del result  # so that its memory is free when the trainer drops it, not when the next one arrives
            if len(results) == sampled[0][1][rank]:
                yield self._finish(*sampled.popleft(), results)
        if sampled:  # the last batch may have no sequence for this rank
            yield self._finish(*sampled.popleft(), results)

    def _finish(self, spec: BatchSpec, sequences_per_rank: list[int], results: list[CollateResult]) -> Batch:
        """The batch of these sequences; empties the list, which must not keep their memory."""
        bad = self._too_large(spec) + [bad for result in results for bad in result.bad]
        made = [result.sequence for result in results]
        results.clear()
        return Batch(spec.number, made, sequences_per_rank, bad, self._sampler.save(spec.after))

    def _too_large(self, spec: BatchSpec) -> list[BadSample]:
        """This rank's share of the samples that exceed the limits of a packed sequence."""
        config = self._config
        limits = f"max_seq_len {config.max_seq_len} or max_patches {config.patch_limit}"
        return [
            BadSample(
                self._sources[ref.source].sample_id(ref.shard, ref.kept_row),
                f"{ref.tokens} tokens and {ref.patches} patches, over {limits}",
            )
            for ref in spec.too_large[config.rank :: config.num_ranks]
        ]
