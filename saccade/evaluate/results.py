"""The results folder: settings, one line per example as it is answered, scores. Specified in docs/formats.md.

    settings.json  ->  TASK/examples.jsonl, appended as answers come  ->  scores.json, reports

A process that is killed loses the answers in progress and no others: the same command asks for the missing ones. A line
that was cut off is dropped when the folder is opened. Once all examples are answered, examples.jsonl is replaced by one
in the order of the data, with the scores of each example.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError, DataError
from saccade.files import atomic_write

VERSION = 2
"""Version of the folder. It is raised when the identity of images or the scoring changes; versions are not mixed."""
_CHANGED = {
    1: "images were identified by their file name alone, and multiple choice, ANLS, VQA accuracy and POPE were scored "
    "otherwise"
}
"""What was different in each earlier version."""


class Results:
    """An open results folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings

    @staticmethod
    def is_results(folder: Path) -> bool:
        """Whether a folder is one of results."""
        return (folder / "settings.json").is_file()

    @staticmethod
    def load(folder: Path) -> Results:
        """Open the results of an earlier evaluation."""
        try:
            settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{folder}: not a results folder ({error}). saccade evaluate -o writes one") from error
        _check_version(folder, settings.get("version"))
        return Results(folder, settings)

    @staticmethod
    def create(folder: Path, settings: Mapping[str, Any]) -> Results:
        """Open a folder for these settings: a new one, or one of an interrupted evaluation with equal settings.

        Tasks may be added to a folder; those it has must be asked in the same way.
        """
        folder.mkdir(parents=True, exist_ok=True)
        new = {"version": VERSION, **settings}
        if not Results.is_results(folder):
            if any(folder.iterdir()):
                raise ConfigError(f"{folder} is not empty and has no results. Choose another folder: -o NAME")
            return Results(folder, new)._write_settings()
        old = Results.load(folder).settings
        tasks = {**old["tasks"], **new["tasks"]}
        changes = _changed({**old, "tasks": {}, "name": ""}, {**new, "tasks": {}, "name": ""})
        for name in old["tasks"].keys() & new["tasks"].keys():
            changes += [f"{name} {change}" for change in _changed(old["tasks"][name], new["tasks"][name])]
        if changes:
            raise ConfigError(
                f"{folder} has results of other settings: {'; '.join(changes)}. Choose another folder with -o, or "
                "remove it"
            )
        return Results(folder, {**new, "tasks": tasks})._write_settings()

    def _write_settings(self) -> Results:
        write_json(self.folder / "settings.json", self.settings)
        return self

    @property
    def name(self) -> str:
        """Name of the model in reports."""
        return str(self.settings["name"])

    @property
    def scores(self) -> dict[str, Any]:
        """Content of scores.json; empty if the evaluation is not finished."""
        try:
            content: dict[str, Any] = json.loads((self.folder / "scores.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return content

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        """Replace scores.json."""
        write_json(self.folder / "scores.json", {"version": VERSION, **scores})

    def examples_path(self, task: str) -> Path:
        """Return the path of the records of a task."""
        return self.folder / task / "examples.jsonl"

    def records(self, task: str) -> list[dict[str, Any]]:
        """Read the records of a task in their order; the last one of an id counts."""
        by_id: dict[str, dict[str, Any]] = {}
        for record in _read_lines(self.examples_path(task)):
            by_id[record["id"]] = record
        return list(by_id.values())

    def replace_records(self, task: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write all records of a task at once."""
        with atomic_write(self.examples_path(task)) as path:
            path.write_text("".join(_line(record) for record in records), encoding="utf-8")


class RecordWriter:
    """Appends records to examples.jsonl, each with one write; any thread may add. Records after the end are dropped."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(path)
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = _line(record).encode()
        with self._lock:
            while line and self._file is not None:
                line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


def _check_version(folder: Path, version: Any) -> None:
    if version in _CHANGED:
        raise DataError(
            f"{folder}: results of version {version}, which this release (version {VERSION}) neither resumes nor "
            f"compares: {_CHANGED[version]}. Evaluate again into another folder: -o NAME"
        )
    if version != VERSION:
        raise DataError(
            f"{folder}: version {version} of results is newer than this release reads ({VERSION}). Update saccade"
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file; none if it does not exist."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = content[: content.rfind(b"\n") + 1].split(
        b"\n"
    )  # splitlines would split at other line breaks too, which answers may contain
    try:
        return [json.loads(line) for line in lines if line]
    except ValueError as error:
        raise DataError(f"{path}: a line is not JSON: {error}. Remove the folder and evaluate again") from error


def _drop_cut_line(path: Path) -> None:
    """Remove what follows the last line break: a record that was being written when the process was killed."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ, with both values."""
    changes = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += [f"{key}.{change}" for change in _changed(before, after)]
        elif before != after:
            changes.append(f"{key} was {before!r}, now {after!r}")
    return changes
