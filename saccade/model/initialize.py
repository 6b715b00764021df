"""New checkpoint folders: a named size with random weights, or a text model with a fresh vision tower before it.

    describe the model -> tokenizer with vision tokens -> weights tensor by tensor -> checkpoint folder

Tensors are made and written one shard at a time, so a 3B model needs a shard of memory. Random weights depend on the seed and
the tensor's name alone: the same for any shard size, order or machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.device import DTYPE_NAMES
from saccade.errors import CheckpointError, ConfigError
from saccade.model.config import LanguageConfig, ModelConfig
from saccade.model.families import qwen2_5_vl, text_family
from saccade.model.gguf import GGUFModel, added_token
from saccade.model.vlm import VLM
from saccade.model.weights import CheckpointWriter, read_tensors, tensor_files
from saccade.processor.conversation import read_template
from saccade.processor.folder import read_config, read_json
from saccade.processor.image import ImageSettings

VISION_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
"""The control tokens around and inside images, by the name `config.json` gives their ids."""

_VOCAB_MULTIPLE = 64
"""Embeddings that grow are padded to this many rows: matrix units want aligned sizes."""

_INIT_STD = 0.02

_FLATTEN_IMAGES = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set flat.messages = flat.messages + [message] -%}
{%- else -%}
{%- set written = namespace(text='') -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{%- set written.text = written.text + '<|vision_start|><|image_pad|><|vision_end|>' -%}
{%- elif part.type == 'video' -%}
{%- set written.text = written.text + '<|vision_start|><|video_pad|><|vision_end|>' -%}
{%- else -%}
{%- set written.text = written.text + part.text -%}
{%- endif -%}
{%- endfor -%}
{%- set flat.messages = flat.messages + [{'role': message.role, 'content': written.text}] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""
"""Put before any text template: parts become one text with placeholders, so the text model's own words stay verbatim."""

_CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace("\n", "\\n")


@dataclass(frozen=True)
class Words:
    """How a model reads and writes text: its tokenizer, its chat template, and the tokens that end a turn."""

    tokenizer: dict[str, Any]
    template: str
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class TextModel:
    """A decoder to build on. `tensors` yields (checkpoint name, tensor), one at a time."""

    config: LanguageConfig
    tied_head: bool
    words: Words
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


