"""What all sources share: how one is named, what it consists of, what comes out of it.

A source is a list of parts (files), a part a list of items in a fixed order; reading can begin at any item. An item is a `Sample`,
a `Link` (a sample whose image is still on the web) or `Skipped` with the one reason it is counted under.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

from saccade.data.sample import Sample, TextRules, conversations, image_names
from saccade.errors import DataError
from saccade.processor.image import MediaLimits

P = ParamSpec("P")

MAX_IMAGE_BYTES = MediaLimits().max_bytes
"""Larger images are skipped: training would refuse them."""


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """Where samples come from and how to read them."""

    path: str
    """File, folder or glob."""
    kind: str | None = None
    """One of `KINDS`; found out from the path if None."""
    images: Path | None = None
    """Folder that image paths in a json or Parquet file are relative to; the file's own folder if None."""
    annotations: Path | None = None
    """VQA: the file with the answers; looked for beside the questions if None."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Parquet: the column of a role (`image text conversations question answer url`) where its name does not tell."""
    name: str | None = None
    """What the samples say as their `source`; the name of the file or folder if None."""
    licence: str | None = None
    """What the samples say as their `licence`, unless they state one."""


@dataclass(frozen=True)
class Part:
    """One file of a source (or one folder of loose files)."""

    path: str
    num_bytes: int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Skipped:
    """An item that is no sample; `reason` is one of a few, for counting, `detail` is about this item."""

    key: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Link:
    """A sample that lacks its image."""

    key: str
    url: str
    metadata: Mapping[str, Any]
    text: str


Item = Sample | Link | Skipped


class UnusableError(Exception):
    """One item cannot become a sample: the reason it is counted under, and what is particular to it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def read_item(key: str, make: Callable[P, Sample | Link], *args: P.args, **kwargs: P.kwargs) -> Item:
    """What `make` returns for these arguments, or the item as skipped."""
    try:
        return make(*args, **kwargs)
    except UnusableError as error:
        return Skipped(key, error.reason, error.detail)


def make_sample(
    spec: InputSpec, key: str, images: Sequence[bytes], metadata: Mapping[str, Any], text: str | None = None
) -> Sample:
    """Images as they are under names that say their true format, the text, and everything else as json."""
    members: dict[str, bytes] = {}
    for number, data in enumerate(images):
        extension = image_extension(data)
        if extension is None:
            raise UnusableError("not an image", f"begins with {data[:16]!r}")
        if len(data) > MAX_IMAGE_BYTES:
            raise UnusableError("image too large", f"over {MAX_IMAGE_BYTES} bytes")
        members[extension if len(images) == 1 else f"{number}.{extension}"] = data
    if text is not None:
        members["txt"] = encode(text)
    return complete(spec, key, members, metadata)


def complete(spec: InputSpec, key: str, members: Mapping[str, bytes], fields: Mapping[str, Any]) -> Sample:
    """A sample with its json written from `fields`, if it can be learned from. Only conversations do without an image."""
    sample = Sample(key, spec.name or "", {**members, "json": encode_json(spec, key, fields)})
    if not image_names(members) and not (fields.get("messages") or fields.get("conversations")):
        raise UnusableError("no image")
    try:
        conversations(sample, TextRules())
    except DataError as error:
        raise UnusableError("no usable text", str(error)) from error
    return sample


def encode_json(spec: InputSpec, key: str, metadata: Mapping[str, Any]) -> bytes:
    """A sample's json: what is known of it, with `id`, `source` and `licence` where it does not state them."""
    labels = {"id": key, "source": spec.name, "licence": metadata.get("license") or spec.licence}
    missing = {name: label for name, label in labels.items() if label is not None and not metadata.get(name)}
    return encode(json.dumps(plain({**metadata, **missing}), ensure_ascii=False))


def encode(text: str) -> bytes:
    """UTF-8, if that is what it can be."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError("text is not valid Unicode") from error


def plain(value: Any) -> Any:
    """A value as JSON can hold it: no NaN, no bytes; what JSON does not know becomes text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items() if not isinstance(inner, bytes)}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value if not isinstance(inner, bytes)]
    return str(value)


def image_extension(data: bytes) -> str | None:
    """The format of an encoded image by its first bytes; None if it is none that is read here."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"BM") and data[6:10] == b"\0\0\0\0" and len(data) > 26:
        return "bmp"
    return None


def read_image(folder: Path, name: object) -> bytes:
    """An image a source names by its path, which must not lead out of the folder, or gives as a data URL."""
    if not isinstance(name, str) or not name:
        raise UnusableError("no image")
    if name[:5].lower() == "data:":
        return _read_data_url(name)
    if "://" in name:
        raise UnusableError("image is a web link", name)
    path = folder / name
    if not path.is_relative_to(folder) or ".." in Path(name).parts:
        raise UnusableError("image path leaves the image folder", name)
    return read_image_file(path)


def _read_data_url(url: str) -> bytes:
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except ValueError as error:
        raise UnusableError("image is not valid base64") from error


def read_image_file(path: Path) -> bytes:
    """Its bytes; of a file that is too large one byte too many."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except FileNotFoundError as error:
        raise UnusableError("image file missing", str(path)) from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UnusableError("image file unreadable", f"{path}: {error}") from error


def file_part(path: str) -> Part:
    """A single file as a part."""
    try:
        return Part(path, Path(path).stat().st_size)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Check the path") from error


def image_folder(spec: InputSpec) -> Path:
    """Where the images are that a file names by path."""
    return spec.images if spec.images is not None else Path(spec.path).parent


def load_json(path: Path | str) -> Any:
    """A whole JSON file."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}. Check the file") from error


def records(content: Any, field_name: str, path: Path | str) -> list[dict[str, Any]]:
    """The list of objects under a field of a JSON file."""
    found = content.get(field_name) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise DataError(f"{path}: no list of objects called {field_name!r}. Name the kind of the source: KIND:{path}")
    return found
