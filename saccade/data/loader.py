"""The stream a trainer reads: global batches of packed rows, in an order that is a function of a few integers.

    sources -> index and lengths (built on first use) -> plan -> this rank's rows, made by workers -> batches, a few ahead

Every rank plans the same batches and takes its share of their rows. The state is the position after the last batch handed out:
prefetched ones are simply made again. It holds for any number of ranks and workers.

Workers are processes, not threads: a quarter of a sample's time is Python (chat template, lists of tokens), which threads do one
after the other, and against the trainer's own. Two workers on two cores gave 424 pictures of 512 px a second, 13 rows of 16,384
tokens, two threads 313; with a trainer that is busy in Python 413 and 291.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, get_args

from saccade.data.ahead import Ahead
from saccade.data.bad_samples import BadSample, BadSampleLog
from saccade.data.batch_sampler import BatchSampler, BatchSpec, Position, SampleRef
from saccade.data.collate import CollateResult, Collator, CollatorConfig, CollatorSource, PackedSequence, sample_key
from saccade.data.storage import StorageConfig
from saccade.data.stream_source import IndexedSource, OnProgress, Source, listed_sources
from saccade.data.workers import CollatorPool
from saccade.errors import ConfigError
from saccade.processor.processor import ResizeName

__all__ = ["Batch", "Source", "Stream", "StreamStats", "open_stream"]


@dataclass(frozen=True)
class Batch:
    """One global batch, as far as it is this rank's."""

    number: int
    sequences: list[PackedSequence]
    """This rank's rows. They are as many as planned, even where all samples of one are bad and it is empty."""
    sequences_per_rank: list[int]
    """Rows of every rank, for a trainer that keeps ranks in step; they differ by one at most."""
    bad: list[BadSample]
    """Samples of this rank that were left out."""
    state: dict[str, int | str]
    """Where the stream goes on after this batch."""

    @property
    def num_sequences(self) -> int:
        """Rows over all ranks."""
        return sum(self.sequences_per_rank)

    @property
    def max_sequences_per_rank(self) -> int:
        """Most rows of any rank."""
        return max(self.sequences_per_rank)

    @property
    def sample_ids(self) -> list[str]:
        """source/shard/key of every sample in this rank's rows."""
        return [sample_id for row in self.sequences for sample_id in row.sample_ids]


@dataclass
class StreamStats:
    """What this rank has been handed since the stream was opened."""

    batches: int = 0
    sequences: int = 0
    samples: int = 0
    tokens: int = 0
    patches: int = 0
    bytes_read: int = 0
    bad_samples: int = 0
    wait_s: float = 0.0
    """Time the trainer stood in `next`."""


