"""Read shard folders: the captions, questions or first turns of each sample that curation keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import Sample, TextRules, conversations, description, image_names, images
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec


@dataclass(frozen=True)
class ShardImage:
    """An image of a sample in a shard folder."""

    index: ShardIndex
    shard: int
    row: int
    number: int
    key: str

    @property
    def name(self) -> str:
        """Shard, key and number of the image."""
        return f"{self.index.shards[self.shard].removesuffix('.tar')}/{self.key}/{self.number}"

    def read(self) -> bytes:
        """Read the sample from its shard."""
        return images(self.index.read_sample(self.shard, self.row))[self.number]


def read(_files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """The examples of every kept sample, in the order of the shards."""
    index = open_index(spec.path)
    return [
        example
        for shard in range(len(index.shards))
        for row in index.kept(shard).tolist()
        for example in _examples(index, shard, row)
    ]


def _examples(index: ShardIndex, shard: int, row: int) -> Iterator[Example]:
    sample = index.read_sample(shard, row)
    count = len(image_names(sample.members))
    images = tuple(ShardImage(index, shard, row, number, sample.key) for number in range(count))
    name, fields = f"{index.shards[shard].removesuffix('.tar')}/{sample.key}", description(sample)
    if questions := fields.get("questions"):
        for number, asked in enumerate(questions):
            yield Example(id=f"{name}/{number}", images=images, **_question(asked))
    elif fields.get("messages") or fields.get("conversations"):
        question, answer = _first_turn(sample)
        yield Example(id=name, images=images, question=question, references=(answer,))
    else:
        captions = [_text(variant[-1]) for variant in conversations(sample, TextRules())]
        yield Example(id=name, images=images, references=tuple(captions))


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
