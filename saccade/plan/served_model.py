"""What a plan needs to know of a model: bytes of its weights in every storage scheme, and of the engine's largest step.

Weights are counted on the model's modules, buffers and the largest step in a dry run of the engine's own profile, both
on the meta device: no family is known here, and nothing is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from saccade.engine.config import EngineConfig
from saccade.engine.device.divided_forward import step_collectives
from saccade.engine.device.kv_cache import KVShape, kv_shape
from saccade.engine.device.rank_exchange import LoneRank
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.device.startup import profile_largest_step
from saccade.errors import ConfigError
from saccade.kernels import launch
from saccade.model.config import ModelConfig
from saccade.model.families import family_named, load_model_config, named_size, named_sizes, published_as
from saccade.model.linear import Linear, projections
from saccade.model.live_bytes import LiveBytes, MetaCache, peak_bytes
from saccade.model.quantization import StoredScheme, fitting_group
from saccade.model.quantized_linear import Linear8bit, quantized_form
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import connect, shard_model
from saccade.model.vlm import VLM
from saccade.model.weights import meta_model
from saccade.processor.families import load_rules

SCHEMES = ("bf16", "fp8", "int8", "w4a16")
"""Storage schemes of weights; what loses least comes first."""
STORED = "as stored"
"""The scheme of a folder that is compressed already."""
_UNKNOWN_STEP_BYTES = 2 << 30
"""Buffers and largest step of a model of which only sizes are given."""
_INT4_BYTES = 0.5 + 2 / 128
"""Bytes per weight in 4 bits: a 16-bit scale for 128."""


class Exchanges(NamedTuple):
    """Collectives of a step of a tensor-parallel engine."""

    num_collectives: int
    """Number of collectives."""
    bytes_per_token: int
    """Bytes of every rank's tensors, per token: sums over the layers."""
    bytes_per_sample: int
    """Bytes that every rank receives per sampled token: the logits of the others."""


