"""Probes: fixed questions that a version of a model answers correctly before it gets traffic."""

from __future__ import annotations

import json
from dataclasses import dataclass

from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question, with the answers or the JSON schema that its answer must match."""

    name: str
    """Name of the probe in decisions and logs."""
    question: str
    """Text of the question."""
    image: str | None = None
    """Path of the image that the question is about. None: a question without an image."""
    answers: tuple[str, ...] = ()
    """Accepted answers. Case and surrounding space and full stops do not count."""
    schema: str | None = None
    """JSON schema, as JSON text, that constrains the answer. None: the answer is free text."""
    max_tokens: int = 32
    """Maximum tokens of the answer."""

    def __post_init__(self) -> None:
        if not self.answers and self.schema is None:
            raise ConfigError(f"probe {self.name!r} accepts any answer. Give answers, or a schema")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; use a whole number from 1")
        if self.schema is not None:
            _check_schema(self.schema)

    def accepts(self, answer: str) -> bool:
        """Whether an answer is one of `answers`; without them, whether it is JSON. The engine enforces the schema."""
        if self.answers:
            return _normalized(answer) in map(_normalized, self.answers)
        try:
            json.loads(answer)
        except ValueError:
            return False
        return True


def _normalized(answer: str) -> str:
    return answer.strip().strip(".").strip().casefold()


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"schema is not JSON: {error}. Give a JSON schema as text") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"schema is {text}; use a JSON object")
