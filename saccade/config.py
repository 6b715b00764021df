"""Configuration: frozen dataclasses, one TOML file, `--set a.b=c`; unknown keys are refused with the nearest match.

    config = load_config(TrainConfig, Path("recipes/tiny.toml"), overrides=["stages.learn.optimizer.lr=3e-4"])
    write_config(config, run / "config.toml")          # the resolved config; loading it back gives an equal object

Decoding is strict: an unknown key, a missing value and a value of another type are errors that name the key by its
path. An int is accepted for a float; nothing else is converted. A dataclass may have a `RENAMED` class variable,
{old key: new key}: an old key is refused with a message that names the new one. (Existing decoders either ignore
unknown keys, convert strings silently or bring a validation framework; this module is the part we need.)
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from saccade.errors import ConfigError
from saccade.files import atomic_write

T = TypeVar("T")


def check_positive(config: object, *names: str) -> None:
    """Refuse a field that is 0 or less; for `__post_init__` of a config."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")


def load_config(kind: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Read a TOML file, apply `a.b=c` overrides, decode strictly into `kind`."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. Check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a TOML file") from error
    return _apply_overrides(kind, tree, overrides, where=str(path))


def override_config(config: T, overrides: Sequence[str], where: str) -> T:
    """A config with `a.b=c` overrides applied; `where` is what the config is called in errors."""
    return _apply_overrides(type(config), encode(config), overrides, where)


def _apply_overrides(kind: type[T], tree: dict[str, Any], overrides: Sequence[str], where: str) -> T:
    """Put the overrides into the tree, then decode it."""
    for override in overrides:
        _apply_override(tree, override, getattr(kind, "ALTERNATIVES", ()))
    return decode(kind, tree, where)


def _apply_override(tree: Any, override: str, alternatives: Sequence[str]) -> None:
    """Put one `a.b=value` into the tree. The value is read as TOML; what is not TOML is a plain string.

    Of `alternatives` a section has one: setting it removes the others.
    """
    key, separator, text = override.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names):
        raise ConfigError(f"--set {override!r}: write it as section.key=value, for example --set language.num_layers=4")
    for name in names[:-1]:
        tree = _step_into(tree, name, override)
    if isinstance(tree, list):
        raise ConfigError(f"--set {override!r}: {names[-1]} is an item of a list; name the key of it that is to change")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": text.strip()}
    if len(parsed) > 1:
        raise ConfigError(f"--set {override!r}: one key and one value at a time; repeat --set for more")
    if names[-1] in alternatives:
        for other in alternatives:
            tree.pop(other, None)
    tree[names[-1]] = parsed["value"]


def _step_into(tree: Any, name: str, override: str) -> Any:
    """Return the section or list `name` of a section, made if missing, or the item of a list by number or `name`."""
    if isinstance(tree, list):
        for number, item in enumerate(tree):
            if isinstance(item, dict) and name in (str(number), item.get("name")):
                return item
        raise ConfigError(
            f"--set {override!r}: no item {name} in a list of {len(tree)}. Use its number from 0, or its name"
        )
    inner = tree.setdefault(name, {})
    if not isinstance(inner, dict | list):
        raise ConfigError(f"--set {override!r}: {name} is a value, not a section")
    return inner


def decode(kind: type[T], tree: object, where: str = "config") -> T:
    """Turn nested dicts into the dataclass `kind`; errors start with `where` and name the key by its path."""
    value: T = _decode(kind, tree, where, path="")
    return value


def _decode(kind: Any, value: object, where: str, path: str) -> Any:
    """Decode one value by its annotation.

    The annotation is a dataclass, Optional/Union, Literal, tuple[X, ...], dict[str, X] or a plain type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where, path)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, where, path)
    if origin is typing.Literal:
        if not any(value == one and type(value) is type(one) for one in arguments):
            raise ConfigError(f"{where}: {path} = {value!r} is not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_decode(arguments[0], item, where, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: _decode(arguments[1], item, where, f"{path}.{name}") for name, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: {path} = {value!r} has type {type(value).__name__}, expected {_expected(kind)}")


def _decode_union(kinds: Sequence[Any], value: object, where: str, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    real = [kind for kind in kinds if kind is not type(None)]
    for kind in real[:-1]:
        try:
            return _decode(kind, value, where, path)
        except ConfigError:
            continue
    return _decode(real[-1], value, where, path)


def _decode_dataclass(kind: Any, value: object, where: str, path: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {path or 'the file'} must be a section with keys, not {value!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    annotations = _annotations(kind)
    dotted = {name: f"{path}.{name}" if path else name for name in [*fields, *value]}
    renamed: dict[str, str] = getattr(kind, "RENAMED", {})
    for name in value:
        if name in renamed:
            raise ConfigError(f"{where}: {dotted[name]} is now called {renamed[name]}. Rename the key")
        if name not in fields:
            raise ConfigError(f"{where}: unknown key {dotted[name]}. {_suggestion(name, fields)}")
    needed = [n for n, f in fields.items() if n not in value and _has_no_default(f)]
    if needed:
        raise ConfigError(f"{where}: missing {', '.join(dotted[name] for name in needed)}. Add what is missing")
    decoded = {name: _decode(annotations[name], item, where, dotted[name]) for name, item in value.items()}
    try:
        return kind(**decoded)
    except ConfigError as error:  # a check in __post_init__: add where it happened
        raise ConfigError(f"{where}: {path + ': ' if path else ''}{error}") from error


@functools.cache
def _annotations(kind: Any) -> dict[str, Any]:
    """Annotations of a dataclass. Evaluating them each time took four fifths of the time to decode a file."""
    return typing.get_type_hints(kind)


def _suggestion(name: str, known: typing.Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {nearest[0]}?" if nearest else f"Known keys: {', '.join(sorted(known))}"


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _expected(kind: Any) -> str:
    """A type in TOML's words: a list or table of what, or the name of a plain type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin not in (tuple, dict):
        return _name(kind)
    container, item = ("a list of", arguments[0]) if origin is tuple else ("a table of", arguments[1])
    return f"{container} {'sections' if dataclasses.is_dataclass(item) else _expected(item)}"