def open_stream(
    shards: str | Path | Source | Sequence[str | Path | Source],
    *,
    checkpoint: str | Path,
    max_seq_len: int,
    max_patches: int | None = None,
    global_batch_size: int = 1,
    seed: int = 0,
    num_epochs: int | None = None,
    num_samples: int | None = None,
    window_shards: int = 16,
    packing_buffer_size: int = 4096,
    rank: int = 0,
    num_ranks: int = 1,
    state: Mapping[str, int | str] | None = None,
    resize: ResizeName = "torch",
    num_workers: int = 2,
    prefetch: int = 2,
    max_bad_share: float = 0.01,
    bad_log: str | Path | None = None,
    on_progress: OnProgress | None = None,
    storage: StorageConfig | None = None,
    **unknown: object,
) -> Stream:
    """Batches of packed rows from shard folders, tokenised and cut for the model in `checkpoint`.

    A row has at most `max_seq_len` tokens and `max_patches` patches (None: as many as the tokens allow); a batch has
    `global_batch_size` rows over all ranks. The stream ends after `num_epochs` passes (sources without weights) or `num_samples`
    draws, else never. A sample with several captions shows the next one in each epoch. `window_shards` are shuffled together,
    `packing_buffer_size` packed together.

    `state` goes on after the batch that had it, on any number of ranks; data and all settings named so far must be the same.

    `resize` "torch" is within 2/255 of "pillow", which gives Hugging Face's pixels, at under half of the whole cost of an image.
    `num_workers` processes make rows, 0 makes them in this one; `prefetch` batches are kept ready. Bad samples are left out and
    written to `bad_log` as JSON lines; more than `max_bad_share` of them stop the stream. On first use the index and the lengths
    of a folder are built by `num_workers` processes: let one rank open its stream before the others.
    """
    _refuse_unknown(unknown)
    _check_settings(rank, num_ranks, global_batch_size, num_workers, prefetch, max_bad_share, resize)
    storage = storage or StorageConfig()
    sources = [
        IndexedSource.open(source, str(checkpoint), num_workers, on_progress, storage)
        for source in listed_sources(shards)
    ]
    plan = BatchSampler(
        sources,
        seed=seed,
        max_seq_len=max_seq_len,
        max_patches=_MOST_PATCHES_PER_TOKEN * max_seq_len if max_patches is None else max_patches,
        global_batch_size=global_batch_size,
        window_shards=window_shards,
        packing_buffer_size=packing_buffer_size,
        num_epochs=num_epochs,
        num_samples=num_samples,
    )
    setup = CollatorConfig(
        checkpoint=str(checkpoint),
        resize=resize,
        sources=tuple(
            CollatorSource(name=s.name, path=s.index.path, fingerprint=s.index.fingerprint, rules=s.rules)
            for s in sources
        ),
        storage=storage,
    )
    position = Position() if state is None else plan.restore(state)
    ledger = BadSampleLog(max_bad_share, None if bad_log is None else Path(bad_log))
    return Stream(_Rank(plan, sources, rank, num_ranks), position, setup, num_workers, prefetch, ledger)


_MOST_PATCHES_PER_TOKEN = 64
"""More than any model merges into one token, so that it never binds."""


