"""Write the decisions of a curation: which samples of each shard are kept, and a summary.

The summary makes the decisions valid. It is written last, so that an interrupted curation is detected and never read as
"keep all". `ShardIndex` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from saccade.data.index import SUMMARY, ShardIndex
from saccade.data.index_files import VERSION, note_for, parquet_name
from saccade.data.shared_folder import SharedFolder
from saccade.errors import DataError


def write_decisions(index: ShardIndex, shard: int, table: pa.Table) -> int:
    """Write the decisions on one shard; returns the number of samples kept. Invalidates the summary.

    `table` has one row per sample: keep (bool), reason (string, null if it is kept), and any scores.
    """
    entry = index.entries[shard]
    columns = dict(zip(table.schema.names, table.schema.types, strict=True))
    if columns.get("keep") != pa.bool_() or columns.get("reason") != pa.string() or len(table) != entry.num_samples:
        raise DataError(
            f"{entry.name}: decisions are {entry.num_samples} rows with keep (bool) and reason (string), "
            f"not {len(table)} rows with {', '.join(f'{name} ({kind})' for name, kind in columns.items())}"
        )
    index.location.written.remove(SUMMARY)
    is_usable = index.read(shard, ["error"])["error"].is_null()
    num_kept: int = pc.sum(pc.and_(table["keep"], is_usable)).as_py() or 0
    note = {"name": entry.name, "bytes": entry.num_bytes, "kept": num_kept}
    index.location.write_table(f"decisions/{parquet_name(entry.name)}", table, note)
    index.forget()
    return num_kept


def decided(index: ShardIndex) -> dict[str, int]:
    """The number of samples kept of each shard that has decisions, also of an unfinished curation.

    Shards that changed after they were decided are left out.
    """
    kept = {}
    for entry in index.entries:
        note = note_for(index.folder / "decisions" / parquet_name(entry.name), entry)
        if note is not None and "kept" in note:
            kept[entry.name] = int(note["kept"])
    return kept


def finish_decisions(
    index: ShardIndex, *, settings: Mapping[str, Any], counts: Mapping[str, int], kept: Mapping[str, int] | None = None
) -> None:
    """Write the summary that makes the decisions valid. Every shard must have decisions.

    `kept` are the samples kept of each shard, as `write_decisions` returned them; None reads them from the decisions.
    Decisions on other shards of the folder stay valid; settings and counts are those of the last curation.
    """
    kept = dict(decided(index) if kept is None else kept)
    if missing := [entry.name for entry in index.entries if entry.name not in kept]:
        raise DataError(f"{len(missing)} shards have no decisions: {', '.join(missing[:3])}. Write them first")
    sizes = {entry.name: entry.num_bytes for entry in index.entries}
    others = index.location.written.names("decisions") - {parquet_name(name) for name in sizes}
    for name in sorted(name for name in others if name.endswith(".parquet")):
        note = index.location.read_note(f"decisions/{name}") or {}
        if "kept" in note and note["name"] not in sizes:
            kept[note["name"]], sizes[note["name"]] = int(note["kept"]), int(note["bytes"])
    summary = {"version": VERSION, "settings": dict(settings), "kept": kept, "bytes": sizes, "counts": dict(counts)}
    index.location.write_json(SUMMARY, summary)
    if index.location.shared is not None:  # decisions of an earlier curation on this machine would count instead
        SharedFolder(str(index.folder), index.location.config).remove("decisions")
    index.forget()
