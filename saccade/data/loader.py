"""The stream a trainer reads: global batches of packed sequences, in an order that is a function of a few integers.

    sources -> index and lengths (built on first use) -> batch sampler -> this rank's sequences, collated by workers -> prefetched batches

Every rank computes the same batches and takes its share of their sequences. The state is the position after the last batch
returned: prefetched batches are collated again. It is valid for any number of ranks and workers.

Workers are processes, not threads: a quarter of a sample's time is Python (chat template, lists of tokens), which the interpreter
lock serialises, also with the trainer's own. Two workers on two cores gave 424 images of 512 px per second, 13 packed sequences of
16,384 tokens, two threads 313; beside a trainer that is busy in Python 413 and 291.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, get_args

from saccade.data.augment import AugmentConfig
from saccade.data.batch_sampler import BatchSampler, BatchSpec, Position, SampleRef
from saccade.data.collate import (
    BadSample,
    CollateResult,
    Collator,
    CollatorConfig,
    CollatorSource,
    PackedSequence,
    sample_id,
)
from saccade.data.index import ShardIndex, open_index
from saccade.data.index_files import ShardProgress
from saccade.data.lengths import Lengths, Measurer
from saccade.data.order import Ints
from saccade.data.sample import TextRules
from saccade.data.storage import StorageConfig
from saccade.data.workers import CollatorPool
from saccade.errors import ConfigError, DataError
from saccade.processor.processor import ResizeName

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, ShardProgress], None]
"""Called while something is built: what ("index of coco", "lengths of coco"), and how far it is."""

MIN_BAD = 10
"""Fewer bad samples than this never stop a stream, whatever their share."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One shard folder of a mixture."""

    path: str | Path
    """Folder, glob, braces or one tar; local, or a URL for fsspec."""
    weight: float | None = None
    """Share of the samples, relative to the other sources'; None for all sources: in proportion to their sizes."""
    rules: TextRules = field(default_factory=TextRules)
    """How its text becomes conversations."""
    name: str | None = None
    """In sample ids and logs, unique in a stream; None: the folder's name."""
    pairs: bool = False
    """Whether a sample is a preference pair: its chosen and its rejected conversation follow each other in a packed sequence."""


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


@dataclass
class StreamStats:
    """What this rank has received since the stream was opened."""

    batches: int = 0
    sequences: int = 0
    samples: int = 0
    tokens: int = 0
    patches: int = 0
    bytes_read: int = 0
    bad_samples: int = 0
    wait_s: float = 0.0
    """Time spent in `next`."""


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
    state: Mapping[str, Any] | None = None,
    resize: ResizeName = "torch",
    augment: AugmentConfig | None = None,
    token_dropout: float = 0.0,
    num_workers: int = 2,
    prefetch: int = 2,
    max_bad_share: float = 0.01,
    bad_log: str | Path | None = None,
    on_progress: OnProgress | None = None,
    storage: StorageConfig | None = None,
    **unknown: object,
) -> Stream:
    """Open a stream of packed batches from shard folders, tokenised and preprocessed for the model in `checkpoint`.

    A packed sequence has at most `max_seq_len` tokens and `max_patches` patches (None: as many as the tokens allow); a batch has
    `global_batch_size` sequences over all ranks. The stream ends after `num_epochs` passes (sources without weights) or
    `num_samples` samples, else never. Without weights, all samples of an epoch come before the first of the next; each epoch of
    a sample with several captions shows the next one. `window_shards` are shuffled together, at most `packing_buffer_size` samples
    packed together.

    `state` resumes after the batch that had it, on any number of ranks. `max_seq_len`, `max_patches`, `global_batch_size` and
    `num_epochs` may differ from those it was saved with; data, order and `packing_buffer_size` must be the same.

    `resize` "torch" is within 2/255 of "pillow", which gives Hugging Face's pixels, at less than half of the cost of an image.
    `augment` changes images and `token_dropout` tokens of answers at random, as a function of `seed`, sample and epoch alone. `num_workers`
    processes collate sequences, 0 does it in this process; `prefetch` batches are kept ready. On first use the index and the lengths of a
    folder are built by `num_workers` processes: open the stream on one rank before the others, or run `saccade data measure` before the job.

    Bad samples (damaged, over a limit) are skipped and written to `bad_log` as JSON lines, each once. The stream stops
    when there are at least 10 of them and their share exceeds `max_bad_share`, counted by each rank since it opened the
    stream. Storage that fails is not a bad sample: workers retry for `storage.max_wait_s`, then the stream raises
    `StorageError`; resume from its state.
    """
    _refuse_unknown(unknown)
    _check_settings(rank, num_ranks, global_batch_size, num_workers, prefetch, max_bad_share, resize)
    storage = storage or StorageConfig()
    sources = [
        IndexedSource.open(source, str(checkpoint), max(num_workers, 1), on_progress, storage)
        for source in _as_sources(shards)
    ]
    sampler = BatchSampler(
        sources,
        seed=seed,
        max_seq_len=max_seq_len,
        max_patches=_MAX_PATCHES_PER_TOKEN * max_seq_len if max_patches is None else max_patches,
        global_batch_size=global_batch_size,
        window_shards=window_shards,
        packing_buffer_size=packing_buffer_size,
        num_epochs=num_epochs,
        num_samples=num_samples,
    )
    config = CollatorConfig(
        checkpoint=str(checkpoint),
        resize=resize,
        sources=tuple(
            CollatorSource(
                name=s.name, path=s.index.path, fingerprint=s.index.fingerprint, rules=s.rules, pairs=s.pairs
            )
            for s in sources
        ),
        storage=storage,
        augment=augment,
        token_dropout=token_dropout,
        seed=seed,
    )
    position = Position() if state is None else sampler.restore(state)
    if rank == 0:
        for source in sources:
            source.log_contents()
    bad_samples = _BadSampleLog(max_bad_share, None if bad_log is None else Path(bad_log))
    return Stream(_RankShare(sampler, sources, rank, num_ranks), position, config, num_workers, prefetch, bad_samples)


