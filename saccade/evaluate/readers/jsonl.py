"""Read tables of captions and questions, the format for data of one's own: the tables that `data prepare` reads
(`saccade.data.readers.jsonl`), one JSON object per line, CSV or TSV. Each row has

id        text; the row number if not given
image     a path below the image folder; or `images`, a list of them; or `file_name`, in image folders; or none
question  text; without one the example is an image with captions
answer    text; or `answers`, several accepted ones; or `caption`, `captions`, `text`
choices   the options of a multiple-choice question; `answer` is one of them, its letter or its index
group     a category to score apart
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.data.readers.jsonl import Entry, read_entries
from saccade.data.readers.reader import Skipped
from saccade.errors import DataError
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec, ImageFolder


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per row; consecutive captions of one image are one example."""
    examples = []
    for path in files:
        folder = ImageFolder(path, spec)
        prefix = f"{path.stem}/" if len(files) > 1 else ""
        for entry in read_entries(path):
            if isinstance(entry, Skipped):
                raise _unreadable(path, entry)
            where = f"{path}, row {entry.number + 1}"
            examples.append(_example(entry, f"{prefix}{entry.fields.get('id', entry.number + 1)}", folder, where))
            if (
                path.suffix == ".jsonl" and path.name != "metadata.jsonl"
            ):  # other tables have columns that are not for us
                _check_fields(entry, where)
    return examples


def _unreadable(path: Path, row: Skipped) -> DataError:
    where = f"{path}, row {int(row.key) + 1}"
    if row.reason == "not a JSON object":
        return DataError(f"{where}: cannot be read as one JSON object per line: {row.detail}. Check the file")
    if row.reason == "no text":
        return DataError(f"{where}: no answer. Give it answer, answers, caption or captions")
    return DataError(f"{where}: {row.reason}: {row.detail}. Check the file")


def _check_fields(entry: Entry, where: str) -> None:
    if surplus := entry.fields.keys() - {"id", "group"}:
        known = "answer, answers, caption, captions, choices, file_name, group, id, image, images, question, text"
        raise DataError(f"{where}: unknown field {min(surplus)!r}. Fields: {known}")


def _example(entry: Entry, name: str, folder: ImageFolder, where: str) -> Example:
    choices = entry.choices
    return Example(
        id=name,
        images=tuple(folder.find(path) for path in entry.images),
        question=entry.question,
        references=tuple(_choice(text, choices, where) if choices else str(text).strip() for text in entry.texts),
        choices=choices,
        group=str(entry.fields.get("group") or ""),
    )


def _choice(answer: Any, choices: tuple[str, ...], where: str) -> str:
    """The text of the right choice, given as text, letter or index."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return choices[answer]
    if str(answer) in choices:
        return str(answer)
    letter = str(answer).strip().upper()
    if len(letter) == 1 and 0 <= ord(letter) - ord("A") < len(choices):
        return choices[ord(letter) - ord("A")]
    raise DataError(f"{where}: the answer {answer!r} is none of the choices {list(choices)}")
