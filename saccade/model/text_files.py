"""The tokenizer and chat template of a new checkpoint folder: of a text model or of bytes, with vision tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.errors import CheckpointError
from saccade.model.families import DEFAULT_FAMILY
from saccade.model.families.family import Family
from saccade.model.gguf import added_token
from saccade.processor.chat_template import read_template, token_text
from saccade.processor.folder import read_config, read_json

_FLATTEN_IMAGES = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set flat.messages = flat.messages + [message] -%}
{%- else -%}
{%- set written = namespace(text='') -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{%- set written.text = written.text + 'IMAGE_TEXT' -%}
{%- elif part.type == 'video' -%}
{%- set written.text = written.text + 'VIDEO_TEXT' -%}
{%- else -%}
{%- set written.text = written.text + part.text -%}
{%- endif -%}
{%- endfor -%}
{%- set flat.messages = flat.messages + [{'role': message.role, 'content': written.text}] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""
"""Prepended to a text template: parts become one text with the family's placeholders."""
_CHATML = (
    "{% set known = namespace(tools='') %}"
    "{% if tools %}"
    "{% set known.tools = '\n\n# Tools\n\nThe functions you may call, one per line:\n<tools>' %}"
    "{% for tool in tools %}{% set known.tools = known.tools + '\n' + (tool | tojson) %}{% endfor %}"
    "{% set known.tools = known.tools + '\n</tools>\n\nCall a function like this:\n<tool_call>\n"
    """{"name": "its name", "arguments": {"argument": "value"}}"""
    "\n</tool_call>' %}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.' + known.tools + '<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% if loop.first and message.role == 'system' %}{{ known.tools }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    """{{ '<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}"""
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace("\n", "\\n")


@dataclass(frozen=True)
class TextFiles:
    """Tokenizer, chat template, eos tokens, and the bos and eos tokens that the template may use."""

    tokenizer: dict[str, Any]
    template: str
    eos_ids: tuple[int, ...]
    eos_token: str
    bos_token: str | None = None


def read_text_files(folder: Path) -> TextFiles:
    """Read the text files of a text model's folder."""
    tokenizer = read_json(folder / "tokenizer.json")
    if not tokenizer:
        raise CheckpointError(f"{folder}: no tokenizer.json. Check the path; a fast tokenizer is needed")
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise CheckpointError(f"{folder}/tokenizer.json: vision tokens can be added to BPE tokenizers only")
    eos = read_json(folder / "generation_config.json").get("eos_token_id", read_config(folder).get("eos_token_id"))
    if eos is None:
        raise CheckpointError(f"{folder}: neither generation_config.json nor config.json names eos_token_id")
    eos_ids = tuple([eos] if isinstance(eos, int) else eos)
    names = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
    tokens = read_json(folder / "tokenizer_config.json")
    eos_token = token_text(tokens, "eos_token") or names.get(eos_ids[0], "")
    return TextFiles(tokenizer, read_template(folder), eos_ids, eos_token, token_text(tokens, "bos_token") or None)


def byte_tokenizer() -> TextFiles:
    """A tokenizer of the 256 bytes and the ChatML control tokens; nothing to download."""
    from tokenizers import pre_tokenizers

    vocab = {character: token_id for token_id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(name, len(vocab) + i, special=True) for i, name in enumerate(control)],
        "normalizer": None,
        "pre_tokenizer": bytes_only,
        "post_processor": None,
        "decoder": bytes_only,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return TextFiles(tokenizer, _CHATML, (len(vocab) + control.index("<|im_end|>"),), "<|im_end|>")


def with_vision_tokens(text_files: TextFiles, family: Family = DEFAULT_FAMILY) -> tuple[TextFiles, dict[str, int], int]:
    """Add the family's vision tokens to tokenizer and template; also returns their ids and the number of tokens."""
    added = list(text_files.tokenizer.get("added_tokens", []))
    known = {token["content"]: token["id"] for token in added}
    num_tokens = 1 + max([*text_files.tokenizer["model"]["vocab"].values(), *known.values()])
    for token in family.vision_tokens.values():
        if token not in known:
            known[token] = num_tokens
            added.append(added_token(token, num_tokens, special=True))
            num_tokens += 1
    template = text_files.template
    if family.vision_tokens["image"] not in template:
        flatten = _FLATTEN_IMAGES.replace("IMAGE_TEXT", family.image_text).replace("VIDEO_TEXT", family.video_text)
        template = flatten + template
    grown = replace(text_files, tokenizer=text_files.tokenizer | {"added_tokens": added}, template=template)
    return grown, {name: known[token] for name, token in family.vision_tokens.items()}, num_tokens
