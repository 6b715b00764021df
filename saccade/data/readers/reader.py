"""What all readers share: how an input is named, its parts, its items, and how a sample is built.

An input is a list of parts (files), a part a list of items in a fixed order; reading can begin at any item. An item is
a `Sample`, a `Link` (a sample whose image must be downloaded), `Skipped` with the one reason it is counted under, or
`Merged` (a row whose caption went into the sample before it). A sample without an image is text-only data if it is a
conversation; otherwise its image is missing, and it is skipped.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

from saccade.data.image_formats import image_extension, unsupported_format
from saccade.data.sample import Sample, TextRules, conversations, image_names
from saccade.errors import DataError
from saccade.processor.image import MediaLimits

P = ParamSpec("P")

MAX_IMAGE_BYTES = MediaLimits().max_bytes
"""Larger images are skipped: training rejects them."""


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """One input of `data prepare`: where it is and how to read it."""

    path: str
    """File, folder or glob."""
    kind: str | None = None
    """One of `KINDS`; detected from the path if None."""
    images: Path | None = None
    """Folder that image paths in a json or Parquet file are relative to; the file's own folder if None."""
    annotations: Path | None = None
    """VQA: the file with the answers; None is the one next to the questions."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Parquet: the column of a role (image, text, conversations, question, answer or url) whose name is not a
    usual one."""
    name: str | None = None
    """Name of the input, stored as `source` of its samples; the name of the file or folder if None."""
    licence: str | None = None
    """Stored as `licence` of samples that state none."""


@dataclass(frozen=True)
class Part:
    """One file of an input (or one folder of loose files)."""

    path: str
    num_bytes: int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Skipped:
    """An item that is not a sample. `reason` is one of a few, for counting; `detail` is about this item."""

    key: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Merged:
    """A row with the image of the row before it; its caption is in that sample."""

    key: str


@dataclass(frozen=True)
class Link:
    """A sample whose image must be downloaded."""

    key: str
    url: str
    metadata: Mapping[str, Any]
    text: str


Item = Sample | Link | Skipped | Merged


class UnusableError(Exception):
    """An item cannot become a sample: the reason it is counted under, and details."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def read_item(key: str, make: Callable[P, Sample | Link], *args: P.args, **kwargs: P.kwargs) -> Item:
    """Call `make`; an `UnusableError` becomes a skipped item."""
    try:
        return make(*args, **kwargs)
    except UnusableError as error:
        return Skipped(key, error.reason, error.detail)


def make_sample(
    spec: InputSpec, key: str, images: Sequence[bytes], metadata: Mapping[str, Any], text: str | None = None
) -> Sample:
    """Build a sample: image bytes unchanged, named by their actual format, the text, and the metadata as json."""
    members: dict[str, bytes] = {}
    for number, data in enumerate(images):
        extension = check_image(data)
        if len(data) > MAX_IMAGE_BYTES:
            raise UnusableError("image too large", f"over {MAX_IMAGE_BYTES} bytes")
        members[extension if len(images) == 1 else f"{number}.{extension}"] = data
    if text is not None:
        members["txt"] = encode(text)
    return complete(spec, key, members, metadata)


def complete(spec: InputSpec, key: str, members: Mapping[str, bytes], fields: Mapping[str, Any]) -> Sample:
    """A sample with its json built from `fields`; it must have an image, or be a conversation."""
    sample = Sample(key, spec.name or "", {**members, "json": encode_json(spec, key, fields)})
    if not image_names(members) and not (fields.get("messages") or fields.get("conversations")):
        raise UnusableError("no image")
    try:
        conversations(sample, TextRules())
    except DataError as error:
        raise UnusableError("no usable text", str(error)) from error
    return sample


def encode_json(spec: InputSpec, key: str, metadata: Mapping[str, Any]) -> bytes:
    """The json of a sample: its metadata, with `id`, `source` and `licence` if they are missing."""
    labels = {"id": key, "source": spec.name, "licence": metadata.get("license") or spec.licence}
    missing = {name: label for name, label in labels.items() if label is not None and not metadata.get(name)}
    return encode(json.dumps(plain({**metadata, **missing}), ensure_ascii=False))


def encode(text: str) -> bytes:
    """Encode as UTF-8; half a surrogate pair makes the item unusable."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError("text is not valid Unicode") from error


def plain(value: Any) -> Any:
    """Convert a value for JSON: no NaN, no bytes; other types become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items() if not isinstance(inner, bytes)}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value if not isinstance(inner, bytes)]
    return str(value)


def check_image(data: bytes) -> str:
    """The extension of an encoded image; raises `UnusableError` if it is in no supported format."""
    if (extension := image_extension(data)) is not None:
        return extension
    if (name := unsupported_format(data)) is not None:
        raise unsupported_image(name)
    raise UnusableError("not an image", f"begins with {data[:16]!r}")


def unsupported_image(name: str) -> UnusableError:
    """The error of an image in a format that is not supported; `name` is the format or a file name."""
    return UnusableError("unsupported image format", f"{name}. Convert it to JPEG, PNG or WebP")


def read_image(folder: Path, name: object) -> bytes:
    """Read an image given as a path, which must not lead out of the folder, or as a data URL."""
    if not isinstance(name, str) or not name:
        raise UnusableError("no image")
    if name[:5].lower() == "data:":
        return _read_data_url(name)
    if "://" in name:
        raise UnusableError("image is a URL", name)
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
    """Read a file, up to one byte more than the limit."""
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
    """The folder that image paths of an input are relative to."""
    return spec.images if spec.images is not None else Path(spec.path).parent
