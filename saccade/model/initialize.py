"""Make checkpoint folders: a named size with random weights, or a text model with a new vision tower.

    config -> tokenizer with vision tokens -> weights tensor by tensor -> checkpoint folder

Tensors are written one shard at a time, so memory is bounded by a shard. Random weights depend on the seed and the tensor's name
alone: the same for any shard size, order or machine.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.device import DTYPE_NAMES
from saccade.errors import CheckpointError, ConfigError
from saccade.model.checkpoint_reader import read_tensors, tensor_files
from saccade.model.checkpoint_writer import CheckpointWriter
from saccade.model.config import LanguageConfig, ModelConfig
from saccade.model.families import DEFAULT_FAMILY, family_named, text_family
from saccade.model.families import named_size as named_size
from saccade.model.families.family import Family
from saccade.model.gguf import GGUFModel, added_token
from saccade.model.linear import checkpoint_shapes
from saccade.model.vlm import VLM
from saccade.model.weights import tensor_shapes
from saccade.processor.chat_template import read_template, token_text
from saccade.processor.folder import read_config, read_json

_VOCAB_MULTIPLE = 64
"""A grown vocabulary is padded to a multiple of this, for aligned matrix products."""

_INIT_STD = 0.02

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

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
"""Prepended to a text template: parts become one text with placeholders, which are the family's."""

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


@dataclass(frozen=True)
class TextModel:
    """A pretrained decoder. `shapes` and `tensors` (which yields one at a time) use names on disk."""

    config: LanguageConfig
    tied_head: bool
    text_files: TextFiles
    shapes: dict[str, tuple[int, ...]]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


def initialize_random(
    folder: str | Path,
    config: ModelConfig,
    *,
    tokenizer_from: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_bytes: int = 2 * 2**30,
    on_tensor: Callable[[str], None] | None = None,
) -> ModelConfig:
    """Make a checkpoint folder with random weights. Without `tokenizer_from` it has a byte tokenizer."""
    text_files = _text_files(tokenizer_from) if tokenizer_from else byte_tokenizer()
    text_files, token_ids, num_tokens = with_vision_tokens(text_files, family_named(config.family))
    if num_tokens > config.language.vocab_size:
        raise ConfigError(
            f"the tokenizer has {num_tokens} tokens, the model an embedding of {config.language.vocab_size}. Raise language.vocab_size"
        )
    tensors = _all_tensors(config, None, seed)
    _write(
        folder,
        config,
        text_files,
        token_ids,
        tensors,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        on_tensor=on_tensor,
    )
    return config


