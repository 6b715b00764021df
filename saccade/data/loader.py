"""The stream a trainer reads: global batches of packed sequences, in an order that is a function of a few integers.

    sources -> index, lengths (built on first use) -> batch sampler -> sequences of this rank -> workers -> prefetched

Every rank sees the same batches and takes its share of their sequences (`rank_batches.py`). The state is the position
after the last batch returned: prefetched batches are collated again. It is valid for any number of ranks, nodes and
workers.

Workers are processes, not threads: a quarter of a sample's time is Python (chat template, lists of tokens), which the
interpreter lock would serialise, also with the trainer's own.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from saccade.data.bad_samples import BadSample, BadSampleLog
from saccade.data.batch_sampler import BatchSampler, Position
from saccade.data.collate import CollateResult, Collator, PackedSequence
from saccade.data.config import StreamConfig
from saccade.data.packing_buffer import BufferId, PackingBuffer, SequenceRefs
from saccade.data.prefetch import Prefetcher
from saccade.data.rank_batches import Exchange, RankBatch, RankBatches
from saccade.data.sources import IndexedSource, OnProgress, Shards, open_sources
from saccade.data.storage import StorageCounters, storage
from saccade.data.workers import CollatorPool


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch."""

    number: int
    sequences: list[PackedSequence]
    """This rank's packed sequences. A sequence whose samples are all bad is empty, but present."""
    num_sequences: int
    """Packed sequences over all ranks, which have equal numbers of them, or one more."""
    max_sequences_per_rank: int
    """Maximum number of sequences of any rank."""
    bad: list[BadSample]
    """Samples of this rank that were skipped."""
    state: dict[str, Any]
    """State of the stream after this batch."""

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
    exchange: Exchange | None = None,
    check_files: bool = True,
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

    With `num_lanes` each rank plans its own lanes and gets those of others through `exchange`, a store that all ranks
    of the job reach; without one every rank plans all lanes.

    With `check_files` False the shards are not listed, because another process of the job has listed them; compare the
    streams' `fingerprint`.

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
        check_files=check_files,
    )
    stream = Stream(sources, config, state, exchange)
    if config.rank == 0:
        for source in sources:
            source.log_contents()
    return stream


class Stream:
    """An iterator over batches. Close it, or drop the last reference, and its processes end."""

    def __init__(
        self,
        sources: Sequence[IndexedSource],
        config: StreamConfig,
        state: Mapping[str, Any] | None,
        exchange: Exchange | None = None,
    ) -> None:
        self.sources, self.config = sources, config
        sampler = BatchSampler(sources, config)
        self.fingerprint = sampler.fingerprint
        """Equal for streams with the same samples in the same order."""
        position = Position() if state is None else sampler.restore(state)
        self._state = sampler.save(position)
        self._bad_samples = BadSampleLog(config.max_bad_share, config.bad_log)
        self._pool = CollatorPool(sources, config) if config.num_workers else None
        if self._pool:
            plans = RankBatches(sampler, self._pool.plan, exchange, plans_ahead=True)
            batches = _Reader(sampler, sources, config).read(plans.read(position), self._pool.collate)
            self._batches: Prefetcher[Batch] | Generator[Batch] = Prefetcher(
                batches, config.prefetch, functools.partial(_close_both, plans, self._pool)
            )
        else:
            plans = RankBatches(sampler, functools.partial(_plan_here, sampler), exchange)
            make = functools.partial(_collate_here, Collator(sources, config))
            self._batches = _Reader(sampler, sources, config).read(plans.read(position), functools.partial(map, make))
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
    def storage_counters(self) -> StorageCounters:
        """What this stream's processes have read of remote files: bytes, requests, hits of the cache, waits."""
        return self._pool.storage_counters if self._pool else storage(self.config.storage).counters

    @property
    def cached_bytes(self) -> int:
        """Bytes of this machine's cache of remote shards."""
        return storage(self.config.storage).cached_bytes

    @property
    def num_taken_down(self) -> int:
        """Samples that were skipped because they were taken down."""
        return self._bad_samples.num_taken_down

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


def _close_both(plans: RankBatches, pool: CollatorPool) -> None:
    plans.close()
    pool.close()


def _plan_here(sampler: BatchSampler, key: BufferId) -> Future[PackingBuffer]:
    planned: Future[PackingBuffer] = Future()
    planned.set_result(sampler.packing_buffer(*key))
    return planned


def _collate_here(collator: Collator, sequence: SequenceRefs) -> CollateResult:
    return collator.make(sequence.samples, is_own=sequence.is_own)


class _Reader:
    """Turn the sequences of this rank into batches."""

    def __init__(self, sampler: BatchSampler, sources: Sequence[IndexedSource], config: StreamConfig) -> None:
        self._sampler, self._sources, self._config = sampler, sources, config

    def read(
        self,
        shares: Iterable[RankBatch],
        collate: Callable[[Iterable[SequenceRefs]], Iterable[CollateResult]],
    ) -> Generator[Batch]:
        """The batches of these shares, which are taken as `collate` consumes sequences: it decides how far ahead."""
        taken: deque[RankBatch] = deque()

        def sequences() -> Iterator[SequenceRefs]:
            for share in shares:
                taken.append(share)
                yield from map(SequenceRefs, (one.samples for one in share.sequences), share.is_own)

        results: list[CollateResult] = []
        for result in collate(sequences()):
            while not taken[0].sequences:  # a short batch may have no sequence for this rank
                yield self._finish(taken.popleft(), [])
            results.append(result)
            del result  # so that its memory is free when the trainer drops it, not when the next one arrives
            if len(results) == len(taken[0].sequences):
                yield self._finish(taken.popleft(), results)
        while taken:
            yield self._finish(taken.popleft(), results)

    def _finish(self, share: RankBatch, results: list[CollateResult]) -> Batch:
        """The batch of these sequences; empties the list, which must not keep their memory."""
        bad = self._too_large(share) + [bad for result in results for bad in result.bad]
        made = [result.sequence for result in results]
        results.clear()
        most = -(-share.num_sequences // self._config.num_ranks)
        return Batch(share.number, made, share.num_sequences, most, bad, self._sampler.save(share.after))

    def _too_large(self, share: RankBatch) -> list[BadSample]:
        """This rank's part of the samples that exceed the limits of a packed sequence."""
        config = self._config
        limits = f"max_seq_len {config.max_seq_len} or max_patches {config.patch_limit}"
        return [
            BadSample(
                self._sources[ref.source].sample_id(ref.shard, ref.kept_row),
                f"{ref.tokens} tokens and {ref.patches} patches, over {limits}",
            )
            for ref in share.too_large
        ]
