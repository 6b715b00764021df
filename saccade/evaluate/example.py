"""An example: images, a question or none, and what a good answer is. Images are read when they are needed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from saccade.errors import DataError
from saccade.evaluate.model import Conversation


class ExampleImage(Protocol):
    """An encoded image somewhere."""

    @property
    def name(self) -> str:
        """Identity of the image within its data."""

    def read(self) -> bytes:
        """The encoded image."""


@dataclass(frozen=True)
class ImageFile:
    """An image in a file of its own."""

    path: Path

    @property
    def name(self) -> str:
        """Its file name."""
        return self.path.name

    def read(self) -> bytes:
        """The file."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}. Check --images") from error


@dataclass(frozen=True, kw_only=True)
class Example:
    """One thing to ask. What a task does not need may be left out."""

    id: str
    """Unique in its data."""
    images: tuple[ExampleImage, ...]
    """In the order they are shown."""
    question: str | None = None
    """None: the example is an image with captions."""
    references: tuple[str, ...] = ()
    """Captions, or accepted answers."""
    choices: tuple[str, ...] = ()
    """Options of a multiple-choice question; the references name the right one."""
    group: str = ""
    """Category that is scored apart, such as the sampling of POPE."""

    @property
    def image_key(self) -> str:
        """Equal for examples about the same images: their scores are not independent."""
        return "|".join(image.name for image in self.images) or self.id

    def conversation(self, prompt: str) -> Conversation:
        """One user turn: the images, then the prompt."""
        parts = [{"type": "image", "image": image.read()} for image in self.images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]


def select_examples(examples: Sequence[Example], limit: int | None, seed: int) -> list[Example]:
    """A random subset of `limit` examples in their order; all of them without a limit."""
    if limit is None or limit >= len(examples):
        return list(examples)
    chosen = random.Random(seed).sample(range(len(examples)), limit)  # noqa: S311 - not a secret
    return [examples[number] for number in sorted(chosen)]


def shuffle_images(examples: Sequence[Example], seed: int) -> list[Example]:
    """Give every example the images of another one: what a model scores that does not look.

    Examples about the same images get the same other images, of the same number where possible.
    """
    by_key = {example.image_key: example.images for example in examples if example.images}
    others: dict[str, tuple[ExampleImage, ...]] = {}
    for count in sorted({len(shown) for shown in by_key.values()}):
        keys = sorted(key for key, shown in by_key.items() if len(shown) == count)
        random.Random(seed).shuffle(keys)  # noqa: S311 - not a secret
        others |= {key: by_key[other] for key, other in zip(keys, keys[1:] + keys[:1], strict=True)}
    return [replace(example, images=others.get(example.image_key, ())) for example in examples]


def fingerprint(examples: Sequence[Example]) -> str:
    """Changes when an example, its images' names, its question or its references change."""
    digest = hashlib.sha256()
    for one in examples:
        fields = [one.id, one.image_key, one.question, one.references, one.choices, one.group]
        digest.update(json.dumps(fields, ensure_ascii=False).encode())
    return digest.hexdigest()[:16]
