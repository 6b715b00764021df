"""The Jinja chat template of a checkpoint, in Jinja's immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from saccade.errors import CheckpointError, ConfigError, RequestError
from saccade.processor.folder import read_json
from saccade.processor.messages import Message
from saccade.processor.tools import Tool

_PROBE = "saccade"
"""A text that no template contains: it tests what a template writes."""


class ChatTemplate:
    """The Jinja chat template of a checkpoint."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _compile(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not parse: {error}") from error

    @staticmethod
    def load(folder: Path, source: str | None = None) -> ChatTemplate:
        """Read the template of a checkpoint folder, or take another one, with the bos and eos tokens it may use."""
        tokens = read_json(folder / "tokenizer_config.json")
        source = read_template(folder) if source is None else source
        return ChatTemplate(source, token_text(tokens, "bos_token"), token_text(tokens, "eos_token"))

    @cached_property
    def names(self) -> frozenset[str]:
        """All names that the template may look up in a message: its attributes, and its strings that could be names."""
        tree = _environment().parse(self.source)
        found = [node.attr for node in tree.find_all(jinja2.nodes.Getattr)]
        found += [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
        return frozenset(name for name in found if name.isidentifier())

    @cached_property
    def takes_parts(self) -> bool:
        """Whether content must be a list of parts: a plain string would vanish."""
        return not self._writes(_PROBE) and self._writes([{"type": "text", "text": _PROBE}])

    @cached_property
    def takes_text(self) -> bool:
        """Whether the text of a message is part of the prompt; otherwise this is no chat template."""
        return self.takes_parts or self._writes(_PROBE)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether tools are part of the prompt."""
        tools = [{"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}]
        return self._writes([{"type": "text", "text": "x"}] if self.takes_parts else "x", tools)

    def _writes(self, content: str | list[dict[str, str]], tools: Sequence[Tool] | None = None) -> bool:
        try:
            messages = [{"role": "user", "content": content}]
            return _PROBE in self.render(messages, add_generation_prompt=False, tools=tools)
        except RequestError:
            return False

    def content_of(self, message: Message) -> str | list[dict[str, Any]]:
        """The content of a checked message as the template takes it: parts, or one string if there is only text."""
        content = message["content"]
        if self.takes_parts:
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, str) or any(part["type"] != "text" for part in content):
            return content  # type: ignore[no-any-return]
        return "".join(part["text"] for part in content)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Tool] | None = None
    ) -> str:
        """Render the conversation to one string, control tokens spelled out."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,  # None if there are none: templates ask "is not none", which an undefined name is
                documents=None,
                **self._tokens,
            )
        except _RefusedByTemplateError as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        except TypeError as error:
            raise RequestError(
                "the chat template cannot render this conversation. A template for text alone takes no images: "
                "use a checkpoint made by saccade init"
            ) from error
        except (
            jinja2.TemplateError, ArithmeticError, LookupError, ValueError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            raise RequestError(
                f"the checkpoint's chat template fails on this conversation ({type(error).__name__})"
            ) from error


def read_template(folder: Path) -> str:
    """The Jinja source: `chat_template.jinja`, or the files that other versions of `transformers` write."""
    source: Any = _read_text(folder / "chat_template.jinja")
    for file in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        source = source or read_json(folder / file).get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise CheckpointError(
            f"{folder}: no chat_template.jinja. Copy it from the original model: it defines the prompt"
        )
    return source


def check_template(path: Path) -> str:
    """The source of a template file that replaces the checkpoint's; raises `ConfigError` if it cannot be used."""
    try:
        source = path.read_text(encoding="utf-8")
        takes_text = ChatTemplate(source).takes_text
    except OSError as error:
        raise ConfigError(f"chat template {path}: {error.strerror}. Check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat template {path}: not UTF-8 text. A chat template is a Jinja file") from error
    except CheckpointError as error:
        raise ConfigError(f"chat template {path}: {error}") from error
    if not takes_text:
        raise ConfigError(f"chat template {path}: it does not write the text of a message. Is it a chat template?")
    return source


def token_text(config: Mapping[str, Any], name: str) -> str:
    """A special token of `tokenizer_config.json`, stored as a string or as an object with `content`."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text: {error}. Copy it from the original again") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """A compiled template. It takes 50 ms, and a run loads the processor of its checkpoint several times."""
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise_from_template
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


class _GenerationTag(Extension):
    """Ignores the `{% generation %}` tags of some templates: assistant turns are found without them."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The content of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`; the text is its own."""


def _raise_from_template(message: str) -> None:
    raise _RefusedByTemplateError(message)