class Stream:
    """An iterator over batches. Close it, or let it go, and its processes end."""

    def __init__(
        self,
        share: _Rank,
        position: Position,
        setup: CollatorConfig,
        num_workers: int,
        prefetch: int,
        ledger: BadSampleLog,
    ) -> None:
        self.source_names = [source.name for source in setup.sources]
        self._state = share.plan.save(position)
        self._stats = StreamStats()
        self._ledger = ledger
        self._pool = CollatorPool(setup, num_workers, share.name_of) if num_workers else None
        make = self._pool.collate if self._pool else lambda plans: map(Collator(setup).make, plans)
        batches = _batches(share, position, make)
        self._batches = Ahead(batches, prefetch, self._pool.close) if self._pool else batches
        self._finalizer = weakref.finalize(self, self._batches.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        try:
            batch, num_bytes = next(self._batches)
            self._ledger.enter(batch.bad, num_good=len(batch.sample_ids))
        except Exception:
            self.close()
            raise
        self._stats.wait_s += time.perf_counter() - began
        self._count(batch, num_bytes)
        self._state = batch.state
        return batch

    def _count(self, batch: Batch, num_bytes: int) -> None:
        stats = self._stats
        stats.batches += 1
        stats.sequences += len(batch.sequences)
        stats.samples += len(batch.sample_ids)
        stats.tokens += sum(row.inputs.num_tokens for row in batch.sequences)
        stats.patches += sum(len(row.inputs.patches) for row in batch.sequences)
        stats.bytes_read += num_bytes
        stats.bad_samples += len(batch.bad)

    def state_dict(self) -> dict[str, int | str]:
        """Where the stream goes on after the last batch handed out; under 200 bytes as JSON. For `open_stream(state=...)`."""
        return dict(self._state)

    def stats(self) -> StreamStats:
        """Counts of this rank since the stream was opened."""
        return StreamStats(**asdict(self._stats))

    @property
    def worker_pids(self) -> list[int]:
        """The processes that make rows at present."""
        return self._pool.pids if self._pool else []

    def close(self) -> None:
        """End the workers. A closed stream gives no more batches; its state stays."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_RENAMED = {
    "token_budget": "max_seq_len",
    "patch_budget": "max_patches",
    "rows_per_batch": "global_batch_size",
    "block_samples": "packing_buffer_size",
}


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    for name in unknown:
        if name in _RENAMED:
            raise ConfigError(f"open_stream: {name} is now called {_RENAMED[name]}")
        raise TypeError(f"open_stream() got an unexpected keyword argument {name!r}")


def _check_settings(
    rank: int,
    num_ranks: int,
    global_batch_size: int,
    num_workers: int,
    prefetch: int,
    max_bad_share: float,
    resize: str,
) -> None:
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"rank is {rank} of {num_ranks} ranks; it counts from 0")
    if global_batch_size < num_ranks:
        raise ConfigError(
            f"global_batch_size is {global_batch_size} for {num_ranks} ranks: some would have nothing to do. Raise it to {num_ranks}"
        )
    if num_workers < 0 or prefetch < 1:
        raise ConfigError(f"num_workers is {num_workers} and prefetch {prefetch}; at least 0 and 1 are needed")
    if not 0 <= max_bad_share <= 1:
        raise ConfigError(f"max_bad_share is {max_bad_share}, not a share between 0 and 1")
    if resize not in get_args(ResizeName):
        raise ConfigError(f"resize is {resize!r}. Use one of {', '.join(get_args(ResizeName))}")


# ------------------------------------------------------------------ batches


@dataclass(frozen=True)
class _Rank:
    """One rank's share of a plan."""

    plan: BatchSampler
    sources: Sequence[IndexedSource]
    rank: int
    num_ranks: int

    def name_of(self, ref: SampleRef) -> str:
        source = self.sources[ref.source]
        return f"{source.name}/{source.index.shards[ref.shard]}/{sample_key(source.index, ref)}"

    def too_large(self, batch: BatchSpec) -> list[BadSample]:
        """This rank's share of the samples that no row can hold."""
        return [self._too_large(ref) for ref in batch.too_large[self.rank :: self.num_ranks]]

    def _too_large(self, ref: SampleRef) -> BadSample:
        source, shard, key = self.name_of(ref).split("/", 2)
        reason = f"{ref.tokens} tokens and {ref.patches} patches are over the budget of a row"
        return BadSample(source, shard, key, reason)


def _batches(
    share: _Rank, position: Position, make: Callable[[Iterable[Sequence[SampleRef]]], Iterable[CollateResult]]
) -> Generator[tuple[Batch, int]]:
    """This rank's batches and the bytes read for each. Plans are drawn as `make` asks for rows, so it decides how far ahead."""
    planned: deque[tuple[BatchSpec, list[int]]] = deque()

    def plans() -> Iterator[Sequence[SampleRef]]:
        for plan in share.plan.batches(position):
            ranks = plan.per_rank(share.num_ranks)
            planned.append((plan, [len(rows) for rows in ranks]))
            yield from (row.samples for row in ranks[share.rank])

    def finish() -> tuple[Batch, int]:
        plan, sequences_per_rank = planned.popleft()
        bad = share.too_large(plan) + [bad for row in rows for bad in row.bad]
        batch = Batch(plan.number, [row.sequence for row in rows], sequences_per_rank, bad, share.plan.save(plan.after))
        num_bytes = sum(row.num_bytes for row in rows)
        rows.clear()
        return batch, num_bytes

    rows: list[CollateResult] = []
    for row in make(plans()):
        rows.append(row)
        del row  # so that its memory is free when the trainer lets go of it, not when the next one is here
        if len(rows) == planned[0][1][share.rank]:
            yield finish()
    if planned:  # the last batch may have no row for this rank
        yield finish()
