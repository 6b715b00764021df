"""A shard folder as a source of a stream: its index opened, its lengths measured, its samples counted and sized for the plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from saccade.data.collate import Measurer
from saccade.data.index import Progress, ShardIndex, build_lengths, open_index
from saccade.data.order import Ints
from saccade.data.sample import TextRules
from saccade.data.storage import StorageConfig
from saccade.errors import ConfigError

OnProgress = Callable[[str, Progress], None]
"""Called while something is built: what ("index of coco", "lengths of coco"), and how far it is."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One shard folder of a stream."""

    path: str | Path
    """Folder, glob, braces or one tar; local, or a URL for fsspec."""
    weight: float | None = None
    """Share of the samples drawn, relative to the other sources'; None for all sources: in proportion to their sizes."""
    rules: TextRules = field(default_factory=TextRules)
    """How its text becomes conversations."""
    name: str | None = None
    """In sample ids and logs, unique in a stream; None: the folder's name."""


@dataclass(frozen=True)
class IndexedSource:
    """A source as the plan asks for it."""

    name: str
    weight: float | None
    rules: TextRules
    index: ShardIndex
    lengths_fingerprint: str

    @staticmethod
    def open(
        source: Source, checkpoint: str, num_workers: int, on_progress: OnProgress | None, storage: StorageConfig
    ) -> IndexedSource:
        """Open the index and make sure of the lengths; what is missing is built."""

        def report(what: str) -> Callable[[Progress], None] | None:
            return on_progress and (lambda progress: on_progress(f"{what} of {source.name or source.path}", progress))

        builders = max(num_workers, 1)
        index = open_index(source.path, num_workers=builders, on_progress=report("index"), config=storage)
        measurer = Measurer(checkpoint, source.rules)
        # To look at the lengths of 10,000 shards takes a second; this mark says that they were all there.
        mark = index.folder / f"lengths-{measurer.fingerprint}" / f".complete-{index.fingerprint}"
        if not mark.exists():
            build_lengths(index, measurer, measurer.fingerprint, num_workers=builders, on_progress=report("lengths"))
            mark.touch()
        name = source.name or index.source
        if "/" in name or not name:
            raise ConfigError(f"{name!r} cannot be a source's name: it stands before a slash in sample ids")
        return IndexedSource(name, source.weight, source.rules, index, measurer.fingerprint)

    @property
    def sizes(self) -> Ints:
        """Kept samples of each shard."""
        return self.index.kept_sizes

    @property
    def fingerprint(self) -> str:
        """Changes with the shards, the decisions on their samples, and the lengths."""
        decisions = hashlib.sha256(json.dumps(self.index.summary(), sort_keys=True).encode()).hexdigest()
        return f"{self.index.fingerprint}-{decisions}-{self.lengths_fingerprint}"

    def lengths(self, shard: int, kept_rows: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Tokens and patches; none for samples that could not be measured, which will be found bad."""
        rows = self.index.kept(shard)[kept_rows]
        tokens, patches = self.index.lengths(shard, self.lengths_fingerprint)
        return tokens.pick(rows, epochs), patches[rows].astype("int64")


def listed_sources(shards: str | Path | Source | Sequence[str | Path | Source]) -> list[Source]:
    """One path or source, or several, as sources."""
    several = [shards] if isinstance(shards, str | Path | Source) else list(shards)
    return [source if isinstance(source, Source) else Source(path=source) for source in several]
