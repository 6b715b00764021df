"""Write inputs as shards: read, download, write, count; resumes after a crash.

    open the inputs -> lock the folder -> items in order -> links downloaded -> shards, one by one

The unit of work is a shard. When one is complete, `prepare.json` is replaced: the counts, and which items are done. A
run that finds such a file resumes from it, so every item is used once however often the run was killed. Samples are in
the order of their inputs, downloaded ones in the order they arrived. Image bytes are unchanged unless `resize_longest`
is set. Nothing is filtered here beyond "is this a sample": that is curation.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
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
from saccade.data.prepare_report import FILE, TEMPORARY_PREFIX, InputReport, ItemId, ItemProgress, PrepareReport
from saccade.data.readers.inputs import Input, download_links, open_input
from saccade.data.readers.reader import InputSpec, Item, Merged, Skipped
from saccade.data.resize import resize_in_order
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_MIN_CHECKED = 1000
"""Items before the share of skipped ones is checked."""
_WITH_IMAGES = {"tars", "files", "parquet"}
"""Kinds whose parts are about as large as the shards they become."""
_MEMBER_BYTES = 1024
"""Maximum size of a tar member's header and padding."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of `prepare`."""

    samples_per_shard: int = 10_000
    """Maximum samples of a shard."""
    bytes_per_shard: int = 2**30
    """Maximum bytes of a shard; a larger sample gets a shard of its own."""
    resize_longest: int | None = None
    """Downscale and re-encode images whose longer side has more pixels; None keeps all bytes."""
    max_skipped_share: float = 0.9
    """Stop when more than this share of the items is skipped, after the first 1,000."""
    num_workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads for resizing."""
    download: DownloadOptions = field(default_factory=DownloadOptions)
    """How links are downloaded."""

    def __post_init__(self) -> None:
        for name in ("samples_per_shard", "bytes_per_shard", "num_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"prepare: {name} is {getattr(self, name)!r}, not at least 1")
        if self.resize_longest is not None and self.resize_longest < 16:
            raise ConfigError(f"prepare: resize_longest is {self.resize_longest}; the minimum is 16 pixels")
        if not 0 < self.max_skipped_share <= 1:
            raise ConfigError(f"prepare: max_skipped_share is {self.max_skipped_share}, not above 0 and up to 1")


def prepare(
    inputs: Sequence[InputSpec],
    out: str | Path,
    options: PrepareOptions | None = None,
    on_progress: Callable[[PrepareReport], None] | None = None,
) -> PrepareReport:
    """Write the samples of the inputs as shards into `out`; an interrupted run with the same options resumes.

    `on_progress` is called after every item with the current report.
    """
    options, folder = options or PrepareOptions(), Path(out)
    if not inputs:
        raise ConfigError("prepare: no inputs. Name at least one")
    if "://" in str(out):
        raise ConfigError(f"{out}: shards are written to a local folder. Write them there, then copy them")
    opened = [open_input(spec) for spec in inputs]
    report = PrepareReport(_settings(options), [_describe(entry) for entry in opened])
    with _locked(folder):
        report = _start_or_resume(folder, report)
        if report.is_finished:
            return report
        _check_space(folder, opened, options, report)
        with _explain_write_errors(folder, report):
            report.save(folder)
            _write_shards(folder, opened, options, report, on_progress or (lambda report: None))
    logger.info(
        "%s: %d samples in %d shards, %d items skipped", out, report.num_samples, report.num_shards, report.num_skipped
    )
    return report


def _settings(options: PrepareOptions) -> dict[str, Any]:
    settings = asdict(options)
    settings["download"] |= {name: sorted(settings["download"][name]) for name in ("ports", "allow_hosts")}
    return settings


def _describe(entry: Input) -> InputReport:
    """The entry of an input in the report; a later run compares it to decide whether the input is the same."""
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


# ------------------------------------------------------------------ output folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process."""
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


def _start_or_resume(folder: Path, fresh: PrepareReport) -> PrepareReport:
    """The report of the run to resume, or the fresh one; afterwards the folder has exactly the shards of the report."""
    if not (folder / FILE).exists():
        if others := sorted(path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY_PREFIX)):
            raise DataError(
                f"{folder}: has other files ({', '.join(others[:3])}{', ...' if others[3:] else ''}). Choose another "
                "folder, or empty it"
            )
        return fresh
    found = PrepareReport.load(folder)
    if found.origin == fresh.origin:
        _check_shards(folder, found)
        if not found.is_finished:
            logger.info("%s: resuming after %d shards, %d samples", folder, found.num_shards, found.num_samples)
            _remove_unfinished(folder, found)
            found.settings = fresh.settings
        return found
    if found.num_shards:
        raise DataError(
            f"{folder}: its {found.num_shards} shards were written from other inputs or with other options, see "
            f"{folder / FILE}. Choose another folder, or remove it"
        )
    _remove_unfinished(folder, found)
    return fresh


