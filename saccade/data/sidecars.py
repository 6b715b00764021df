"""What is known of samples beyond the index, in files of their own with the same rows: lengths and decisions.

Lengths depend on the processor: its fingerprint names their folder. Decisions say which samples are kept; they count from the
moment their summary is there, so that a curation that broke off is noticed and never mistaken for "keep all".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from saccade.data.indexing import read_note, write_table
from saccade.data.parallel import in_processes, workers_for
from saccade.data.places import VERSION, parquet_name, write_json
from saccade.data.sample import Sample
from saccade.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from saccade.data.index import ShardIndex

Ints = NDArray[np.int64]
Measure = Callable[[Sample], tuple[Sequence[int], int]]
"""Tokens of each text variant of a sample, and its patches; a `UserError` says why it has none. Picklable."""

LENGTHS_SCHEMA = pa.schema(
    [
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("patches", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
    ]
)
SUMMARY = "decisions/summary.json"


@dataclass(frozen=True)
class Progress:
    """How far a build has come."""

    num_done: int
    """Shards finished."""
    num_shards: int
    num_samples: int
    """Samples in the finished shards."""
    num_bytes: int
    """Bytes of the finished shards."""


class Ragged:
    """A list of numbers for each row, kept flat: `ragged[row]`, `len`, and `pick` for many rows at once."""

    def __init__(self, values: NDArray[np.int32], starts: NDArray[Any]) -> None:
        self._values, self._starts = values, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self._values[self._starts[row] : self._starts[row + 1]]

    def counts(self, rows: NDArray[Any]) -> Ints:
        """Numbers in each row's list."""
        counts: Ints = (self._starts[rows + 1] - self._starts[rows]).astype(np.int64)
        return counts

    def pick(self, rows: NDArray[Any], choices: NDArray[Any] | int) -> Ints:
        """One number of each row, the choice taken modulo the list's length; 0 for an empty list."""
        counts = self.counts(rows)
        places = self._starts[rows] + choices % np.maximum(counts, 1)
        picked = np.zeros(len(rows), dtype=np.int64)
        picked[counts > 0] = self._values[places[counts > 0]]
        return picked


# ------------------------------------------------------------------ lengths


def lengths_folder(fingerprint: str) -> str:
    """The folder of lengths within the index."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", fingerprint):
        raise ConfigError(f"{fingerprint!r} cannot be a fingerprint: it names a folder. Use letters, digits, - and _")
    return f"lengths-{fingerprint}"


def build_lengths(
    index: ShardIndex,
    measure: Measure,
    fingerprint: str,
    *,
    num_workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> int:
    """Measure every sample of the shards that have no lengths yet, in parallel; the number of shards measured.

    May be stopped at any time and goes on shard by shard. `num_workers` None is one process per core where there is much to
    read, else this one.
    """
    missing = index.missing_lengths(fingerprint)
    num_done = len(index.shards) - len(missing)
    absent = set(missing)
    finished = [entry for shard, entry in enumerate(index.entries) if shard not in absent]
    num_samples, num_bytes = sum(e.num_samples for e in finished), sum(e.num_bytes for e in finished)
    num_workers = num_workers or workers_for(sum(index.entries[shard].num_bytes for shard in missing))
    for shard in in_processes(_measure_shard, (index, measure, fingerprint), missing, num_workers):
        num_done += 1
        num_samples += index.entries[shard].num_samples
        num_bytes += index.entries[shard].num_bytes
        if on_progress:
            on_progress(Progress(num_done, len(index.shards), num_samples, num_bytes))
    return len(missing)


def _measure_shard(shared: tuple[ShardIndex, Measure, str], shard: int) -> int:
    index, measure, fingerprint = shared
    rows = [
        _measured(index, measure, shard, row, error)
        for row, error in enumerate(index.read(shard, ["error"])["error"].to_pylist())
    ]
    entry = index.entries[shard]
    table = pa.Table.from_pylist(rows, LENGTHS_SCHEMA)
    target = index.folder / lengths_folder(fingerprint) / parquet_name(entry.name)
    write_table(target, table, {"name": entry.name, "bytes": entry.num_bytes})
    return shard


def _measured(index: ShardIndex, measure: Measure, shard: int, row: int, error: str | None) -> dict[str, Any]:
    """One row; what the index already refuses is not read."""
    if error is None:
        sample = index.read_sample(shard, row)
        try:
            tokens, patches = measure(sample)
            return {"tokens": list(tokens), "patches": patches, "error": None}
        except UserError as reason:
            error = str(reason)
    return {"tokens": [], "patches": 0, "error": error}


# ------------------------------------------------------------------ decisions


def write_decisions(index: ShardIndex, shard: int, table: pa.Table) -> int:
    """Decide on the samples of one shard; the number kept. Earlier decisions of the folder cease to count.

    `table` has one row per sample: keep (bool), reason (string, null where kept), and any scores.
    """
    entry = index.entries[shard]
    columns = dict(zip(table.schema.names, table.schema.types, strict=True))
    if columns.get("keep") != pa.bool_() or columns.get("reason") != pa.string() or len(table) != entry.num_samples:
        raise DataError(
            f"{entry.name}: decisions are {entry.num_samples} rows with keep (bool) and reason (string), "
            f"not {len(table)} rows with {', '.join(f'{name} ({kind})' for name, kind in columns.items())}"
        )
    (index.folder / SUMMARY).unlink(missing_ok=True)
    is_usable = index.read(shard, ["error"])["error"].is_null()
    num_kept: int = pc.sum(pc.and_(table["keep"], is_usable)).as_py() or 0
    note = {"name": entry.name, "bytes": entry.num_bytes, "kept": num_kept}
    write_table(index.folder / "decisions" / parquet_name(entry.name), table, note)
    index.forget()
    return num_kept


def decided(index: ShardIndex) -> dict[str, int]:
    """Samples kept of each shard that has been decided on, finished or not; shards that changed since are left out."""
    kept = {}
    for entry in index.entries:
        note = read_note(index.folder / "decisions" / parquet_name(entry.name)) or {}
        if note.get("bytes") == entry.num_bytes and "kept" in note:
            kept[entry.name] = int(note["kept"])
    return kept


def finish_decisions(index: ShardIndex, *, settings: Mapping[str, Any], funnel: Mapping[str, int]) -> None:
    """Write the summary, with which the decisions count. Every shard must have been decided on.

    Decisions on other shards of the folder go on counting; settings and funnel are those of the last curation.
    """
    kept = decided(index)
    if missing := [entry.name for entry in index.entries if entry.name not in kept]:
        raise DataError(f"{len(missing)} shards are not decided on: {', '.join(missing[:3])}. Decide on them first")
    sizes = {entry.name: entry.num_bytes for entry in index.entries}
    for path in sorted((index.folder / "decisions").glob("*.parquet")):
        note = read_note(path) or {}
        if "kept" in note and note["name"] not in sizes:
            kept[note["name"]], sizes[note["name"]] = int(note["kept"]), int(note["bytes"])
    summary = {"version": VERSION, "settings": dict(settings), "kept": kept, "bytes": sizes, "funnel": dict(funnel)}
    write_json(index.folder / SUMMARY, summary)
    index.forget()
