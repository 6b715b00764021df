"""Read shard folders: the captions, questions or first turns of each sample that curation keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import Sample, TextRules, conversations, description, images
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec


@dataclass(frozen=True)
class ShardImage:
    """An image of a sample in a shard folder."""

    index: ShardIndex
    shard: int
    row: int
    number: int
    name: str
    """Shard, key and number of the first image with the same bytes: samples often repeat an image for each question."""

    def read(self) -> bytes:
        """Read the sample from its shard."""
        return images(self.index.read_sample(self.shard, self.row))[self.number]


def read(_files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """The examples of every kept sample, in the order of the shards."""
    index = open_index(spec.path)
    names: dict[bytes, str] = {}
    return [
        example
        for shard in range(len(index.shards))
        for row in index.kept(shard).tolist()
        for example in _examples(index, shard, row, names)
    ]


def _examples(index: ShardIndex, shard: int, row: int, names: dict[bytes, str]) -> Iterator[Example]:
    """The examples of a sample; `names` has the name of each image that was seen, by the hash of its bytes."""
    sample = index.read_sample(shard, row)
    name, fields = f"{index.shards[shard].removesuffix('.tar')}/{sample.key}", description(sample)
    shown = tuple(
        ShardImage(index, shard, row, number, names.setdefault(sha256(data).digest(), f"{name}/{number}"))
        for number, data in enumerate(images(sample))
    )
    if questions := fields.get("questions"):
        for number, asked in enumerate(questions):
            yield Example(id=f"{name}/{number}", images=shown, **_question(asked))
    elif fields.get("messages") or fields.get("conversations"):
        question, answer = _first_turn(sample)
        yield Example(id=name, images=shown, question=question, references=(answer,))
    else:
        captions = [_text(variant[-1]) for variant in conversations(sample, TextRules())]
        yield Example(id=name, images=shown, references=tuple(captions))


def _question(asked: dict[str, Any]) -> dict[str, Any]:
    """Fields of the example of one question."""
    answers = asked.get("answers") or [asked["answer"]]
    return {
        "question": asked["question"].replace("<image>", "").strip(),
        "references": tuple(str(answer).strip() for answer in answers),
        "choices": tuple(map(str, asked.get("choices") or ())),
        "group": str(asked.get("kind") or ""),
    }


def _first_turn(sample: Sample) -> tuple[str, str]:
    """The first question of a conversation and its answer."""
    messages = conversations(sample, TextRules())[0]
    number = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
    return "\n".join(_text(message) for message in messages[:number] if message["role"] == "user"), _text(
        messages[number]
    )


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return "".join(parts).strip()