def _check_shards(folder: Path, report: PrepareReport) -> None:
    """Check that the complete shards are unchanged."""
    paths = [folder / f"{number:05d}.tar" for number in range(report.num_shards)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing or sum(path.stat().st_size for path in paths) != report.num_bytes:
        what = f"{missing[0]} is missing" if missing else "their sizes have changed"
        raise DataError(f"{folder}: its shards differ from {FILE}: {what}. Remove the folder and run again")


def _remove_unfinished(folder: Path, report: PrepareReport) -> None:
    """Remove the remains of a killed run: temporary files, and a complete shard that is not in the report yet."""
    for path in folder.iterdir():
        is_temporary = re.fullmatch(r"\.\d{5,}\.tar\.part", path.name) or path.name.startswith(TEMPORARY_PREFIX)
        shard = re.fullmatch(r"(\d{5,})\.tar", path.name)
        if is_temporary or (shard and int(shard[1]) >= report.num_shards):
            path.unlink()


def _check_space(folder: Path, inputs: Sequence[Input], options: PrepareOptions, report: PrepareReport) -> None:
    """Refuse inputs that clearly do not fit on the disk."""
    if options.resize_longest is not None:
        return
    size = sum(part.num_bytes for entry in inputs if entry.kind in _WITH_IMAGES for part in entry.parts)
    free = shutil.disk_usage(folder).free
    if size - report.num_bytes > free:
        raise DataError(
            f"{folder}: {free / 1e9:.1f} GB free, the shards need about {(size - report.num_bytes) / 1e9:.1f} GB. Free "
            "some space, or choose a folder on another disk"
        )


@contextmanager
def _explain_write_errors(folder: Path, report: PrepareReport) -> Iterator[None]:
    """Turn an `OSError` into an error with a remedy. Readers handle their own, so it comes from writing."""
    try:
        yield
    except OSError as error:
        _remove_unfinished(folder, report)
        what = "no space left" if error.errno in _NO_SPACE else f"cannot be written ({error.strerror})"
        raise DataError(
            f"{folder}: {what} after {report.num_shards} complete shards. Free some space and run the same command "
            "again: it resumes"
        ) from error


# ------------------------------------------------------------------ writing


def _write_shards(
    folder: Path,
    inputs: Sequence[Input],
    options: PrepareOptions,
    report: PrepareReport,
    on_progress: Callable[[PrepareReport], None],
) -> None:
    """Write items into shards; the report is saved with each complete shard."""
    progress = ItemProgress(report.next_item or (0, 0, 0), report.done_after)
    num_bytes = 0
    digits = max(4, len(str(options.samples_per_shard - 1)))
    # The writer checks no limits: keys contain the number of the shard, and the report describes whole shards.
    with (
        closing(_samples(inputs, options, progress)) as items,
        ShardWriter(folder, max_samples=options.samples_per_shard, max_bytes=2**62) as writer,
    ):
        for item_id, item in items:
            if isinstance(item, Sample):
                size = sum(_MEMBER_BYTES + len(data) for data in item.members.values())
                is_full = writer.num_pending == options.samples_per_shard or num_bytes + size > options.bytes_per_shard
                if writer.num_pending and is_full:
                    _finish_shard(folder, writer, report, progress)
                    num_bytes = 0
                key = f"{report.num_shards:05d}{writer.num_pending:0{digits}d}"
                writer.write(Sample(key, item.source, item.members))
                num_bytes += size
            progress.finish(item_id)
            report.inputs[item_id[0]].count(item)
            if isinstance(item, Skipped):
                _check_skipped_share(report, options)
            on_progress(report)
        if not report.num_samples:
            raise DataError(f"no sample among {report.num_skipped} items. {_most_frequent(report)}")
        _finish_shard(folder, writer, report, None)


def _finish_shard(folder: Path, writer: ShardWriter, report: PrepareReport, progress: ItemProgress | None) -> None:
    """Complete the shard, then save the report; without `progress` all items are done."""
    if writer.num_pending:
        writer.close()
        report.num_bytes += (folder / writer.finished[-1]).stat().st_size
        report.num_shards += 1
    report.next_item = progress.next_item if progress else None
    report.done_after = progress.done_after() if progress else []
    report.save(folder)


def _samples(
    inputs: Sequence[Input], options: PrepareOptions, progress: ItemProgress
) -> Generator[tuple[ItemId, Sample | Skipped | Merged], None, None]:
    """Every item that is not done, with its image, and its id."""
    items = download_links(_items(inputs, progress), options.download)
    if options.resize_longest is None:
        yield from items
    else:
        yield from resize_in_order(items, options.resize_longest, options.num_workers)


def _items(inputs: Sequence[Input], progress: ItemProgress) -> Iterator[tuple[ItemId, Input, Item]]:
    first_input, first_part, first_item = progress.next_item
    for number, entry in enumerate(inputs[first_input:], first_input):
        for part in range(first_part, len(entry.parts)):
            for count, item in enumerate(entry.read(part, first_item), first_item):
                item_id = (number, part, count)
                if progress.start(item_id):
                    yield item_id, entry, item
            first_item = 0
        first_part = 0


def _check_skipped_share(report: PrepareReport, options: PrepareOptions) -> None:
    num_items = report.num_samples + report.num_skipped
    if num_items >= _MIN_CHECKED and report.num_skipped > options.max_skipped_share * num_items:
        raise DataError(
            f"{report.num_skipped} of {num_items} items were skipped, more than max_skipped_share "
            f"{options.max_skipped_share}. " + _most_frequent(report)
        )


def _most_frequent(report: PrepareReport) -> str:
    """The two most frequent reasons for skipping, each with an example."""
    if not report.skipped:
        return "Check the paths"
    return "Most often: " + "; ".join(
        f"{reason} ({count} times), for instance "
        + next(entry.examples[reason][0] for entry in report.inputs if reason in entry.examples)
        for reason, count in itertools.islice(report.skipped.items(), 2)
    )
