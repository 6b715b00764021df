"""Examples: images, a question or none, and the expected answers. Images are read when they are needed."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from saccade.errors import DataError
from saccade.evaluate.model import Conversation


class ExampleImage(Protocol):
    """An encoded image that can be read."""

    @property
    def name(self) -> str:
        """Identity of the image within its data: equal for the same image, different for different ones."""

    def read(self) -> bytes:
        """Return the encoded image."""


@dataclass(frozen=True)
class ImageFile:
    """An image file."""

    path: Path
    name: str
    """Path relative to the data, or to the folder of images if one was given."""

    def read(self) -> bytes:
        """Read the file."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}. Check --images") from error


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example of a task. Fields that the task does not need may be left out."""

    id: str
    """Id that is unique in the data."""
    images: tuple[ExampleImage, ...]
    """Images in the order they are shown."""
    question: str | None = None
    """Question; None: the example is an image with captions."""
    references: tuple[str, ...] = ()
    """Captions or accepted answers."""
    choices: tuple[str, ...] = ()
    """Options of a multiple-choice question; the references name the right one."""
    group: str = ""
    """Category that is scored apart, such as the sampling of POPE."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further fields on which a benchmark's score depends."""
    is_interleaved: bool = False
    """Whether images are shown at `<image 1>`, `<image 2>`, ... in the text, instead of before it."""

    @property
    def image_key(self) -> str:
        """Key that examples about the same images share, since their scores are not independent."""
        return image_key([image.name for image in self.images], self.id)

    def conversation(self, prompt: str) -> Conversation:
        """Build one user turn: the images and then the prompt, or each image where the prompt first mentions it."""
        shown = [{"type": "image", "image": image.read()} for image in self.images]
        content = _interleave(prompt, shown) if self.is_interleaved else [*shown, {"type": "text", "text": prompt}]
        return [{"role": "user", "content": content}]


def _interleave(prompt: str, images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put each image at its first mark in the text, and images without a mark before the text."""
    parts: list[dict[str, Any]] = []
    text, left = "", {f"<image {number}>": image for number, image in enumerate(images, 1)}
    for piece in re.split(r"(<image \d+>)", prompt):
        if piece in left:
            parts += [{"type": "text", "text": text.strip()}, left.pop(piece)]
            text = ""
        else:
            text += piece
    parts.append({"type": "text", "text": text.strip()})
    return [*left.values(), *(part for part in parts if part.get("text") != "")]


def image_key(names: Sequence[str], example_id: str) -> str:
    """Return the key of an example about these images; an example without images has its own."""
    return json.dumps(list(names) or example_id, ensure_ascii=False)


def select_examples(examples: Sequence[Example], limit: int | None, seed: int) -> list[Example]:
    """Choose a random subset of `limit` examples, in order; all of them without a limit."""
    if limit is None or limit >= len(examples):
        return list(examples)
    chosen = random.Random(seed).sample(range(len(examples)), limit)  # noqa: S311 - not a secret
    return [examples[number] for number in sorted(chosen)]


def shuffle_images(examples: Sequence[Example], seed: int) -> list[Example]:
    """Give every example the images of another one, to measure what a model scores without looking.

    Examples about the same images get the same other images, of the same number where possible.
    """
    by_key = {example.image_key: example.images for example in examples if example.images}
    every = sorted(by_key)
    random.Random(seed).shuffle(every)  # noqa: S311 - not a secret
    others: dict[str, tuple[ExampleImage, ...]] = {}
    for count in sorted({len(shown) for shown in by_key.values()}):
        keys = [key for key in every if len(by_key[key]) == count]
        given = keys[1:] + keys[:1] if len(keys) > 1 else [key for key in every if key not in keys][:1]
        others |= {key: by_key[other] for key, other in zip(keys, given, strict=False)}
    return [replace(example, images=others.get(example.image_key, ())) for example in examples]


def fingerprint(examples: Sequence[Example]) -> str:
    """Hash the examples: their images' names, questions and references."""
    digest = hashlib.sha256()
    for one in examples:
        fields = [one.id, one.image_key, one.question, one.references, one.choices, one.group, dict(one.details)]
        digest.update(json.dumps(fields, ensure_ascii=False).encode())
    return digest.hexdigest()[:16]
