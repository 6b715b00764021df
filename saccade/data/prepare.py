"""Sources to shards: read, download, write, count; after a crash, go on.

    open the inputs -> claim the folder -> items in order -> links downloaded -> shards, one by one

The unit of work is a shard. When one is whole, `prepare.json` is replaced: what has been counted, and which items have been used.
A run that finds such a file goes on from there, so every item is used once however often the run was killed. Samples stand in the
order of their inputs, downloaded ones in the order they arrived. Images keep the bytes they have, unless `resize_longest` is set.
Nothing is judged here beyond "is this a sample": judging is curation's.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.data.download import DownloadOptions
from saccade.data.prepare_report import FILE, TEMPORARY_PREFIX, Frontier, InputReport, Place, PrepareReport
from saccade.data.readers.inputs import Input, fill_links, open_input
from saccade.data.readers.reader import InputSpec, Item, Skipped
from saccade.data.resize import resize_in_order
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_MIN_JUDGED = 1000
"""Items before the share of skipped ones means something."""
_HOLD_IMAGES = {"tars", "files", "parquet"}
"""Kinds whose parts are about as large as the shards they become."""
_MEMBER_BYTES = 1024
"""A member's header and padding in a tar, at most."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How shards are made."""

    samples_per_shard: int = 10_000
    """Samples in a shard at most."""
    bytes_per_shard: int = 2**30
    """Bytes of a shard at most; a larger sample has a shard to itself."""
    resize_longest: int | None = None
    """Shrink images whose longer side has more pixels, and encode them anew; None keeps every byte."""
    max_skipped_share: float = 0.9
    """Stop when more than this share of the items is skipped, once a thousand have been seen: something is wrong then."""
    num_workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads that resize."""
    download: DownloadOptions = field(default_factory=DownloadOptions)
    """How links are downloaded."""

    def __post_init__(self) -> None:
        for name in ("samples_per_shard", "bytes_per_shard", "num_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"prepare: {name} is {getattr(self, name)!r}, not at least 1")
        if self.resize_longest is not None and self.resize_longest < 16:
            raise ConfigError(f"prepare: resize_longest is {self.resize_longest}; a picture needs 16 pixels or more")
        if not 0 < self.max_skipped_share <= 1:
            raise ConfigError(f"prepare: max_skipped_share is {self.max_skipped_share}, not above 0 and up to 1")


def prepare(
    inputs: Sequence[InputSpec],
    out: str | Path,
    options: PrepareOptions | None = None,
    on_progress: Callable[[PrepareReport], None] | None = None,
) -> PrepareReport:
    """Write the samples of the inputs as shards into `out`; goes on where an earlier run of the same stopped.

    `on_progress` is called after every item with the report as it grows.
    """
    options, folder = options or PrepareOptions(), Path(out)
    if not inputs:
        raise ConfigError("prepare: no inputs. Name at least one")
    if "://" in str(out):
        raise ConfigError(f"{out}: shards are written to a local folder. Write them there, then copy them")
    opened = [open_input(spec) for spec in inputs]
    report = PrepareReport(_settings(options), [_describe(entry) for entry in opened])
    with _claimed(folder):
        report = _begin_or_go_on(folder, report)
        if report.is_finished:
            return report
        _check_space(folder, opened, options, report)
        with _telling_of_full_disks(folder, report):
            report.save(folder)
            _write_shards(folder, opened, options, report, on_progress or (lambda report: None))
    log.info(
        "%s: %d samples in %d shards, %d items skipped", out, report.num_samples, report.num_shards, report.num_skipped
    )
    return report


def _settings(options: PrepareOptions) -> dict[str, Any]:
    settings = asdict(options)
    settings["download"] |= {name: sorted(settings["download"][name]) for name in ("ports", "allow_hosts")}
    return settings


def _describe(entry: Input) -> InputReport:
    """A source as the report names it, so that a later run can tell whether it is the same."""
    parts = "\n".join(f"{part.name} {part.num_bytes}" for part in entry.parts)
    details = {
        "licence": entry.spec.licence,
        "images": str(entry.spec.images) if entry.spec.images else None,
        "annotations": str(entry.spec.annotations) if entry.spec.annotations else None,
        "columns": dict(entry.spec.columns),
        "num_parts": len(entry.parts),
        "fingerprint": hashlib.sha256(parts.encode()).hexdigest()[:16],
    }
    return InputReport(entry.name, entry.kind, entry.spec.path, details)


# ------------------------------------------------------------------ the folder


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The folder for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}. Choose a folder that can be written") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{folder}: another run is writing there. Wait for it, or choose another folder") from error
        yield
    finally:
        os.close(handle)


def _begin_or_go_on(folder: Path, fresh: PrepareReport) -> PrepareReport:
    """The report of the run to continue, or the fresh one; then the folder holds what the report speaks of and nothing else."""
    if not (folder / FILE).exists():
        if others := sorted(path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY_PREFIX)):
            raise DataError(
                f"{folder}: holds other things ({', '.join(others[:3])}{', ...' if others[3:] else ''}). Choose another "
                "folder, or empty it"
            )
        return fresh
    found = PrepareReport.load(folder)
    if found.origin == fresh.origin:
        _check_shards(folder, found)
        if not found.is_finished:
            log.info("%s: going on after %d shards, %d samples", folder, found.num_shards, found.num_samples)
            _remove_unfinished(folder, found)
            found.settings = fresh.settings
        return found
    if found.num_shards:
        raise DataError(
            f"{folder}: its {found.num_shards} shards were made from other inputs or with other options than these, see "
            f"{folder / FILE}. Choose another folder, or remove it"
        )
    _remove_unfinished(folder, found)
    return fresh


def _check_shards(folder: Path, report: PrepareReport) -> None:
    """The shards that were whole must still be."""
    paths = [folder / f"{number:05d}.tar" for number in range(report.num_shards)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing or sum(path.stat().st_size for path in paths) != report.num_bytes:
        what = f"{missing[0]} is missing" if missing else "their sizes have changed"
        raise DataError(f"{folder}: its shards are not as {FILE} states: {what}. Remove the folder and run again")


def _remove_unfinished(folder: Path, report: PrepareReport) -> None:
    """Drop what a killed run left: hidden files, and a shard that was whole but not yet in the report."""
    for path in folder.iterdir():
        hidden = re.fullmatch(r"\.\d{5,}\.tar\.part", path.name) or path.name.startswith(TEMPORARY_PREFIX)
        shard = re.fullmatch(r"(\d{5,})\.tar", path.name)
        if hidden or (shard and int(shard[1]) >= report.num_shards):
            path.unlink()


def _check_space(folder: Path, inputs: Sequence[Input], options: PrepareOptions, report: PrepareReport) -> None:
    """Refuse what plainly does not fit, before the work begins."""
    if options.resize_longest is not None:
        return
    size = sum(part.num_bytes for entry in inputs if entry.kind in _HOLD_IMAGES for part in entry.parts)
    free = shutil.disk_usage(folder).free
    if size - report.num_bytes > free:
        raise DataError(
            f"{folder}: {free / 1e9:.1f} GB free, the shards need about {(size - report.num_bytes) / 1e9:.1f} GB. Free some "
            "space, or choose a folder on another disk"
        )


@contextmanager
def _telling_of_full_disks(folder: Path, report: PrepareReport) -> Iterator[None]:
    """Sources turn their own errors into reasons; what is left comes from writing."""
    try:
        yield
    except OSError as error:
        _remove_unfinished(folder, report)
        what = "no space left" if error.errno in _NO_SPACE else f"cannot be written ({error.strerror})"
        raise DataError(
            f"{folder}: {what} after {report.num_shards} whole shards. Make room, then run the same command again: it goes on "
            "from there"
        ) from error


# ------------------------------------------------------------------ the work


def _write_shards(
    folder: Path,
    inputs: Sequence[Input],
    options: PrepareOptions,
    report: PrepareReport,
    on_progress: Callable[[PrepareReport], None],
) -> None:
    """Items into shards; the report is saved with each shard that is whole."""
    frontier = Frontier(report.next_item or (0, 0, 0), report.used_beyond)
    num_bytes = 0
    digits = max(4, len(str(options.samples_per_shard - 1)))
    # the bounds are kept here, not by the writer: a key names its shard, and the report must know what is in one
    with (
        closing(_samples(inputs, options, frontier)) as items,
        ShardWriter(folder, max_samples=options.samples_per_shard, max_bytes=2**62) as writer,
    ):
        for place, item in items:
            if isinstance(item, Sample):
                size = sum(_MEMBER_BYTES + len(data) for data in item.members.values())
                is_full = writer.num_pending == options.samples_per_shard or num_bytes + size > options.bytes_per_shard
                if writer.num_pending and is_full:
                    _finish_shard(folder, writer, report, frontier)
                    num_bytes = 0
                key = f"{report.num_shards:05d}{writer.num_pending:0{digits}d}"
                writer.write(Sample(key, item.source, item.members))
                num_bytes += size
            frontier.end(place)
            report.inputs[place[0]].count(item)
            if isinstance(item, Skipped):
                _check_share(report, options)
            on_progress(report)
        if not report.num_samples:
            raise DataError(f"not one sample among {report.num_skipped} items. {_most_frequent(report)}")
        _finish_shard(folder, writer, report, None)


def _finish_shard(folder: Path, writer: ShardWriter, report: PrepareReport, frontier: Frontier | None) -> None:
    """Make what is written a shard, then the report that speaks of it; without a frontier nothing is left to do."""
    if writer.num_pending:
        writer.close()
        report.num_bytes += (folder / writer.finished[-1]).stat().st_size
        report.num_shards += 1
    report.next_item = frontier.next_item if frontier else None
    report.used_beyond = frontier.used_beyond() if frontier else []
    report.save(folder)


def _samples(
    inputs: Sequence[Input], options: PrepareOptions, frontier: Frontier
) -> Generator[tuple[Place, Sample | Skipped], None, None]:
    """Every item that has not been used, complete, with its place."""
    placed = ((place, item) for place, _, item in fill_links(_items(inputs, frontier), options.download))
    if options.resize_longest is None:
        yield from placed
    else:
        yield from resize_in_order(placed, options.resize_longest, options.num_workers)


def _items(inputs: Sequence[Input], frontier: Frontier) -> Iterator[tuple[Place, Input, Item]]:
    first_input, first_part, first_item = frontier.next_item
    for number, entry in enumerate(inputs[first_input:], first_input):
        for part in range(first_part, len(entry.parts)):
            for count, item in enumerate(entry.read(part, first_item), first_item):
                place = (number, part, count)
                if frontier.begin(place):
                    yield place, entry, item
            first_item = 0
        first_part = 0


def _check_share(report: PrepareReport, options: PrepareOptions) -> None:
    num_items = report.num_samples + report.num_skipped
    if num_items >= _MIN_JUDGED and report.num_skipped > options.max_skipped_share * num_items:
        raise DataError(
            f"{report.num_skipped} of {num_items} items were skipped, more than max_skipped_share {options.max_skipped_share}. "
            + _most_frequent(report)
        )


def _most_frequent(report: PrepareReport) -> str:
    """The reason most items were skipped for, with an example."""
    if not report.skipped:
        return "Check the paths"
    reason = next(iter(report.skipped))
    example = next(entry.examples[reason][0] for entry in report.inputs if reason in entry.examples)
    return f"Most often: {reason} ({report.skipped[reason]} times), for instance {example}"
