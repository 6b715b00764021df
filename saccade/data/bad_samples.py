"""Samples that could not be used: named one by one, counted, and an end to the run where they are too many."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from saccade.errors import DataError

logger = logging.getLogger(__name__)

MIN_BAD = 10
"""Fewer bad samples than this never stop a stream, whatever their share."""

_NUM_NAMED = 5
"""Bad samples named in the error that stops a stream."""


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be used."""

    source: str
    shard: str
    key: str
    reason: str

    @property
    def name(self) -> str:
        """source/shard/key."""
        return f"{self.source}/{self.shard}/{self.key}"


class BadSampleLog:
    """Counts and names bad samples, and says when there are too many."""

    def __init__(self, max_share: float, path: Path | None) -> None:
        """All are written to `path` as JSON lines; ranks may share it."""
        self._max_share, self._path = max_share, path
        self._num_bad, self._num_good = 0, 0
        self._first: list[BadSample] = []

    def enter(self, bad: Sequence[BadSample], num_good: int) -> None:
        """What one batch brought. A `DataError` if that makes too many."""
        self._num_good += num_good
        if not bad:
            return
        if not self._num_bad:
            logger.warning("%s is left out: %s. %s", bad[0].name, bad[0].reason, self._where)
        self._num_bad += len(bad)
        self._first += bad[: _NUM_NAMED - len(self._first)]
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(sample)) + "\n" for sample in bad))
        if self._num_bad >= MIN_BAD and self._num_bad > self._max_share * (self._num_bad + self._num_good):
            named = "; ".join(f"{sample.name} ({sample.reason})" for sample in self._first)
            raise DataError(
                f"{self._num_bad} of {self._num_bad + self._num_good} samples are bad, over max_bad_share {self._max_share}. "
                f"Repair or leave out the shards, or raise the share. {self._where} The first: {named}"
            )

    @property
    def _where(self) -> str:
        return f"All bad samples are listed in {self._path}." if self._path else "Give bad_log a file to list all."
