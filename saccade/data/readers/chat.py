"""Read conversations about images from json or jsonl, as LLaVA and ShareGPT publish them.

A record has `conversations` (from, value) or `messages` (role, content), and `image` or `images`: paths below the image
folder or data URLs. OpenAI messages may name the images in their parts instead. A record without images is a text-only
sample.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.data.readers.json_files import read_values
from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Part,
    UnusableError,
    file_part,
    image_folder,
    make_sample,
    read_image,
    read_item,
)
from saccade.data.sample import Sample

_TURNS = ("messages", "conversations")


def list_parts(spec: InputSpec) -> list[Part]:
    """The file."""
    return [file_part(spec.path)]


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the records in order, from number `begin`."""
    for number, record in enumerate(read_values(Path(part.path), begin), begin):
        key = str(record["id"]) if isinstance(record, dict) and "id" in record else str(number)
        yield read_item(key, _sample, spec, key, record)


def _sample(spec: InputSpec, key: str, record: Any) -> Sample:
    if not isinstance(record, dict):
        raise record if isinstance(record, UnusableError) else UnusableError("not a JSON object")
    name = next((name for name in _TURNS if record.get(name)), None)
    if name is None:
        raise UnusableError("no conversation")
    turns, images = split_images(record[name])
    listed = record.get("image") or record.get("images") or images
    images = listed if isinstance(listed, list) else [listed]
    metadata = {field: value for field, value in record.items() if field not in ("image", "images")}
    metadata[name] = turns
    paths = [image for image in images if isinstance(image, str) and not image.startswith("data:")]
    if paths:
        metadata["file_names"] = paths
    return make_sample(spec, key, [read_image(image_folder(spec), image) for image in images], metadata)


def split_images(turns: Any) -> tuple[Any, list[Any]]:
    """Separate messages from the images they name: the messages with bare image parts, and the images in order."""
    if not isinstance(turns, list):
        raise UnusableError("no conversation")
    bare, images = [], []
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        if not isinstance(content, list):
            bare.append(turn)
            continue
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image", "image_url"):
                named = part.get(kind)
                images.append(named.get("url") if isinstance(named, dict) else named)
                parts.append({"type": "image"})
            else:
                parts.append(part)
        bare.append({**turn, "content": parts})
    return bare, [image for image in images if image]