def named_size(name: str) -> ModelConfig:
    """The config of a size by its name."""
    if name not in qwen2_5_vl.SIZES:
        raise ConfigError(f"unknown size {name!r}. Sizes: {', '.join(qwen2_5_vl.SIZES)}")
    return qwen2_5_vl.SIZES[name]


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
    """A checkpoint folder with random weights. Without `tokenizer_from` the model reads and writes bytes."""
    if config.family != qwen2_5_vl.MODEL_TYPE:
        raise ConfigError(f"family {config.family!r} cannot be made. Use {qwen2_5_vl.MODEL_TYPE}")
    words = _words_of_folder(tokenizer_from) if tokenizer_from else byte_words()
    words, token_ids, num_tokens = with_vision_tokens(words)
    if num_tokens > config.language.vocab_size:
        raise ConfigError(
            f"the tokenizer has {num_tokens} tokens, the model an embedding of {config.language.vocab_size}. Raise language.vocab_size"
        )
    tensors = _all_tensors(config, None, seed)
    _write(folder, config, words, token_ids, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes, on_tensor=on_tensor)
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
    """A checkpoint folder from a text model (a folder of Qwen2 or Llama layout, or a GGUF file) and a fresh tower."""
    if tower not in qwen2_5_vl.TOWERS:
        raise ConfigError(f"unknown vision tower {tower!r}. Towers: {', '.join(qwen2_5_vl.TOWERS)}")
    source = _open_gguf(text) if text.suffix == ".gguf" else _open_folder(text)
    words, token_ids, num_tokens = with_vision_tokens(source.words)
    rows = source.config.vocab_size
    if num_tokens > rows:
        rows = -(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    config = ModelConfig(
        vision=qwen2_5_vl.TOWERS[tower],
        language=replace(source.config, vocab_size=rows),
        tied_head=source.tied_head,
        family=qwen2_5_vl.MODEL_TYPE,
    )
    tensors = _all_tensors(config, source, seed)
    _write(folder, config, words, token_ids, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes, on_tensor=on_tensor)
    return config


# ------------------------------------------------------------------ where text models come from


def _open_folder(folder: Path) -> TextModel:
    raw = read_config(folder)
    files = tensor_files(folder)
    return TextModel(
        config=text_family(raw.get("model_type")).parse_text_config(raw),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        words=_words_of_folder(folder),
        tensors=lambda: read_tensors(files, list(files), torch.device("cpu")),
    )


def _open_gguf(path: Path) -> TextModel:
    opened = GGUFModel(path)
    raw = opened.text_config()
    words = Words(opened.tokenizer(), opened.chat_template(), (raw["eos_token_id"],))
    config = text_family(opened.architecture).parse_text_config(raw)
    return TextModel(config, raw["tie_word_embeddings"], words, opened.tensors)


def _words_of_folder(folder: Path) -> Words:
    tokenizer = read_json(folder / "tokenizer.json")
    if not tokenizer:
        raise CheckpointError(f"{folder}: no tokenizer.json. A fast tokenizer is needed")
    eos = read_json(folder / "generation_config.json").get("eos_token_id", read_config(folder).get("eos_token_id"))
    if eos is None:
        raise CheckpointError(f"{folder}: neither generation_config.json nor config.json names eos_token_id")
    return Words(tokenizer, read_template(folder), tuple([eos] if isinstance(eos, int) else eos))


def byte_words() -> Words:
    """A tokenizer of 256 bytes and the ChatML control tokens: any text in any language, nothing to download."""
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
    return Words(tokenizer, _CHATML, (len(vocab) + control.index("<|im_end|>"),))


def with_vision_tokens(words: Words) -> tuple[Words, dict[str, int], int]:
    """The words with the vision tokens in tokenizer and template; the tokens' ids; the number of tokens in all."""
    added = list(words.tokenizer["added_tokens"])
    known = {token["content"]: token["id"] for token in added}
    num_tokens = 1 + max([*words.tokenizer["model"]["vocab"].values(), *known.values()])
    for token in VISION_TOKENS.values():
        if token not in known:
            known[token] = num_tokens
            added.append(added_token(token, num_tokens, special=True))
            num_tokens += 1
    template = words.template if VISION_TOKENS["image"] in words.template else _FLATTEN_IMAGES + words.template
    grown = replace(words, tokenizer=words.tokenizer | {"added_tokens": added}, template=template)
    return grown, {name: known[token] for name, token in VISION_TOKENS.items()}, num_tokens


# ------------------------------------------------------------------ writing


def _write(
    folder: str | Path,
    config: ModelConfig,
    words: Words,
    token_ids: dict[str, int],
    tensors: Iterator[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    on_tensor: Callable[[str], None] | None,
) -> None:
    with CheckpointWriter(folder, max_shard_bytes=max_shard_bytes) as writer:
        writer.check_space(sum(math.prod(shape) for shape in _parameter_shapes(config).values()) * dtype.itemsize)
        _write_description(writer, config, words, token_ids, dtype)
        for name, tensor in tensors:
            writer.add(qwen2_5_vl.name_on_disk(name), tensor.to(dtype))
            if on_tensor:
                on_tensor(name)


def _write_description(
    writer: CheckpointWriter, config: ModelConfig, words: Words, token_ids: dict[str, int], dtype: torch.dtype
) -> None:
    """Every file of the folder but the weights."""
    images = ImageSettings(patch_size=config.vision.patch_size, merge_size=config.vision.merge_size)
    eos = list(words.eos_ids) if len(words.eos_ids) > 1 else words.eos_ids[0]
    names = {token["id"]: token["content"] for token in words.tokenizer["added_tokens"]}
    eos_name = names.get(words.eos_ids[0])
    described = qwen2_5_vl.describe_config(
        config, token_ids=token_ids, eos_id=words.eos_ids[0], dtype=DTYPE_NAMES[dtype]
    )
    writer.write_json("config.json", described)
    writer.write_json("generation_config.json", {"eos_token_id": eos, "do_sample": False})
    writer.write_json("tokenizer.json", words.tokenizer)
    writer.write_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen2_5_VLProcessor",
            "eos_token": eos_name,
            "pad_token": eos_name,
            "model_max_length": config.language.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    )
    writer.write_text("chat_template.jinja", words.template)
    writer.write_json(
        "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": images.min_pixels,
            "max_pixels": images.max_pixels,
            "patch_size": images.patch_size,
            "temporal_patch_size": config.vision.temporal_patch_size,
            "merge_size": images.merge_size,
            "image_mean": list(images.mean),
            "image_std": list(images.std),
        },
    )


def _all_tensors(config: ModelConfig, text: TextModel | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model once: the text model's where there is one, fresh ones for the rest."""
    waiting = _parameter_shapes(config)
    if text:
        for stored_name, tensor in text.tensors():
            name = qwen2_5_vl.name_in_model(stored_name)
            if name == "head.weight" and config.tied_head:
                continue  # a second copy of the embedding
            if name not in waiting:
                raise CheckpointError(f"the text model's tensor {stored_name} has no place in the decoder")
            yield name, _fit_rows(tensor, waiting.pop(name), stored_name)
        lost = [name for name in waiting if name.startswith(("language.", "head.")) and not _is_qkv_bias(name)]
        if lost:
            raise CheckpointError(
                f"the text model lacks {', '.join(lost[:8])}{' ...' if len(lost) > 8 else ''}. Is a shard missing?"
            )
    for name, shape in waiting.items():
        yield name, fresh_tensor(name, shape, seed)


def _parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in VLM(config).named_parameters()}


def _is_qkv_bias(name: str) -> bool:
    """The biases Llama does not have; at zero they change nothing."""
    return name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))


def _fit_rows(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Rows for new tokens hold the mean of the old ones: their logits stay at the average, far from being chosen."""
    if tensor.shape == shape:
        return tensor
    if tensor.shape[1:] != shape[1:] or tensor.shape[0] > shape[0]:
        raise CheckpointError(f"the text model's {name} is {list(tensor.shape)}, expected {list(shape)}")
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(shape[0] - tensor.shape[0], *shape[1:])])


def fresh_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Biases at zero, norms at one, everything else normal with deviation 0.02, from the seed and the name alone."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape).normal_(0.0, _INIT_STD, generator=generator)
