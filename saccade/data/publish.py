"""Index, lengths and features of a shard folder in one pass, written next to the shards for every machine.

    shard  ->  index -> lengths of every processor -> features  ->  index/ next to the shards (a folder or a URL)

A shard is read once: what the second and third step need is in the cache of the machine that has just indexed it. The
list of shards is written last. A machine that opens the folder afterwards reads no sample before training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.data.index import ShardIndex
from saccade.data.index_builder import index_shard, write_entries, write_unreadable
from saccade.data.index_files import IndexLocation, ShardEntry, ShardProgress
from saccade.data.jobs import Workers, run_jobs
from saccade.data.lengths import Measurer, lengths_folder, measure_shard
from saccade.data.shard_table import ShardTable
from saccade.data.shards import ShardFile, ShardPath, list_shards
from saccade.data.storage import StorageConfig, is_remote, shown
from saccade.errors import DataError

logger = logging.getLogger(__name__)
_DEFAULT = StorageConfig()


@dataclass(frozen=True)
class PublishReport:
    """What is published."""

    url: str
    """The folder of the index."""
    num_shards: int
    num_read: int
    """Shards read by this run; what other runs had written was used."""
    num_samples: int
    num_errors: int
    num_bytes: int
    quarantined: dict[str, str]
    """Shards without samples, since reading them ended a worker again and again; and how."""


@dataclass(frozen=True)
class _Pass:
    """What is computed of every shard. Picklable."""

    location: IndexLocation
    measurers: tuple[Measurer, ...]
    has_features: bool


def publish(
    path: str | Path,
    measurers: Sequence[Measurer],
    *,
    features: bool = False,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[ShardProgress], None] | None = None,
    config: StorageConfig = _DEFAULT,
) -> PublishReport:
    """Write the index of a folder, and lengths for each measurer, next to its shards. It resumes shard by shard.

    `features` are those of curation. The machines of the Ray cluster at `ray_address`, if there is one, do the work.
    """
    where = ShardPath.parse(path)
    if not where.is_whole_folder:
        raise DataError(f"{shown(str(path))}: some shards of a folder; give the folder {shown(where.folder)}")
    files = list_shards(path, config)
    location = IndexLocation.of(where.folder, config, f"{where.folder}/index" if is_remote(where.folder) else None)
    if location.shared is None and location.shipped is not None:
        raise DataError(f"{shown(where.folder)}/index: cannot be written. Give access, or publish as another user")
    work = _Pass(location, tuple(measurers), features)
    entries: dict[str, ShardEntry] = {}
    quarantined: dict[str, str] = {}
    done, num_read = ShardProgress.of([], len(files)), 0
    for outcome in run_jobs(_publish_shard, work, files, Workers(num_workers=num_workers, ray_address=ray_address)):
        name = outcome.job.name
        if outcome.has_crashed:
            quarantined[name] = outcome.error or ""
            logger.warning("%s/%s is left out: %s", shown(where.folder), name, outcome.error)
            entries[name] = write_unreadable(location, outcome.job, outcome.error or "")
            _add(work, entries[name])
        elif outcome.result is None:
            raise DataError(f"{outcome.error}. Finished shards are kept: run the command again")
        else:
            entries[name], is_read = outcome.result
            num_read += is_read
        done = done.plus(entries[name])
        if on_progress:
            on_progress(done)
    write_entries(location, entries, keep_others=False)
    num_errors = sum(entry.num_errors for entry in entries.values())
    url = shown(location.written.url)
    return PublishReport(url, len(files), num_read, done.num_samples, num_errors, done.num_bytes, quarantined)


def _publish_shard(work: _Pass, file: ShardFile) -> tuple[ShardEntry, bool]:
    """Write all files of a shard that are not there yet; returns whether it was read."""
    entry, is_indexed = index_shard(work.location, file)
    return entry, _add(work, entry) or is_indexed


def _add(work: _Pass, entry: ShardEntry) -> bool:
    """Write lengths and features of an indexed shard; returns whether any were missing."""
    location = work.location
    index = ShardIndex(location.shards, ShardTable.of([entry]), location, location.config, trust=False)
    measured = [measure_shard(index, each, lengths_folder(each.fingerprint), 0) for each in work.measurers]
    if work.has_features:
        from saccade.data.curate.features import is_measured, write_features

        if not is_measured(index, 0):
            write_features(index, 0)
            return True
    return any(measured)
