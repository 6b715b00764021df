"""Samples that a stream skips: each is counted and listed once, and too many of them stop the stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import DataError

logger = logging.getLogger(__name__)

MIN_BAD = 10
"""Fewer bad samples than this never stop a stream, whatever their share."""
_NUM_NAMED = 5
"""Bad samples named in the error that stops a stream."""


@dataclass(frozen=True)
class BadSample:
    """A sample that was skipped, and why."""

    sample_id: str
    """source/shard/key, as in `PackedSequence.sample_ids`."""
    reason: str
    is_taken_down: bool = False
    """Whether it was removed on purpose: it is listed and counted, and is no reason to stop."""

    def to_json(self) -> dict[str, str]:
        """The sample as the log has it."""
        return {"sample_id": self.sample_id, "reason": self.reason}


class BadSampleLog:
    """Writes bad samples to a file, counts them, and stops the stream when there are too many."""

    def __init__(self, max_share: float, path: str | Path | None) -> None:
        """Bad samples are appended to `path` as JSON lines, each once; ranks may share the file."""
        self._max_share, self._path = max_share, None if path is None else Path(path)
        self._num_bad, self._num_good, self.num_taken_down = 0, 0, 0
        self._first: list[BadSample] = []
        self._listed: set[bytes] = set()
        self._num_read = 0

    def add(self, bad: Sequence[BadSample], num_good: int) -> None:
        """Add one batch. Raises `DataError` when there are too many bad samples."""
        self._num_good += num_good
        removed = [sample for sample in bad if sample.is_taken_down]
        if removed and not self.num_taken_down:
            logger.warning("sample %s was taken down and is skipped. %s", removed[0].sample_id, self._where)
        self.num_taken_down += len(removed)
        if removed and self._path:
            self._append(removed, self._path)
        bad = [sample for sample in bad if not sample.is_taken_down]
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
                f"{self._num_bad} of {self._num_bad + self._num_good} samples are bad, over max_bad_share "
                f"{self._max_share}. Repair or remove the shards, or raise the share. {self._where} The first: {named}"
            )

    def _append(self, bad: Sequence[BadSample], path: Path) -> None:
        """Write the lines that the file does not have yet.

        An earlier epoch, another rank or an earlier stream may have written the others.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(self._num_read)
            read = file.read()
            self._num_read += len(read)
            self._listed.update(read.splitlines())
            lines = dict.fromkeys(json.dumps(sample.to_json()).encode() for sample in bad)
            new = [line for line in lines if line not in self._listed]
            if new:
                is_cut = read and not read.endswith(b"\n")
                file.write(b"\n" * bool(is_cut) + b"".join(line + b"\n" for line in new))

    @property
    def _where(self) -> str:
        return f"All bad samples are listed in {self._path}." if self._path else "Set bad_log to a file to list all."