def measure_lengths(
    shards: str | Path | Source | Sequence[str | Path | Source],
    *,
    checkpoint: str | Path,
    num_workers: int | None = None,
    on_progress: OnProgress | None = None,
    storage: StorageConfig | None = None,
) -> list[IndexedSource]:
    """Build the index and the lengths that `open_stream` needs, ahead of the job; what is there already is kept.

    `num_workers` None is one process per core for large folders. Several machines may measure the same folder at once: each takes
    the shards that are not measured yet.
    """
    config = storage or StorageConfig()
    return [
        IndexedSource.open(source, str(checkpoint), num_workers, on_progress, config) for source in _as_sources(shards)
    ]


_MAX_PATCHES_PER_TOKEN = 64
"""More than any model merges into one token, so that it never binds."""


class Stream:
    """An iterator over batches. Close it, or drop the last reference, and its processes end."""

    def __init__(
        self,
        share: _RankShare,
        position: Position,
        config: CollatorConfig,
        num_workers: int,
        prefetch: int,
        bad_samples: _BadSampleLog,
    ) -> None:
        self.config = config
        self.source_names = [source.name for source in config.sources]
        self._state = share.sampler.save(position)
        self._stats = StreamStats()
        self._bad_samples = bad_samples
        self._pool = CollatorPool(config, num_workers, share.sample_id) if num_workers else None
        make = self._pool.collate if self._pool else lambda sequences: map(Collator(config).make, sequences)
        batches = _batches(share, position, make)
        self._batches = _Prefetcher(batches, prefetch, self._pool.close) if self._pool else batches
        self._finalizer = weakref.finalize(self, self._batches.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        try:
            batch, num_bytes = next(self._batches)
            self._bad_samples.add(batch.bad, num_good=len(batch.sample_ids))
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
        stats.tokens += sum(sequence.inputs.num_tokens for sequence in batch.sequences)
        stats.patches += sum(len(sequence.inputs.patches) for sequence in batch.sequences)
        stats.bytes_read += num_bytes
        stats.bad_samples += len(batch.bad)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch returned, under 200 bytes as JSON. For `open_stream(state=...)`."""
        return dict(self._state)

    def stats(self) -> StreamStats:
        """Counts of this rank since the stream was opened."""
        return StreamStats(**asdict(self._stats))

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


def _as_sources(shards: str | Path | Source | Sequence[str | Path | Source]) -> list[Source]:
    several = [shards] if isinstance(shards, str | Path | Source) else list(shards)
    return [source if isinstance(source, Source) else Source(path=source) for source in several]


# ------------------------------------------------------------------ sources


@dataclass(frozen=True)
class IndexedSource:
    """A source with its index open and its lengths measured, as the batch sampler needs it."""

    name: str
    weight: float | None
    rules: TextRules
    index: ShardIndex
    measured: Lengths
    num_measured: int
    """Shards that were measured when it was opened."""
    pairs: bool = False

    @staticmethod
    def open(
        source: Source,
        checkpoint: str,
        num_workers: int | None,
        on_progress: OnProgress | None,
        storage: StorageConfig,
    ) -> IndexedSource:
        """Open the index and the lengths; missing ones are built."""

        def report(what: str) -> Callable[[ShardProgress], None] | None:
            return on_progress and (lambda progress: on_progress(f"{what} of {source.name or source.path}", progress))

        index = open_index(source.path, num_workers=num_workers, on_progress=report("index"), config=storage)
        measurer = Measurer(checkpoint, source.rules, source.pairs)
        measured = Lengths(index, measurer.fingerprint)
        num_measured = measured.build(measurer, num_workers=num_workers, on_progress=report("lengths"))
        name = source.name or index.source
        if "/" in name or not name:
            raise ConfigError(f"{name!r} cannot be a source's name: sample ids are source/shard/key")
        return IndexedSource(name, source.weight, source.rules, index, measured, num_measured, source.pairs)

    @property
    def sizes(self) -> Ints:
        """Kept samples of each shard."""
        return self.index.kept_sizes

    @property
    def fingerprint(self) -> str:
        """Changes with the shards, the curation decisions, and the lengths."""
        decisions = hashlib.sha256(json.dumps(self.index.summary(), sort_keys=True).encode()).hexdigest()
        return f"{self.index.fingerprint}-{decisions}-{self.measured.fingerprint}"

    def lengths(self, shard: int, kept_rows: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Tokens and patches; 0 for samples that could not be measured, which the collator reports as bad."""
        rows = self.index.kept(shard)[kept_rows]
        tokens, patches = self.measured.of_shard(shard)
        return tokens.select(rows, epochs), patches[rows].astype("int64")

    def log_contents(self) -> None:
        """Log how many samples the source has, and what is missing: the stream's opening line."""
        index = self.index
        num_kept, num_errors = int(self.sizes.sum()), sum(entry.num_errors for entry in index.entries)
        parts = [f"{num_kept:,} of {len(index):,} samples in {len(index.shards):,} shards"]
        if num_errors:
            parts.append(f"{num_errors:,} unusable")
        if damaged := index.damaged:
            names = ", ".join(list(damaged)[:3]) + (", ..." if len(damaged) > 3 else "")
            parts.append(f"{len(damaged)} damaged shards ({names}), {index.lost_bytes:,} bytes lost")
        logger.log(logging.WARNING if damaged else logging.INFO, "source %s: %s", self.name, "; ".join(parts))


# ------------------------------------------------------------------ bad samples


_NUM_NAMED = 5
"""Bad samples named in the error that stops a stream."""


class _BadSampleLog:
    """Writes bad samples to a file, counts them, and stops the stream when there are too many."""

    def __init__(self, max_share: float, path: Path | None) -> None:
        """All are appended to `path` as JSON lines, each once; ranks may share it."""
        self._max_share, self._path = max_share, path
        self._num_bad, self._num_good = 0, 0
        self._first: list[BadSample] = []
        self._listed: set[bytes] = set()
        self._num_read = 0

    def add(self, bad: Sequence[BadSample], num_good: int) -> None:
        """Add one batch. Raises `DataError` when there are too many bad samples."""
        self._num_good += num_good
        if not bad:
            return
        if not self._num_bad:
            logger.warning("bad sample %s is skipped: %s. %s", bad[0].sample_id, bad[0].reason, self._where)
        self._num_bad += len(bad)
        self._first += bad[: _NUM_NAMED - len(self._first)]
        if self._path:
            self._append(bad, self._path)
        if self._num_bad >= MIN_BAD and self._num_bad > self._max_share * (self._num_bad + self._num_good):
            named = "; ".join(f"{sample.sample_id} ({sample.reason})" for sample in self._first)
            raise DataError(
                f"{self._num_bad} of {self._num_bad + self._num_good} samples are bad, over max_bad_share {self._max_share}. "
                f"Repair or remove the shards, or raise the share. {self._where} The first: {named}"
            )

    def _append(self, bad: Sequence[BadSample], path: Path) -> None:
        """Write the lines that the file does not have yet, from an earlier epoch, another rank or an earlier stream."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(self._num_read)
            read = file.read()
            self._num_read += len(read)
            self._listed.update(read.splitlines())
            lines = dict.fromkeys(json.dumps(asdict(sample)).encode() for sample in bad)
            new = [line for line in lines if line not in self._listed]
            if new:
                is_cut = read and not read.endswith(b"\n")
                file.write(b"\n" * bool(is_cut) + b"".join(line + b"\n" for line in new))

    @property
    def _where(self) -> str:
        return f"All bad samples are listed in {self._path}." if self._path else "Set bad_log to a file to list all."


# ------------------------------------------------------------------ batches


@dataclass(frozen=True)
class _RankShare:
    """One rank's share of the batches."""

    sampler: BatchSampler
    sources: Sequence[IndexedSource]
    rank: int
    num_ranks: int

    def sample_id(self, ref: SampleRef) -> str:
        source = self.sources[ref.source]
        return sample_id(source.name, source.index, ref)

    def too_large(self, batch: BatchSpec) -> list[BadSample]:
        """This rank's share of the samples that exceed the limits of a packed sequence."""
        limits = f"max_seq_len {self.sampler.max_seq_len} or max_patches {self.sampler.max_patches}"
        return [
            BadSample(self.sample_id(ref), f"{ref.tokens} tokens and {ref.patches} patches, over {limits}")
            for ref in batch.too_large[self.rank :: self.num_ranks]
        ]


def _batches(
    share: _RankShare, position: Position, make: Callable[[Iterable[Sequence[SampleRef]]], Iterable[CollateResult]]
) -> Generator[tuple[Batch, int]]:
    """This rank's batches and the bytes read for each. Batches are sampled as `make` consumes sequences, so it decides how far ahead."""
    sampled: deque[tuple[BatchSpec, list[int]]] = deque()

    def sequences() -> Iterator[Sequence[SampleRef]]:
        for spec in share.sampler.batches(position):
            ranks = spec.per_rank(share.num_ranks)
            sampled.append((spec, [len(sequences) for sequences in ranks]))
            yield from (sequence.samples for sequence in ranks[share.rank])

    def finish() -> tuple[Batch, int]:
        spec, sequences_per_rank = sampled.popleft()
        bad = share.too_large(spec) + [bad for result in results for bad in result.bad]
        made = [result.sequence for result in results]
        batch = Batch(spec.number, made, sequences_per_rank, bad, share.sampler.save(spec.after))
        num_bytes = sum(result.num_bytes for result in results)
        results.clear()
        return batch, num_bytes

    results: list[CollateResult] = []
    for result in make(sequences()):
        results.append(result)
        del result  # so that its memory is free when the trainer drops it, not when the next one arrives
        if len(results) == sampled[0][1][share.rank]:
            yield finish()
    if sampled:  # the last batch may have no sequence for this rank
        yield finish()


T = TypeVar("T")


class _Prefetcher(Generic[T]):
    """Runs a generator in a thread, a few items ahead. Read by one thread; starts with the first `next`."""

    def __init__(self, items: Generator[T], num_ahead: int, cancel: Callable[[], None]) -> None:
        """`cancel`, called from another thread, makes `items` raise where it waits."""
        self._items, self._cancel = items, cancel
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(num_ahead)
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __next__(self) -> T:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="saccade stream", daemon=True)
            self._thread.start()
        if self._is_closed.is_set():
            raise StopIteration
        item, error = self._ready.get()
        if item is None:
            raise error or StopIteration
        return item

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._ready.put((item, None))
                del item  # it belongs to the reader now
                if self._is_closed.is_set():
                    break
        except BaseException as raised:  # raised again in the reader
            error = raised
        self._items.close()
        self._ready.put((None, error))

    def close(self) -> None:
        """Stop the thread; items that are ready are dropped."""
        self._is_closed.set()
        while self._thread and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._cancel()
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(timeout=0.01)