NO_EXCHANGES = Exchanges(0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The sizes of a model that a plan computes with."""

    name: str
    """Name in the report."""
    shape: KVShape
    """Shape of the KV cache."""
    weight_bytes: Mapping[str, int]
    """Bytes of the weights in memory, by scheme."""
    decode_bytes: Mapping[str, int]
    """Bytes of the weights that every decode step reads, by scheme."""
    step_bytes: int
    """Buffers of the engine, and its largest step."""
    num_decoder_parameters: int
    """Parameters that are multiplied with every token."""
    num_tower_parameters: int = 0
    """Parameters that are multiplied with every patch."""
    max_length: int
    """Context length."""
    vocab_size: int = 0
    """Tokens of the vocabulary, whose counts a sampler with penalties keeps."""
    num_ranks: int = 1
    """GPUs of one engine. All other sizes are those of the rank with the most."""
    exchanges: Exchanges = NO_EXCHANGES
    """What the ranks exchange in a step."""


def model_config(model: str) -> ModelConfig:
    """The config of a checkpoint folder, of a published checkpoint that is not downloaded yet, or of a named size."""
    if Path(model).is_dir():
        return load_model_config(model)
    published = published_as(model)
    name = model if published is None else published[1]
    if name not in named_sizes():
        raise ConfigError(
            f"{model}: neither a checkpoint folder, nor a recipe (.toml), nor a size that saccade models lists. "
            "Check the name"
        )
    return named_size(name)


def served_model(model: str, max_length: int | None = None, *, num_ranks: int = 1) -> ServedModel:
    """The model of a checkpoint folder, a published checkpoint or a named size, or a rank's part of it."""
    config, stored = model_config(model), None
    if Path(model).is_dir():
        on_meta, quantization = meta_model(Path(model))
        stored = None if quantization is None else on_meta
    return configured_model(model, config, EngineConfig(), max_length, stored, num_ranks=num_ranks)


def described_model(
    *, parameters: float, num_layers: int, num_heads: int, head_dim: int, num_kv_heads: int | None, max_length: int
) -> ServedModel:
    """A model of which only sizes are known. All parameters count as projections."""
    count = int(parameters)
    sizes = {"bf16": 2 * count, "fp8": count, "int8": count, "w4a16": int(_INT4_BYTES * count)}
    return ServedModel(
        name=f"{count / 1e9:g}B",
        shape=KVShape(num_layers, num_kv_heads or num_heads, head_dim),
        weight_bytes=sizes,
        decode_bytes=sizes,
        step_bytes=_UNKNOWN_STEP_BYTES,
        num_decoder_parameters=count,
        max_length=max_length,
    )


def configured_model(
    name: str, config: ModelConfig, engine: EngineConfig, max_length: int | None = None, stored: VLM | None = None,
    *, num_ranks: int = 1,
) -> ServedModel:  # fmt: skip
    """A model by its config. `stored`: the model of a compressed folder, on the meta device.

    `num_ranks`: of one engine; the plan is for rank 0, which has the most.
    """
    language = config.language
    max_length = max_length or language.max_positions
    with torch.device("meta"), MetaCache():  # type: ignore[no-untyped-call]
        model = VLM(config).to(torch.bfloat16)
    if num_ranks > 1:
        for one in [model] if stored is None else [model, stored]:
            shard_model(one, TensorRank(0, num_ranks))
    stored_by = {scheme: stored_bytes(model, scheme) for scheme in SCHEMES}
    if stored is not None:
        stored_by = {STORED: stored_bytes(stored, STORED)}
    return ServedModel(
        name=name,
        shape=kv_shape(model),
        weight_bytes={scheme: sum(parts.values()) for scheme, parts in stored_by.items()},
        decode_bytes={scheme: _decode_bytes(parts) for scheme, parts in stored_by.items()},
        step_bytes=step_bytes(model, engine, max_length, num_ranks),
        num_decoder_parameters=_num_elements(model.language.layers) + _num_elements(model.language.embed_tokens),
        num_tower_parameters=_num_elements(model.vision),
        max_length=max_length,
        vocab_size=language.vocab_size,
        num_ranks=num_ranks,
        exchanges=NO_EXCHANGES if num_ranks == 1 else _exchanges(model, num_ranks),
    )


def _exchanges(model: VLM, num_ranks: int) -> Exchanges:
    """The collectives of a step with one token, from the list that the engine completes after a failure."""
    one = step_collectives(model, 1, num_tokens=1, num_selected=1, num_logits=1)
    sums = sum(each.num_bytes for each in one if each.kind == "sum")
    logits = sum(each.num_bytes for each in one if each.kind == "gather")
    return Exchanges(len(one), sums, (num_ranks - 1) * logits)


QUANTIZED_PARTS: dict[str, tuple[Literal["fp8", "int8", "int4"], tuple[str, ...]]] = {
    "fp8": ("fp8", ("vision", "projector", "language")),
    "int8": ("int8", ("vision", "projector", "language")),
    "w4a16": ("int4", ("vision", "language")),
}
"""Storage form and quantized parts of the schemes that `saccade compress` has; head and embedding are kept."""


def stored_bytes(model: VLM, scheme: str) -> dict[str, int]:
    """Bytes of each part of a model on the meta device with its projections stored by a scheme, and of `embedding`."""
    stated, quantized_parts = QUANTIZED_PARTS.get(scheme, ("fp8", ()))
    packs_tower = family_named(model.config.family).packs_tower
    parts = {name: _num_bytes(child) for name, child in model.named_children()}
    for name, layer in projections(model):
        part = name.partition(".")[0]
        if type(layer) is Linear and part in quantized_parts:
            form = "int8" if stated == "int4" and part == "vision" and not packs_tower else stated
            group = fitting_group(layer.stored_shape[1], 128) if form == "int4" else None
            with torch.device("meta"):
                quantized = quantized_form(layer, StoredScheme(form, group_size=group))
            parts[part] += _num_bytes(quantized) - _num_bytes(layer)
    embedding = _num_bytes(model.language.embed_tokens)
    parts["language"] -= embedding
    if model.config.tied_head:
        parts["head"] -= embedding
    return parts | {"embedding": embedding}


def _num_elements(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())


def _decode_bytes(parts: Mapping[str, int]) -> int:
    """Bytes that a step of decode reads: layers and head, which may be the embedding."""
    return parts["language"] + (parts["head"] or parts["embedding"])


def _num_bytes(module: nn.Module) -> int:
    """Bytes of the parameters: floating-point ones in 16 bits, except the scales of 8-bit weights, which are fp32."""
    plain = sum(x.numel() * (2 if x.is_floating_point() else x.itemsize) for x in module.parameters())
    return plain + sum(2 * layer.out_features for layer in module.modules() if isinstance(layer, Linear8bit))


def step_bytes(model: VLM, config: EngineConfig, max_length: int, num_ranks: int = 1) -> int:
    """Bytes of the engine's buffers and largest step, in a dry run of its profile."""
    grey = PixelScale(mean=(0.5,) * model.config.vision.in_channels, std=(0.5,) * model.config.vision.in_channels)
    eager = dataclasses.replace(config, cuda_graphs=False)
    exchange = LoneRank(0, num_ranks) if num_ranks > 1 else None
    if exchange is not None:
        connect(model, exchange)
    live = LiveBytes(*model.parameters(), *model.buffers())
    with launch.dry_run(), live, torch.inference_mode():
        runner = Runner(model, eager, pixels=grey, num_pages=1, max_length=max_length, exchange=exchange)
        profile_largest_step(runner)
    return peak_bytes(live.phases())


# ------------------------------------------------------------------ images


def image_cost(model: str, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(tokens, patches) of a request's images of these widths and heights.

    The settings are those of the checkpoint folder, or those that `saccade init` writes for a named size.
    """
    if Path(model).is_dir():
        return _image_cost(model, sizes)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in _processor_files(model_config(model)).items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        return _image_cost(folder, sizes)


def _image_cost(folder: str, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    rules = load_rules(folder)
    grids = [rules.image_grid(height, width, len(sizes)) for width, height in sizes]
    parts = [part for grid in grids for part in rules.parts("image", grid, 1.0, ())]
    return sum(part.length for part in parts), sum(map(rules.num_patches, grids))


def _processor_files(config: ModelConfig) -> dict[str, Any]:
    family = family_named(config.family)
    ids = {name: number for number, name in enumerate(family.vision_tokens)}
    settings = {"model_type": family.model_type} | family.describe_config(config, ids)
    return family.describe_processor(config) | {"config.json": settings}