def initialize_from_text(
    folder: str | Path,
    text: Path,
    tower: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_bytes: int = 2 * 2**30,
    on_tensor: Callable[[str], None] | None = None,
) -> ModelConfig:
    """Make a checkpoint folder from a text model (a Qwen2 or Llama folder, or a GGUF file) and a new vision tower."""
    family = DEFAULT_FAMILY
    if tower not in family.towers:
        raise ConfigError(f"unknown vision tower {tower!r}. Towers: {', '.join(family.towers)}")
    source = _open_gguf(text) if text.suffix.lower() == ".gguf" else _open_folder(text)
    text_files, token_ids, num_tokens = with_vision_tokens(source.text_files, family)
    rows = source.config.vocab_size
    if num_tokens > rows:
        rows = -(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    config = ModelConfig(
        vision=family.towers[tower],
        language=replace(source.config, vocab_size=rows),
        tied_head=source.tied_head,
        family=family.model_type,
    )
    _check_text_tensors(source, config, text)
    tensors = _all_tensors(config, source, seed)
    _write(
        folder,
        config,
        text_files,
        token_ids,
        tensors,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        on_tensor=on_tensor,
    )
    return config


# ------------------------------------------------------------------ text models


def _open_folder(folder: Path) -> TextModel:
    raw = read_config(folder)
    config = text_family(raw.get("model_type")).parse_text_config(raw)
    # Old Llama files hold the rotary frequencies, which are derived from the config.
    files = {name: file for name, file in tensor_files(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    is_tied = bool(raw.get("tie_word_embeddings", False))
    if is_tied and {_HEAD, _EMBEDDING} <= files.keys():
        pair = dict(read_tensors(files, [_HEAD, _EMBEDDING], torch.device("cpu")))
        if not torch.equal(pair[_HEAD], pair[_EMBEDDING]):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is set, but {_HEAD} differs from the embedding. Set it to false"
            )
        del files[_HEAD]
    return TextModel(
        config=config,
        tied_head=is_tied,
        text_files=_text_files(folder),
        shapes={
            name: shape for name, shape in tensor_shapes(tensor_files(folder), any_dtype=True).items() if name in files
        },
        tensors=lambda: read_tensors(files, list(files), torch.device("cpu")),
    )


def _open_gguf(path: Path) -> TextModel:
    opened = GGUFModel(path)
    raw = opened.text_config()
    tokenizer, eos_id, bos_id = opened.tokenizer(), raw["eos_token_id"], raw["bos_token_id"]
    names = {token_id: name for name, token_id in tokenizer["model"]["vocab"].items()}
    text_files = TextFiles(tokenizer, opened.chat_template(), (eos_id,), names[eos_id], names.get(bos_id))
    config = text_family(opened.architecture).parse_text_config(raw)
    return TextModel(config, raw["tie_word_embeddings"], text_files, opened.shapes(), opened.tensors)


def _text_files(folder: Path) -> TextFiles:
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


# ------------------------------------------------------------------ writing


def _write(
    folder: str | Path,
    config: ModelConfig,
    text_files: TextFiles,
    token_ids: dict[str, int],
    tensors: Iterator[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    on_tensor: Callable[[str], None] | None,
) -> None:
    family = family_named(config.family)
    with CheckpointWriter(folder, max_shard_bytes=max_shard_bytes) as writer:
        writer.check_space(sum(math.prod(shape) for shape in _parameter_shapes(config).values()) * dtype.itemsize)
        _write_description(writer, config, text_files, token_ids, dtype)
        for name, tensor in tensors:
            writer.add(family.name_on_disk(name), tensor.to(dtype))
            if on_tensor:
                on_tensor(name)


def _write_description(
    writer: CheckpointWriter, config: ModelConfig, text_files: TextFiles, token_ids: dict[str, int], dtype: torch.dtype
) -> None:
    """Write all files of the folder except the weights."""
    family = family_named(config.family)
    eos = list(text_files.eos_ids) if len(text_files.eos_ids) > 1 else text_files.eos_ids[0]
    general = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": DTYPE_NAMES[dtype],
        "bos_token_id": None,
        "eos_token_id": text_files.eos_ids[0],
    }
    described = general | family.describe_config(config, token_ids)
    _check_described(described, config)
    writer.write_json("config.json", described)
    writer.write_json("generation_config.json", {"eos_token_id": eos, "do_sample": False})
    writer.write_json("tokenizer.json", text_files.tokenizer)
    writer.write_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": family.processor_class,
            "bos_token": text_files.bos_token,
            "eos_token": text_files.eos_token,
            "pad_token": text_files.eos_token,
            "model_max_length": config.language.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    )
    writer.write_text("chat_template.jinja", text_files.template)
    for name, content in family.describe_processor(config).items():
        writer.write_json(name, content)


def _check_described(described: dict[str, Any], config: ModelConfig) -> None:
    """Refuse sizes that the family's `config.json` cannot say: the folder would load as another model."""
    read = family_named(config.family).parse_config(described)
    wrong = [
        f"{part}.{field.name} = {getattr(ours, field.name)!r} (it would be {getattr(theirs, field.name)!r})"
        for part, ours, theirs in (("vision", config.vision, read.vision), ("language", config.language, read.language))
        for field in fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if wrong:
        raise ConfigError(f"family {config.family} has no {', '.join(wrong)}. Leave it out, or choose another family")


def _check_text_tensors(text: TextModel, config: ModelConfig, source: Path) -> None:
    """Check that the text model has exactly the tensors of the decoder; else one error with everything that is wrong."""
    own = replace(config, language=text.config)  # before the vision tokens are added to its embedding
    expected = {n: s for n, s in _parameter_shapes(own).items() if n.startswith(("language.", "head."))}
    found = {DEFAULT_FAMILY.name_in_model(stored): (stored, shape) for stored, shape in text.shapes.items()}
    wrong = [
        *(f"missing {name}" for name in expected if name not in found and not _is_qkv_bias(name)),
        *(f"surplus {stored}" for name, (stored, _) in found.items() if name not in expected),
        *(
            f"{found[name][0]} is {list(found[name][1])}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name][1] != shape
        ),
    ]
    if wrong:
        more = f"; and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise CheckpointError(
            f"{source}: the tensors do not fit its config: {'; '.join(wrong[:12])}{more}. Is a shard missing, or the config of another model?"
        )


def _all_tensors(config: ModelConfig, text: TextModel | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter: the text model's, and random ones for the rest."""
    remaining = _parameter_shapes(config)
    for stored_name, tensor in text.tensors() if text else ():
        name = DEFAULT_FAMILY.name_in_model(stored_name)
        assert name is not None, "checked by _check_text_tensors"
        yield name, _fit_rows(tensor, remaining.pop(name))
    names = list(remaining)
    with ThreadPoolExecutor(num_threads := os.cpu_count() or 1) as pool:
        for start in range(0, len(names), num_threads):
            chunk = names[start : start + num_threads]
            yield from zip(chunk, pool.map(lambda name: random_tensor(name, remaining[name], seed), chunk), strict=True)


def _parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return checkpoint_shapes(VLM(config))


def _is_qkv_bias(name: str) -> bool:
    """Biases that Llama does not have: zero."""
    return name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))


def _fit_rows(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Initialize the embeddings of added tokens with the mean: their logits stay average."""
    if tensor.shape == shape:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(shape[0] - tensor.shape[0], *shape[1:])])


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Zero biases, norms of one, everything else normal with standard deviation 0.02, from the seed and the name alone."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape).normal_(0.0, _INIT_STD, generator=generator)
