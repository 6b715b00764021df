"""`prepare.json`: what a run has made, and where it goes on.

Written anew whenever a shard is whole, so the file always speaks of whole shards only. It is the journal of a run and its report.
Downloads end in any order, so the place where a run goes on has two parts: all items before it are used, and some beyond.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.data.readers.reader import Skipped
from saccade.data.sample import Sample
from saccade.errors import DataError
from saccade.files import atomic_write, sync_to_disk

VERSION = 2
FILE = "prepare.json"
TEMPORARY_PREFIX = f".{FILE}."
_NUM_EXAMPLES = 5
_MAX_EXAMPLE = 400
_DECISIVE = ("samples_per_shard", "bytes_per_shard", "resize_longest")
"""Options that decide what the shards hold; a run goes on only with the same."""

Place = tuple[int, int, int]
"""An item: number of the source, of the part, of the item in the part."""
Run = tuple[int, int, int, int]
"""Items side by side: the place of the first, and how many."""


class Frontier:
    """Which items have been used: all before `next_item`, and of those beyond it the ones in `used_beyond`."""

    def __init__(self, next_item: Place, used_beyond: Iterable[Run]) -> None:
        self._behind = next_item
        self._open: OrderedDict[Place, None] = OrderedDict()
        self._used = {(source, part, item + n) for source, part, item, count in used_beyond for n in range(count)}

    def begin(self, place: Place) -> bool:
        """An item is taken up, in the order of the inputs; False if it has been used already."""
        self._behind = (*place[:2], place[2] + 1)
        if place in self._used:
            return False
        self._open[place] = None
        return True

    def end(self, place: Place) -> None:
        """An item that was taken up is in a shard, or counted as skipped."""
        del self._open[place]
        if next(iter(self._open), place) < place:
            self._used.add(place)

    @property
    def next_item(self) -> Place:
        """The first item that has not been used."""
        return next(iter(self._open), self._behind)

    def used_beyond(self) -> list[Run]:
        """The used items behind the first unused one; forgets those before it."""
        next_item = self.next_item
        self._used = {place for place in self._used if place > next_item}
        runs: list[Run] = []
        for source, part, item in sorted(self._used):
            if runs and (source, part, item) == (*runs[-1][:2], runs[-1][2] + runs[-1][3]):
                runs[-1] = (*runs[-1][:3], runs[-1][3] + 1)
            else:
                runs.append((source, part, item, 1))
        return runs


@dataclass
class InputReport:
    """One source: how it was read, and what became of its items."""

    name: str
    kind: str
    path: str
    details: dict[str, Any]
    """The rest of its spec, and a fingerprint of the names and sizes of its parts."""
    num_samples: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Items that were left out, by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first few items of each reason."""

    def count(self, item: Sample | Skipped) -> None:
        """One more item."""
        if isinstance(item, Sample):
            self.num_samples += 1
            return
        self.skipped[item.reason] = self.skipped.get(item.reason, 0) + 1
        examples = self.examples.setdefault(item.reason, [])
        if len(examples) < _NUM_EXAMPLES:
            text = f"{item.key}: {item.detail}" if item.detail else item.key
            examples.append(text[:_MAX_EXAMPLE])


@dataclass
class PrepareReport:
    """What a run has made: so far while it goes on, in all when it is finished. Kept as `prepare.json` beside the shards."""

    settings: dict[str, Any]
    inputs: list[InputReport]
    num_shards: int = 0
    num_bytes: int = 0
    """Of all shards."""
    next_item: Place | None = (0, 0, 0)
    """The first item that is in no shard and not counted; None when all are."""
    used_beyond: list[Run] = field(default_factory=list)
    """Items behind it that are: downloads end in any order."""

    @property
    def is_finished(self) -> bool:
        """Whether every item has been used."""
        return self.next_item is None

    @property
    def num_samples(self) -> int:
        """Samples in the shards."""
        return sum(entry.num_samples for entry in self.inputs)

    @property
    def num_skipped(self) -> int:
        """Items left out."""
        return sum(self.skipped.values())

    @property
    def skipped(self) -> dict[str, int]:
        """Items left out by reason, the most frequent first."""
        total = sum((Counter(entry.skipped) for entry in self.inputs), Counter[str]())
        return dict(sorted(total.items(), key=lambda entry: (-entry[1], entry[0])))

    @property
    def origin(self) -> Any:
        """What decides the content of the shards: a run goes on only where it is the same."""
        settings = {name: self.settings[name] for name in _DECISIVE}
        return settings, [(entry.name, entry.kind, entry.path, entry.details) for entry in self.inputs]

    def save(self, folder: Path) -> None:
        """Replace the file in one step, after everything it speaks of is on the disk."""
        totals = {"num_samples": self.num_samples, "num_skipped": self.num_skipped, "skipped": self.skipped}
        content = {"version": VERSION, "is_finished": self.is_finished, **totals, **asdict(self)}
        with atomic_write(folder / FILE, sync=True) as temporary:
            temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
            sync_to_disk(folder)

    @staticmethod
    def load(folder: Path) -> PrepareReport:
        """The report of a folder."""
        path = folder / FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise DataError(
                    f"{path}: version {content['version']}; this program writes {VERSION}. Choose another folder"
                )
            place = content["next_item"]
            return PrepareReport(
                settings=content["settings"],
                inputs=[InputReport(**entry) for entry in content["inputs"]],
                num_shards=content["num_shards"],
                num_bytes=content["num_bytes"],
                next_item=None if place is None else (place[0], place[1], place[2]),
                used_beyond=[(run[0], run[1], run[2], run[3]) for run in content["used_beyond"]],
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{path}: cannot be read: {error!r}. Remove {folder}, or choose another") from error
