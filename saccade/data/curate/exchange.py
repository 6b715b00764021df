"""Rows that the jobs of one stage send to the partitions of the next, as files in a folder that all machines see.

    job  ->  Sender  ->  rows by partition, a file for each 64 MiB  ->  parts(partition)  ->  job of the next stage

A stage is a list of jobs. A job that has finished leaves a mark, written after its files, so a stage resumes job by job
whoever was killed: a job that runs again writes the same files under the same names. Rows are numpy records of one
type; each may carry bytes of its own (`blobs`), such as a thumbnail or a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.data.jobs import Workers, run_jobs
from saccade.data.order import Ints
from saccade.data.shared_folder import SharedFolder
from saccade.errors import DataError

Rows = NDArray[np.void]
_FILE_BYTES = 64 * 2**20
"""Bytes that a sender keeps in memory before it writes a file."""


@dataclass(frozen=True)
class Exchange:
    """Rows of one type, by partition. Picklable."""

    folder: SharedFolder
    name: str
    dtype: np.dtype[np.void]
    num_partitions: int

    def sender(self, job: int) -> Sender:
        """What a job sends its rows with."""
        return Sender(self, job)

    def parts(self, partition: int) -> Iterator[Rows]:
        """The rows that were sent to a partition, one file after the other, in the order of the jobs."""
        for file in self._files():
            yield self._rows(file, partition)

    def rows(self, partition: int) -> Rows:
        """All rows that were sent to a partition."""
        return np.concatenate([np.zeros(0, self.dtype), *self.parts(partition)])

    def parts_with_blobs(self, partition: int) -> Iterator[tuple[Rows, list[bytes]]]:
        """Rows and the bytes of each, one file after the other."""
        for file in self._files():
            if not len(rows := self._rows(file, partition)):
                continue
            num_rows = np.frombuffer(self.folder.read_part(file, 16 * self.num_partitions, 16), np.int64)[0]
            _, _, begin, end = self._spans(file, partition)
            at = 16 * (self.num_partitions + 1) + int(num_rows) * self.dtype.itemsize
            packed = self.folder.read_part(file, at + begin, end - begin)
            ends = np.cumsum(rows["num_bytes"].astype(np.int64))
            begins = ends - rows["num_bytes"]
            yield rows, [packed[first:last] for first, last in zip(begins.tolist(), ends.tolist(), strict=True)]

    def _files(self) -> list[str]:
        return [f"{self.name}/{name}" for name in sorted(self.folder.names(self.name))]

    def _rows(self, file: str, partition: int) -> Rows:
        first, last, _, _ = self._spans(file, partition)
        at, width = 16 * (self.num_partitions + 1), self.dtype.itemsize
        data = self.folder.read_part(file, at + first * width, (last - first) * width) if last > first else b""
        return np.frombuffer(data, self.dtype)

    def _spans(self, file: str, partition: int) -> tuple[int, int, int, int]:
        """First and last row of a partition in a file, first and last byte of its blobs."""
        spans = np.frombuffer(self.folder.read_part(file, 16 * partition, 32), np.int64).reshape(2, 2)
        return int(spans[0, 0]), int(spans[1, 0]), int(spans[0, 1]), int(spans[1, 1])


class Sender:
    """Rows of one job on their way; `close` writes the last of them."""

    def __init__(self, exchange: Exchange, job: int) -> None:
        self._exchange, self._job = exchange, job
        self._pending: list[tuple[Ints, Rows, NDArray[np.object_]]] = []
        self._num_bytes = self._num_files = 0

    def send(self, partitions: Ints, rows: Rows, blobs: Sequence[bytes] | None = None) -> None:
        """Send each row to its partition. Rows with blobs need a field `num_bytes`, which is set here."""
        if not len(rows):
            return
        carried = np.full(len(rows) if blobs is not None else 0, None, object)
        if blobs is not None:
            carried[:] = blobs
            rows["num_bytes"] = [len(blob) for blob in blobs]
            self._num_bytes += int(rows["num_bytes"].sum())
        self._pending.append((partitions, rows, carried))
        self._num_bytes += rows.nbytes
        if self._num_bytes > _FILE_BYTES:
            self.close()

    def close(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        partitions, rows, blobs = (np.concatenate(column) for column in zip(*self._pending, strict=True))
        order = np.argsort(partitions, kind="stable")
        rows, blobs = rows[order], blobs[order] if len(blobs) else blobs
        counts = np.bincount(partitions, minlength=self._exchange.num_partitions)
        sizes = rows["num_bytes"].astype(np.float64) if len(blobs) else np.zeros(len(rows))
        num_bytes = np.bincount(partitions[order], weights=sizes, minlength=self._exchange.num_partitions)
        spans = np.zeros((self._exchange.num_partitions + 1, 2), np.int64)
        spans[1:, 0], spans[1:, 1] = np.cumsum(counts), np.cumsum(num_bytes).astype(np.int64)
        name = f"{self._exchange.name}/{self._job:08d}-{self._num_files:05d}"
        self._exchange.folder.write(name, spans.tobytes() + rows.tobytes() + b"".join(blobs))
        self._pending, self._num_bytes = [], 0
        self._num_files += 1


# ------------------------------------------------------------------ stages

Stage = Callable[[Any, int], dict[str, Any]]
"""A function of a stage's shared data and the number of a job; its counts are kept in the job's mark."""


@dataclass(frozen=True)
class Runner:
    """Runs stages, each once: jobs that have left a mark in the folder are not run again."""

    folder: SharedFolder
    workers: Workers

    def run(self, name: str, stage: Stage, shared: object, num_jobs: int) -> list[dict[str, Any]]:
        """The results of all jobs of a stage, by number."""
        marks = f"done-{name}"
        names = [f"{number}.json" for number in range(num_jobs)]
        present = self.folder.names(marks)
        missing = [number for number, mark in enumerate(names) if mark not in present]
        results = {
            n: json.loads(self.folder.read(f"{marks}/{mark}") or b"") for n, mark in enumerate(names) if mark in present
        }
        work = _Work(self.folder.sub(marks), stage, shared)
        for outcome in run_jobs(_run_marked, work, missing, self.workers):
            if outcome.result is None:
                raise DataError(f"part {outcome.job} of {name}: {outcome.error}. Run the command again: it resumes")
            results[outcome.job] = outcome.result
        return [results[number] for number in range(num_jobs)]


@dataclass(frozen=True)
class _Work:
    marks: SharedFolder
    stage: Stage
    shared: Any


def _run_marked(work: _Work, number: int) -> dict[str, Any]:
    """Run one job and leave its mark, unless a worker that was lost has."""
    name = f"{number}.json"
    if (mark := work.marks.read(name)) is None:
        mark = json.dumps(work.stage(work.shared, number)).encode()
        work.marks.write(name, mark)
    result: dict[str, Any] = json.loads(mark)
    return result
