"""`prepare.json`: the report of `data prepare`, and the state it resumes from.

Replaced whenever a shard is complete, so it always describes complete shards only. Downloads complete in any order, so
the state has two parts: the first item that is not done, and the items after it that are.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.data.readers.reader import Merged, Skipped
from saccade.data.sample import Sample
from saccade.errors import DataError
from saccade.files import atomic_write, sync_to_disk

VERSION = 2
FILE = "prepare.json"
TEMPORARY_PREFIX = f".{FILE}."
NUM_EXAMPLES = 100
"""Skipped items of each reason that are named in the file."""
_MAX_EXAMPLE = 400
_CONTENT_OPTIONS = ("samples_per_shard", "bytes_per_shard", "resize_longest")
"""Options that determine the contents of the shards; a run resumes only with the same."""

ItemId = tuple[int, int, int]
"""Number of the input, of the part, of the item in the part."""
ItemRange = tuple[int, int, int, int]
"""Consecutive items of a part: the id of the first, and their number."""


class ItemProgress:
    """The items that are done: all before `next_item`, and the later ones in `done_after`."""

    def __init__(self, next_item: ItemId, done_after: Iterable[ItemRange]) -> None:
        self._after_last = next_item
        self._started: OrderedDict[ItemId, None] = OrderedDict()
        self._done = {(number, part, item + n) for number, part, item, count in done_after for n in range(count)}

    def start(self, item_id: ItemId) -> bool:
        """Start an item, in the order of the inputs; False if it is done already."""
        self._after_last = (*item_id[:2], item_id[2] + 1)
        if item_id in self._done:
            return False
        self._started[item_id] = None
        return True

    def finish(self, item_id: ItemId) -> None:
        """Mark a started item as done: it is in a shard, or counted."""
        del self._started[item_id]
        if next(iter(self._started), item_id) < item_id:
            self._done.add(item_id)

    @property
    def next_item(self) -> ItemId:
        """The first item that is not done."""
        return next(iter(self._started), self._after_last)

    def done_after(self) -> list[ItemRange]:
        """The done items after the first that is not; drops those before it."""
        next_item = self.next_item
        self._done = {item_id for item_id in self._done if item_id > next_item}
        ranges: list[ItemRange] = []
        for number, part, item in sorted(self._done):
            if ranges and (number, part, item) == (*ranges[-1][:2], ranges[-1][2] + ranges[-1][3]):
                ranges[-1] = (*ranges[-1][:3], ranges[-1][3] + 1)
            else:
                ranges.append((number, part, item, 1))
        return ranges


@dataclass
class InputReport:
    """One input: how it is read, and counts of its items."""

    name: str
    kind: str
    path: str
    details: dict[str, Any]
    """The rest of its spec, and a fingerprint of the names and sizes of its parts."""
    num_samples: int = 0
    num_merged: int = 0
    """Rows whose caption went into the sample of the row before, which has the same image."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Skipped items by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first `NUM_EXAMPLES` items of each reason."""

    def count(self, item: Sample | Skipped | Merged) -> None:
        """Count an item."""
        if isinstance(item, Sample):
            self.num_samples += 1
            return
        if isinstance(item, Merged):
            self.num_merged += 1
            return
        self.skipped[item.reason] = self.skipped.get(item.reason, 0) + 1
        examples = self.examples.setdefault(item.reason, [])
        if len(examples) < NUM_EXAMPLES:
            text = f"{item.key}: {item.detail}" if item.detail else item.key
            examples.append(text[:_MAX_EXAMPLE])


@dataclass
class PrepareReport:
    """Progress and result of a run, stored as `prepare.json` next to the shards."""

    settings: dict[str, Any]
    inputs: list[InputReport]
    num_shards: int = 0
    num_bytes: int = 0
    """Bytes of all shards."""
    next_item: ItemId | None = (0, 0, 0)
    """The first item that is not done; None when all are."""
    done_after: list[ItemRange] = field(default_factory=list)
    """Items after it that are done: downloads complete in any order."""

    @property
    def is_finished(self) -> bool:
        """Whether every item is done."""
        return self.next_item is None

    @property
    def num_samples(self) -> int:
        """Samples in the shards."""
        return sum(entry.num_samples for entry in self.inputs)

    @property
    def num_skipped(self) -> int:
        """Skipped items."""
        return sum(self.skipped.values())

    @property
    def num_merged(self) -> int:
        """Rows merged into the sample of the row before."""
        return sum(entry.num_merged for entry in self.inputs)

    @property
    def skipped(self) -> dict[str, int]:
        """Skipped items by reason, the most frequent first."""
        total = sum((Counter(entry.skipped) for entry in self.inputs), Counter[str]())
        return dict(sorted(total.items(), key=lambda entry: (-entry[1], entry[0])))

    @property
    def origin(self) -> Any:
        """The settings that determine the contents of the shards: a run resumes only with equal ones."""
        settings = {name: self.settings[name] for name in _CONTENT_OPTIONS}
        return settings, [(entry.name, entry.kind, entry.path, entry.details) for entry in self.inputs]

    def save(self, folder: Path) -> None:
        """Replace the file atomically, after everything it describes is on disk."""
        names = ("num_samples", "num_merged", "num_skipped", "skipped")
        totals = {name: getattr(self, name) for name in names}
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
                    f"{path}: version {content['version']}; this release writes version {VERSION}. Choose another "
                    "folder"
                )
            item_id = content["next_item"]
            return PrepareReport(
                settings=content["settings"],
                inputs=[InputReport(**entry) for entry in content["inputs"]],
                num_shards=content["num_shards"],
                num_bytes=content["num_bytes"],
                next_item=None if item_id is None else (item_id[0], item_id[1], item_id[2]),
                done_after=[(each[0], each[1], each[2], each[3]) for each in content["done_after"]],
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{path}: cannot be read: {error!r}. Remove {folder}, or choose another") from error
