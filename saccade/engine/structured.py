"""Structured output: JSON, a regular expression, choices or a grammar. Plain data; `core/grammar.py` enforces it."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import ConfigError

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 100
MAX_REGEX_BYTES = 16 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form of an output. Exactly one field is set."""

    json_schema: Mapping[str, Any] | str | None = None
    """JSON that is valid under this schema, given as an object or as text, and kept as text. Properties come in the
    schema's order."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that matches this regular expression as a whole. No look-around, no backreferences; \\d is 0 to 9."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text of this grammar, in Lark's notation; the start rule is `start`."""

    def __post_init__(self) -> None:
        chosen = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(chosen) != 1:
            raise ConfigError(
                f"structured sets {' and '.join(chosen) or 'nothing'}; set exactly one of {', '.join(_KINDS)}"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _checked_schema(self.json_schema))
        if self.json_object not in (True, False):
            raise ConfigError(f"json_object is {reprlib.repr(self.json_object)}; use true")
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_BYTES)
            _check_regex("regex", self.regex)
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)
        if self.choice is not None:
            if not isinstance(self.choice, tuple) or not 0 < len(self.choice) <= MAX_CHOICES:
                raise ConfigError(f"choice is {reprlib.repr(self.choice)}; use a tuple of 1 to {MAX_CHOICES} texts")
            for text in self.choice:
                _check_text("choice", text, MAX_CHOICE_BYTES)
            _check_text("choice", "".join(self.choice), MAX_CHOICE_BYTES)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    def to_dict(self) -> dict[str, Any]:
        """Return the constraint as JSON; `from_dict` is the inverse."""
        value = getattr(self, self.kind)
        return {self.kind: list(value) if isinstance(value, tuple) else value}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> StructuredOutput:
        """Read the fields of a message or of a request body."""
        if not isinstance(fields, Mapping) or (unknown := sorted(map(str, fields.keys() - set(_KINDS)))):
            named = reprlib.repr(fields) if not isinstance(fields, Mapping) else ", ".join(unknown)
            raise ConfigError(f"structured has {named}; its fields are {', '.join(_KINDS)}")
        choice = fields.get("choice")
        return StructuredOutput(**{**fields, **({"choice": tuple(choice)} if isinstance(choice, list) else {})})


_VALUES = {"enum", "const", "default", "examples"}
"""Keywords of JSON Schema whose content is a value of the output, not a schema."""
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose content is schemas by name."""
_KINDS = tuple(field.name for field in dataclasses.fields(StructuredOutput))


def _check_text(name: str, value: object, max_bytes: int) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {reprlib.repr(value)}; use text that is not empty")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not valid Unicode (half of a surrogate pair). Remove it") from error
    if num_bytes > max_bytes:
        raise ConfigError(f"{name} has {num_bytes} bytes; at most {max_bytes} are supported")


def _check_regex(name: str, regex: str) -> None:
    """Refuse an expression that the grammar library would misread. It refuses other errors itself."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ConfigError(f"{name} ends with a backslash that escapes nothing. Write it twice, or remove it")


def _checked_schema(schema: object) -> str:
    """A JSON schema as compact text, in the order of its keys."""
    if isinstance(schema, str):
        _check_text("json_schema", schema, MAX_SCHEMA_BYTES)
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError("json_schema is not JSON, or is nested too deeply. Check it with a JSON parser") from error
    _check_text("json_schema", text, MAX_SCHEMA_BYTES)
    if not isinstance(value, Mapping) or "x-guidance" in value:
        raise ConfigError(
            "json_schema is not an object, or has the key x-guidance. Use an object of JSON Schema keywords"
        )
    level: list[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        for ref in (node["$ref"] for node in level if isinstance(node, Mapping) and "$ref" in node):
            if isinstance(ref, str) and not ref.startswith("#"):
                raise ConfigError(
                    f"json_schema refers to {reprlib.repr(ref)}; only references within it (#/...) are followed"
                )
        level = [child for node in level for child in _children(node)]
        if not level:
            for pattern in _patterns(value):
                _check_regex(f"json_schema: the pattern {reprlib.repr(pattern)}", pattern)
            return text
    raise ConfigError(f"json_schema is nested more than {MAX_SCHEMA_DEPTH} levels deep. Use $defs and $ref")


def _children(node: object) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def _patterns(schema: object) -> Iterator[str]:
    """The regular expressions of a schema, for texts and for names of properties."""
    if not isinstance(schema, Mapping):
        for child in _children(schema):
            yield from _patterns(child)
        return
    for keyword, content in schema.items():
        if keyword == "pattern" and isinstance(content, str):
            yield content
        elif keyword in _BY_NAME and isinstance(content, Mapping):
            yield from map(str, content if keyword == "patternProperties" else ())
            yield from _patterns(list(content.values()))
        elif keyword not in _VALUES:
            yield from _patterns(content)