def encode(config: object) -> dict[str, Any]:
    """The dataclass as nested plain dicts.

    A field that is None is left out, for TOML has no null: its default must be None.
    """
    assert dataclasses.is_dataclass(config), "encode takes a config dataclass"

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
            lost = [field.name for field, item in pairs if item is None and field.default is not None]
            if lost:
                raise ConfigError(f"{', '.join(lost)} cannot be None: a file could not say so")
            return {field.name: plain(item) for field, item in pairs if item is not None}
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    encoded: dict[str, Any] = plain(config)
    return encoded


def write_config(config: object, path: Path) -> None:
    """Write the resolved config as TOML, so that a run can be inspected and repeated. Atomic."""
    with atomic_write(path) as temporary:
        temporary.write_text("\n".join(_toml_lines(encode(config))) + "\n", encoding="utf-8")


def _toml_lines(section: dict[str, Any], name: str = "") -> list[str]:
    """Plain values first, then each sub-section under its header."""
    lines = [
        f"{_toml_key(key)} = {_toml_value(value)}" for key, value in section.items() if not isinstance(value, dict)
    ]
    for key, value in section.items():
        if isinstance(value, dict):
            inner = f"{name}.{_toml_key(key)}" if name else _toml_key(key)
            lines += ["", f"[{inner}]", *_toml_lines(value, inner)]
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # the one character JSON allows and TOML does not


# ------------------------------------------------------------------ reference


def describe_keys(kind: type) -> str:
    """A Markdown reference of every key of a config dataclass: type, default, docstring."""
    lines = [
        f"# Keys of {kind.__name__}",
        "",
        "Generated from the dataclasses; do not edit. In `[[section]]` a key belongs to each entry of a list.",
        *_describe_section(kind, ""),
    ]
    return "\n".join(lines) + "\n"


def _describe_section(kind: Any, header: str) -> list[str]:
    """The table of one dataclass, then those of its sections."""
    fields, docs = dataclasses.fields(kind), _field_docs(kind)
    annotations = _annotations(kind)
    lines = [
        "",
        f"## `{header or 'top level'}`",
        "",
        _first_line(kind.__doc__),
        "",
        "| key | type | default | |",
        "|---|---|---|---|",
    ]
    sections: list[str] = []
    for field in fields:
        section, brackets = _section_of(annotations[field.name])
        if section is not None:
            inner = f"{header.strip('[]')}.{field.name}".strip(".")
            sections += _describe_section(section, f"[[{inner}]]" if brackets else f"[{inner}]")
        type_name = "section" if section is not None else _type_name(annotations[field.name])
        cells = (f"`{field.name}`", type_name, _default_of(field), docs.get(field.name, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines + sections


def _section_of(annotation: Any) -> tuple[Any, bool]:
    """(dataclass, whether it is a list of them) of a field that is a section; (None, False) otherwise."""
    arguments = typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return annotation, False
    if typing.get_origin(annotation) is tuple and dataclasses.is_dataclass(arguments[0]):
        return arguments[0], True
    return next(((one, False) for one in arguments if dataclasses.is_dataclass(one)), (None, False))


def _field_docs(kind: Any) -> dict[str, str]:
    """The docstring under each field, from the source."""
    [body] = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    return {
        ast.unparse(field.target): _first_line(str(text.value.value))
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _first_line(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(json.dumps(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return f"list of {_type_name(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is dict:
        return "table"
    if arguments := [one for one in typing.get_args(annotation) if one is not type(None)]:
        return ", ".join(map(_type_name, arguments))
    return {"str": "string", "Path": "path", "int": "integer"}.get(_name(annotation), _name(annotation))


def _default_of(field: dataclasses.Field[Any]) -> str:
    if _has_no_default(field):
        return "required"
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is None or dataclasses.is_dataclass(value):
        return ""
    return f"`{_toml_value(list(value) if isinstance(value, tuple) else value)}`"
