"""Lengths of samples in tokens and patches: how they are measured, where they are stored, and how they are read.

    sample -> conversations of its text variants, sizes of its images -> tokens of each variant, patches -> Parquet file

Lengths depend on the processor and on the rules that turn text into conversations; a fingerprint of both names their
folder, `index/lengths-FINGERPRINT`. Text is tokenised, no pixel is decoded, and the collator must find exactly these
lengths.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from saccade.data.header import upright_size
from saccade.data.index import ShardIndex
from saccade.data.index_files import ShardProgress, parquet_name
from saccade.data.lru_cache import LRUCache
from saccade.data.order import Ints
from saccade.data.parallel import in_processes, workers_for
from saccade.data.sample import Sample, TextRules, images, training_conversations
from saccade.errors import ConfigError, UserError
from saccade.processor.image import MediaLimits

if TYPE_CHECKING:
    from saccade.processor.processor import Processor

_VERSION = 1
"""Raised when the same sample is measured differently: lengths of an older version are then measured again."""

_SCHEMA = pa.schema(
    [
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("patches", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
    ]
)

Measure = Callable[[Sample], tuple[Sequence[int], int]]
"""Tokens of each text variant of a sample, and its patches; raises `UserError` for a sample without a length.
Picklable."""


# ------------------------------------------------------------------ one sample


def measure_sample(
    sample: Sample, processor: Processor, rules: TextRules, *, pairs: bool = False
) -> tuple[list[int], int]:
    """Tokens of each text variant, and patches, as the collator finds them."""
    sizes = [upright_size(data) for data in images(sample)]
    lengths = [
        [processor.measure(messages, sizes) for messages in together]
        for together in training_conversations(sample, rules, pairs=pairs)
    ]
    return [sum(tokens for tokens, _ in together) for together in lengths], sum(patches for _, patches in lengths[0])


@dataclass(frozen=True)
class Measurer:
    """`measure_sample` for one checkpoint and one set of rules. Picklable."""

    checkpoint: str
    rules: TextRules
    pairs: bool = False

    def __call__(self, sample: Sample) -> tuple[list[int], int]:
        """Tokens of each text variant, and patches."""
        return measure_sample(sample, _load_processor(self.checkpoint), self.rules, pairs=self.pairs)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the lengths: equal for equal tokenizer, template, image settings and rules."""
        from saccade.processor.processor import Processor

        settings: tuple[object, ...] = (
            _VERSION,
            Processor.fingerprint(self.checkpoint),
            self.rules,
            MediaLimits(),
            *(["pairs"] if self.pairs else []),
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def _load_processor(checkpoint: str) -> Processor:
    from saccade.processor.processor import Processor  # loads torch, which reading lengths does not need

    return Processor.load(checkpoint)


# ------------------------------------------------------------------ a folder


class Ragged:
    """A list of numbers per row, stored flat: `ragged[row]`, `len`, and `select` for many rows at once."""

    def __init__(self, values: NDArray[np.int32], starts: NDArray[Any]) -> None:
        self._values, self._starts = values, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self._values[self._starts[row] : self._starts[row + 1]]

    def counts(self, rows: NDArray[Any]) -> Ints:
        """Length of each row's list."""
        counts: Ints = (self._starts[rows + 1] - self._starts[rows]).astype(np.int64)
        return counts

    def select(self, rows: NDArray[Any], choices: NDArray[Any] | int) -> Ints:
        """One number of each row, `choices` modulo the list's length; 0 for an empty list."""
        counts = self.counts(rows)
        at = self._starts[rows] + choices % np.maximum(counts, 1)
        selected = np.zeros(len(rows), dtype=np.int64)
        selected[counts > 0] = self._values[at[counts > 0]]
        return selected


def lengths_folder(fingerprint: str) -> str:
    """The folder of lengths in an index."""
    return f"lengths-{fingerprint}"


class Lengths:
    """The lengths of a shard folder under one fingerprint. Safe with threads; the shards read last are cached."""

    def __init__(self, index: ShardIndex, fingerprint: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", fingerprint):
            raise ConfigError(
                f"{fingerprint!r} cannot be a fingerprint: it names a folder. Use letters, digits, - and _"
            )
        self.fingerprint = fingerprint
        self._index, self._folder = index, lengths_folder(fingerprint)
        self._shards: LRUCache[tuple[Ragged, NDArray[np.int32]]] = LRUCache(64)

    def of_shard(self, shard: int) -> tuple[Ragged, NDArray[np.int32]]:
        """Tokens of each text variant, and patches, by row; a row that cannot be used has no variant and no patches."""
        return self._shards.get(shard, lambda: self._read(shard))

    def _read(self, shard: int) -> tuple[Ragged, NDArray[np.int32]]:
        name = f"{self._folder}/{parquet_name(self._index.shards[shard])}"
        table = self._index.read_file(name, shard, None, "saccade data measure")
        tokens = table["tokens"].combine_chunks()
        return Ragged(tokens.values.to_numpy(), tokens.offsets.to_numpy()), table["patches"].to_numpy()

    def missing(self) -> list[int]:
        """Shards that are not measured."""
        return self._index.shards_without(self._folder)

    def build(
        self,
        measure: Measure,
        *,
        num_workers: int | None = None,
        on_progress: Callable[[ShardProgress], None] | None = None,
    ) -> int:
        """Measure every sample of the shards that have no lengths yet, in parallel.

        Returns the number of shards measured.

        An interrupted build resumes shard by shard, and several machines may measure one folder at once: each takes
        shards in random order and skips those that another one has finished. `num_workers` None is one process per core
        for large folders, else this process.
        """
        index = self._index
        # Checking the files of 10,000 shards takes a second; this file says that they were all there.
        mark = index.folder / self._folder / f".complete-{index.fingerprint}"
        if mark.exists():
            return 0
        missing, num_measured = self.missing(), 0
        absent = set(missing)
        done = ShardProgress.of([e for shard, e in enumerate(index.entries) if shard not in absent], len(index.shards))
        num_workers = num_workers or workers_for(sum(index.entries[shard].num_bytes for shard in missing))
        random.shuffle(missing)
        for shard, is_measured in in_processes(_measure_shard, (index, measure, self._folder), missing, num_workers):
            num_measured += is_measured
            done = done.plus(index.entries[shard])
            if on_progress:
                on_progress(done)
        mark.parent.mkdir(parents=True, exist_ok=True)  # shipped lengths may be the only ones
        mark.touch()
        return num_measured


def _measure_shard(shared: tuple[ShardIndex, Measure, str], shard: int) -> tuple[int, bool]:
    """Write the lengths of one shard, unless another machine has; returns whether it was measured."""
    index, measure, folder = shared
    return shard, measure_shard(index, measure, folder, shard)


def measure_shard(index: ShardIndex, measure: Measure, folder: str, shard: int) -> bool:
    """Write the lengths of one shard into a folder of the index, unless they are there; returns whether it did."""
    entry = index.entries[shard]
    target = f"{folder}/{parquet_name(entry.name)}"
    note = index.location.read_note(target)
    if note is not None and (note.get("bytes"), note["num_rows"]) == (entry.num_bytes, entry.num_samples):
        return False
    errors = index.read(shard, ["error"])["error"].to_pylist()
    rows = [_measure_row(index, measure, shard, row, error) for row, error in enumerate(errors)]
    table = pa.Table.from_pylist(rows, _SCHEMA)
    index.location.write_table(target, table, {"name": entry.name, "bytes": entry.num_bytes})
    return True


def _measure_row(index: ShardIndex, measure: Measure, shard: int, row: int, error: str | None) -> dict[str, Any]:
    """One row; samples with an error in the index are not read."""
    if error is None:
        sample = index.read_sample(shard, row)
        try:
            tokens, patches = measure(sample)
            return {"tokens": list(tokens), "patches": patches, "error": None}
        except UserError as reason:
            error = str(reason)
    return {"tokens": [], "patches": 0, "error": error}
