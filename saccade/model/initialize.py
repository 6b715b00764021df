"""Make checkpoint folders: a named size with random weights, or a text model with a new vision tower.

    config -> tokenizer with vision tokens -> weights tensor by tensor -> checkpoint folder

Tensors are written one shard at a time, so memory is bounded by a shard. Random weights depend on the seed and the
tensor's name alone: the same for any shard size, order or machine.
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
from saccade.model.gguf import GGUFModel
from saccade.model.linear import checkpoint_shapes
from saccade.model.text_files import TextFiles, byte_tokenizer, read_text_files, with_vision_tokens
from saccade.model.vlm import VLM
from saccade.model.weights import tensor_shapes
from saccade.processor.folder import read_config

_VOCAB_MULTIPLE = 64
"""A grown vocabulary is padded to a multiple of this, for aligned matrix products."""

_INIT_STD = 0.02

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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
    text_files = read_text_files(tokenizer_from) if tokenizer_from else byte_tokenizer()
    text_files, token_ids, num_tokens = with_vision_tokens(text_files, family_named(config.family))
    if num_tokens > config.language.vocab_size:
        raise ConfigError(
            f"the tokenizer has {num_tokens} tokens, the model an embedding of {config.language.vocab_size}. "
            "Raise language.vocab_size"
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
        text_files=read_text_files(folder),
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
    """Check that the text model has exactly the tensors of the decoder; one error says everything that is wrong."""
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
            f"{source}: the tensors do not fit its config: {'; '.join(wrong[:12])}{more}. "
            "Is a shard missing, or the config of another model?"
        )


def _all_tensors(config: ModelConfig, text: TextModel | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter: those of the text model, and random ones."""
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
    """Whether it is a bias that Llama does not have; it is then zero."""
    return name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))


def _fit_rows(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Initialize the embeddings of added tokens with the mean: their logits stay average."""
    if tensor.shape == shape:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(shape[0] - tensor.shape[0], *shape[1:])])


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return zeros for biases, ones for norms, else normal values of standard deviation 0.02.

    They depend on the seed and the name alone.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape).normal_(0.0, _INIT_STD, generator=generator)
