"""The kinds of inputs, how a kind is detected from the path, and reading any of them.

"coco:captions.json"  ->  InputSpec  ->  Input: kind known, parts listed, cheap checks done  ->  items
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from saccade.data.image_formats import IMAGE_EXTENSIONS
from saccade.data.readers.jsonl import SUFFIXES, find_tables, is_table
from saccade.data.readers.reader import InputSpec, Item, Link, Merged, Part, Skipped, make_sample, read_item
from saccade.data.sample import Sample
from saccade.errors import ConfigError, DataError

if TYPE_CHECKING:
    from saccade.data.download import DownloadOptions

T = TypeVar("T")

KINDS = {
    "tars": "WebDataset tars, as img2dataset writes them: a folder, a tar, dir/{00000..00009}.tar",
    "files": "a folder of KEY.jpg next to KEY.txt or KEY.json",
    "urls": "Parquet with a url and a text, as LAION publishes them; the images are downloaded",
    "parquet": "Parquet with the images inside, as Hugging Face datasets writes it",
    "coco": "COCO captions: captions_*.json, images in --images",
    "vqa": "VQA v2: *_questions.json, answers in --annotations, images in --images",
    "jsonl": "captions or questions of images: one JSON object per line, or CSV or TSV with a header",
    "chat": "LLaVA or ShareGPT conversations: json or jsonl, images in --images",
}
"""Each is read by the module of its name."""

_COLUMN_ROLES = {"image", "text", "conversations", "question", "answer", "url"}
_HEAD_BYTES = 1 << 16


def parse_input(text: str, **fields: Any) -> InputSpec:
    """`PATH`, or `KIND:PATH`; `fields` are those of `InputSpec`."""
    kind, colon, path = text.partition(":")
    if colon and kind in KINDS:
        return InputSpec(path=path, **{**fields, "kind": kind})
    if colon and re.fullmatch(r"[a-z_]{2,}", kind) and not path.startswith("//") and not Path(text).exists():
        raise ConfigError(f"{text}: no kind of input is called {kind!r}.\n{_kinds()}")
    return InputSpec(path=text, **fields)


def _kinds() -> str:
    """The list that ends every error about a kind."""
    width = max(map(len, KINDS))
    return "Name the kind, KIND:PATH or --kind KIND:\n" + "\n".join(
        f"  {kind:{width}}  {KINDS[kind]}" for kind in KINDS
    )


@dataclass(frozen=True)
class Input:
    """An opened input: its kind and name are known, its parts listed."""

    spec: InputSpec
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """Stored as `source` of its samples."""
        return self.spec.name or ""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.spec.kind or ""

    def read(self, part: int, begin: int = 0) -> Iterator[Item]:
        """Read the items of one part, from number `begin`."""
        try:
            yield from _reader(self.spec).read_part(self.spec, self.parts[part], begin)
        except OSError as error:
            raise DataError(f"{self.parts[part].path}: {error.strerror or error}. Check the file") from error

    def complete(self, link: Link, image: bytes) -> Sample | Skipped:
        """The sample of a link whose image has been downloaded."""
        item = read_item(link.key, make_sample, self.spec, link.key, [image], link.metadata, link.text)
        assert isinstance(item, Sample | Skipped)
        return item


def open_input(spec: InputSpec) -> Input:
    """Detect the kind, list the parts, and check what can be checked before reading."""
    kind = spec.kind if spec.kind is not None else detect(spec.path)
    if kind not in KINDS:
        raise ConfigError(f"no kind of input is called {kind!r}.\n{_kinds()}")
    if "://" in spec.path and kind != "tars":
        raise DataError(f"{spec.path}: only tars are read remotely. Copy the files to this machine")
    if spec.images is not None and not spec.images.is_dir():
        raise DataError(f"{spec.images}: no such folder. Check --images")
    if surplus := spec.columns.keys() - _COLUMN_ROLES:
        raise ConfigError(f"no column role is called {min(surplus)!r}. Roles: {', '.join(sorted(_COLUMN_ROLES))}")
    named = replace(spec, kind=kind, name=spec.name if spec.name is not None else _name(spec.path))
    try:
        return Input(named, tuple(_reader(named).list_parts(named)))
    except DataError as error:
        if spec.kind is not None:
            raise
        raise DataError(f"{error}\nIts kind was detected as {kind}. {_kinds()}") from error
    except OSError as error:
        raise DataError(f"{spec.path}: {error.strerror or error}. Check the path") from error


def _reader(spec: InputSpec) -> Any:
    return import_module(f"saccade.data.readers.{spec.kind}")


def _name(path: str) -> str:
    """The default name of an input: captions for `data/captions.json`, laion for `data/laion/*.tar`."""
    where = Path(path)
    if where.suffix == ".tar":
        where = where.parent
    return where.stem if where.suffix in (".json", ".parquet", *SUFFIXES) else where.resolve().name


def read_input(spec: InputSpec, options: DownloadOptions | None = None) -> Iterator[Sample | Skipped | Merged]:
    """All items of an input: in order; links come as their downloads complete."""
    entry = open_input(spec)
    items = ((None, entry, item) for number in range(len(entry.parts)) for item in entry.read(number))
    return (item for _, item in download_links(items, options))


def download_links(
    items: Iterable[tuple[T, Input, Item]], options: DownloadOptions | None = None
) -> Iterator[tuple[T, Sample | Skipped | Merged]]:
    """Replace links by samples; items keep their tag, links are yielded as their downloads complete."""
    from saccade.data.download import Downloaded, DownloadOptions
    from saccade.data.download_queue import download_as_completed

    for (tag, entry, item), outcome in download_as_completed(items, _url, options or DownloadOptions()):
        if not isinstance(item, Link):
            yield tag, item
        elif isinstance(outcome, Downloaded):
            yield tag, entry.complete(item, outcome.data)
        else:
            assert outcome is not None, "every link has an outcome"
            yield tag, Skipped(item.key, outcome.reason, item.url)


def _url(tagged: tuple[Any, Input, Item]) -> str | None:
    return tagged[2].url if isinstance(tagged[2], Link) else None


def detect(path: str) -> str:
    """The kind of an input, by its name and first bytes."""
    if path.endswith(".tar") or "://" in path:
        return "tars"
    where = Path(path)
    if where.is_dir():
        return _detect_folder(where)
    if not where.is_file():
        raise DataError(f"{path}: no such file or folder. Check the path")
    if where.suffix == ".parquet":
        return _detect_parquet(where)
    with where.open("rb") as file:
        head = file.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    if b'"conversations"' in head or b'"messages"' in head:
        return "chat"
    if is_table(where):
        return "jsonl"
    if head.startswith(b"{") and b'"question_id"' in head:
        return "vqa"
    if head.startswith(b"{") and b'"images"' in head and b'"file_name"' in head:
        return "coco"
    raise DataError(f"{path}: its kind cannot be detected. {_kinds()}")


def _detect_folder(folder: Path) -> str:
    if any(folder.glob("*.tar")):
        return "tars"
    if find_tables(folder):
        return "jsonl"
    tables = next(folder.rglob("*.parquet"), None)
    has_images = any(path.suffix[1:].lower() in IMAGE_EXTENSIONS for path in folder.rglob("*"))
    if tables is not None and not has_images:
        return _detect_parquet(tables)
    if has_images and tables is None:
        return "files"
    found = "both Parquet files and images" if has_images else "neither tars, nor Parquet files, nor images"
    raise DataError(f"{folder}: it has {found}. {_kinds()}")


def _detect_parquet(path: Path) -> str:
    from saccade.data.readers.parquet import is_image, schema_of

    return "parquet" if any(is_image(field.type) for field in schema_of(str(path))) else "urls"
