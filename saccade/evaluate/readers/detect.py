"""Find the format of evaluation data and read it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.data.readers.jsonl import SUFFIXES, is_table
from saccade.errors import ConfigError, DataError
from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import Published, has_published, read_published
from saccade.evaluate.readers.reader import DataSpec

KINDS = {
    "shards": "WebDataset tars: json captions, questions or messages, as for training",
    "coco": "COCO captions: captions_*.json",
    "vqa": "VQA v2: *_questions.json next to *_annotations.json",
    "chartqa": "ChartQA: *_human.json, *_augmented.json, images in png/",
    "nlvr": "NLVR and NLVR2: one sentence per line, images by identifier",
    "pope": "POPE: coco_pope_*.json, one question per line",
    "published": "Parquet or TSV of a benchmark as it is published, read by the task of its name",
    "jsonl": "one JSON object per line, CSV or TSV: image, question, answer or answers, choices, captions",
}
"""Each but `published` is read by the module of its name."""

_HEAD_BYTES = 1 << 16


def parse_spec(text: str, images: Path | None = None) -> DataSpec:
    """`PATH` or `KIND:PATH`."""
    kind, colon, path = text.partition(":")
    if colon and kind in KINDS:
        return DataSpec(path=path, kind=kind, images=images)
    return DataSpec(path=text, images=images)


def read_examples(spec: DataSpec, published: Published | None = None) -> list[Example]:
    """All examples of a path, with distinct ids. `published`: the benchmark of the task they are for."""
    kind = kind_of(spec, published)
    if kind not in KINDS:
        raise ConfigError(f"no format of evaluation data is called {kind!r}.\n{_kinds()}")
    if kind == "published":
        if published is None:
            raise ConfigError(
                f"{spec.path}: Parquet and TSV are read by the task of a published benchmark. Name it, or give jsonl"
            )
        examples = read_published(spec.path, published)
    else:
        read: Callable[[Sequence[Path], DataSpec], list[Example]]
        read = import_module(f"saccade.evaluate.readers.{kind}").read
        examples = read([] if kind == "shards" else _files(spec.path, kind), spec)
    if not examples:
        raise DataError(f"{spec.path}: no examples. Check the path")
    repeated = [example_id for example_id, count in Counter(one.id for one in examples).items() if count > 1]
    if repeated:
        raise DataError(f"{spec.path}: {len(repeated)} ids are not unique, such as {repeated[0]!r}. Give each its own")
    return examples


def kind_of(spec: DataSpec, published: Published | None = None) -> str:
    """The format of data: as named, or detected."""
    if spec.kind is not None:
        return spec.kind
    return "published" if published is not None and has_published(spec.path) else detect(spec.path)


def detect(path: str) -> str:
    """The format of a path, by its names and the beginning of its files."""
    where = Path(path)
    if "://" in path or "*" in path or "{" in path or where.suffix == ".tar" or next(where.glob("*.tar"), None):
        return "shards"
    if not where.exists():
        raise DataError(f"{path}: no such file or folder. Check --data")
    if where.suffix == ".parquet":
        return "published"
    found = {kind: file for file in _annotation_files(where) if (kind := _sniff(file)) is not None}
    if len(found) != 1:
        several = " and ".join(f"{file.name} is {kind}" for kind, file in found.items())
        raise DataError(f"{path}: {several or 'no file in a known format'}. Name the format, KIND:PATH\n{_kinds()}")
    return next(iter(found))


def _files(path: str, kind: str) -> list[Path]:
    """The annotation files of one format."""
    where = Path(path)
    if where.is_file():
        return [where]
    if not where.is_dir():
        raise DataError(f"{path}: no such file or folder. Check --data")
    files = [file for file in _annotation_files(where) if _sniff(file) == kind]
    if not files:
        raise DataError(f"{path}: no file in the format {kind}. Check --data\n{_kinds()}")
    return files


def _annotation_files(where: Path) -> list[Path]:
    """The file itself, or the json files and tables of a folder, or else the json files one folder below."""
    if where.is_file():
        return [where]
    files = sorted(file for file in where.iterdir() if file.suffix in (".json", *SUFFIXES))
    return files or sorted(where.glob("*/*.json"))


def _sniff(path: Path) -> str | None:
    """The format of a file by its first record; None if it is none of ours."""
    if path.suffix in (".csv", ".tsv"):
        return "jsonl" if is_table(path) else None
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    if head.startswith("{") and (record := _first_line(head)) is not None:
        return _kind_of_record(record, path)
    if head.startswith("["):
        return "chartqa" if '"imgname"' in head else "pope" if '"label"' in head else None
    if '"questions"' in head:
        return "vqa"
    return "coco" if '"images"' in head or ('"annotations"' in head and '"caption"' in head) else None


def _first_line(head: str) -> dict[str, Any] | None:
    try:
        record = json.loads(head.partition("\n")[0])
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _kind_of_record(record: dict[str, Any], path: Path) -> str | None:
    if {"images", "annotations"} <= record.keys():
        return "coco"
    if "questions" in record and isinstance(record["questions"], list):
        return "vqa"
    if "sentence" in record and "identifier" in record:
        return "nlvr"
    if {"text", "label", "image"} <= record.keys():
        return "pope"
    is_example = record.keys() & {"question", "caption", "captions", "answer", "answers", "file_name"}
    return "jsonl" if is_example or path.suffix == ".jsonl" else None


def _kinds() -> str:
    width = max(map(len, KINDS))
    return "\n".join(f"  {kind:{width}}  {meaning}" for kind, meaning in KINDS.items())
