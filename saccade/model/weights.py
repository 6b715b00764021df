"""Load and save the model of a checkpoint folder: Hugging Face's layout, exactly (docs/formats.md).

    load:  config -> model on `meta` -> compare names and shapes -> read tensor by tensor -> check that all are finite
    save:  config, processor files, tensors -> `CheckpointWriter`

Memory: reading holds the model and what `checkpoint_reader.py` needs (peak 1.13 times 1.9 GB).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saccade.device import DTYPE_NAMES, resolve_device, resolve_dtype
from saccade.errors import CheckpointError, UserError
from saccade.model.checkpoint_reader import StoredTensor, read_header, read_tensors, tensor_files
from saccade.model.checkpoint_writer import CheckpointWriter
from saccade.model.families import family_of, load_model_config
from saccade.model.linear import Projection, checkpoint_shapes
from saccade.model.merged_projections import merge_storage
from saccade.model.quantization import QuantizationConfig, parse_quantization
from saccade.model.quantized_linear import QuantizedLinear, quantize_storage
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import shard_model, tensor_slices
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config

PROCESSOR_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json", "generation_config.json",
)  # fmt: skip
"""Files copied along with the weights from one checkpoint folder to another."""
EMBEDDING = "language.embed_tokens.weight"
_UNREAD = (".weight_shape", ".k_scale", ".v_scale")
"""Tensors of quantized layers that the engine does not need: it computes scales of keys and values per token itself."""
_OPTIONAL = (".input_zero_point", ".weight_g_idx")
"""Tensors that mean nothing unless `config.json` announces them: a zero point of 0, groups of inputs in a row."""
_RENAMED = {
    ".qweight": ".weight_packed", ".qzeros": ".weight_zero_point", ".scales": ".weight_scale",
    ".g_idx": ".weight_g_idx",
}  # fmt: skip
"""Ends of the names of AutoGPTQ's and AutoAWQ's tensors, and ours."""


def load_model(
    folder: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    tensor_rank: TensorRank = TensorRank(),  # noqa: B008
) -> VLM:
    """Load the model of a checkpoint folder, in eval mode. `dtype` None keeps the stored one.

    `tensor_rank`: which part of it, for tensor parallelism; nothing else is read. `connect` it to the other ranks.
    """
    folder, device, dtype = Path(folder), resolve_device(device), resolve_dtype(dtype)
    family = family_of(folder)
    model, quantization = meta_model(folder)
    try:
        shard_model(model, tensor_rank)
        slices = tensor_slices(model)
    except UserError as error:
        raise type(error)(f"{folder}: {error}") from error
    files = tensor_files(folder)
    shapes = tensor_shapes(files, any_dtype=dtype is not None, is_quantized=quantization is not None)
    names = match_tensors(shapes, model, family, folder)
    parts = {name: slices[ours] for name, ours in names.items() if ours in slices}
    for name, tensor in read_tensors(files, names, device, parts):
        load_tensor(model, names[name], tensor, dtype)
    parameters = {name: model.get_parameter(names[name]) for name in names}
    check_finite({name: tensor for name, tensor in parameters.items() if tensor.is_floating_point()}, folder)
    if model.config.tied_head:
        _check_tied_copy(files, model, family.all_names("head.weight"), slices.get(EMBEDDING), folder)
        model.tie_head()
    merge_storage(model)
    return model.eval()


def load_vision(
    folder: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype | None = None
) -> VLM:
    """Load what encodes images, in eval mode: vision tower and projector. The language model is left empty."""
    folder, device, dtype = Path(folder), resolve_device(device), resolve_dtype(dtype)
    family, (model, quantization) = family_of(folder), meta_model(folder, has_language=False)
    parts, files = nn.ModuleDict({"vision": model.vision, "projector": model.projector}), tensor_files(folder)
    shapes = tensor_shapes(files, any_dtype=dtype is not None, is_quantized=quantization is not None)
    shapes = {name: one for name, one in shapes.items() if str(_name_in_model(name, family)).partition(".")[0] in parts}
    names = match_tensors(shapes, parts, family, folder)
    for name, tensor in read_tensors(files, names, device):
        load_tensor(parts, names[name], tensor, dtype)
    check_finite({name: one for name, one in parts.named_parameters() if one.is_floating_point()}, folder)
    compute_dtype = next(one.dtype for one in parts.parameters() if one.is_floating_point())
    model.language.layers = nn.ModuleList()
    for part in (model.language, model.head):
        part.to_empty(device=device).to(compute_dtype)
    model.tie_head()
    merge_storage(model)
    return model.eval()


def meta_model(folder: Path, *, has_language: bool = True) -> tuple[VLM, QuantizationConfig | None]:
    """The model of a checkpoint folder on the meta device, with projections in their stored form.

    Without `has_language` the language model has one layer and a vocabulary of one token.
    """
    try:
        raw = read_config(folder)
        quantization = None if "quantization_config" not in raw else parse_quantization(raw, tensor_files(folder))
        config = load_model_config(folder)
        if not has_language:
            config = replace(config, language=replace(config.language, num_layers=1, vocab_size=1))
        with torch.device("meta"):
            model = VLM(config)
        if quantization is not None:
            quantize_storage(model, quantization, family_of(folder))
    except CheckpointError as error:
        raise CheckpointError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error
    return model, quantization


def tensor_shapes(files: dict[str, Path], *, any_dtype: bool, is_quantized: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, from the headers. Without `any_dtype` all must have one floating-point dtype.

    `is_quantized`: there may be tensors of quantized layers; their scales become [1] or [outputs, scales].
    """
    headers = {file: read_header(file) for file in sorted(set(files.values()))}
    folder = next((file.parent for file in headers), None)
    misplaced = [
        f"{name} in {file.name}" for file, header in headers.items() for name in header if files.get(name) != file
    ]
    if misplaced:
        raise CheckpointError(
            f"{folder}: shards hold tensors that the index does not list there: {', '.join(misplaced[:8])}. "
            "Use their own index"
        )
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    if is_quantized:
        found = {name: _without_variants(name, entry) for name, entry in found.items() if not name.endswith(_UNREAD)}
    dtypes = {entry.dtype for name, entry in found.items() if not (is_quantized and _is_quantized(name, entry))}
    if not dtypes <= {"F32", "F16", "BF16"}:
        other = next(name for name, entry in found.items() if entry.dtype in dtypes - {"F32", "F16", "BF16"})
        raise CheckpointError(
            f"{folder}: tensors are stored as {', '.join(sorted(dtypes))} (such as {other}); only F32, F16 and BF16 "
            "are read. Quantized checkpoints can be served, not trained or converted: use the original one"
        )
    if len(dtypes) > 1 and not any_dtype:
        raise CheckpointError(
            f"{folder}: tensors are stored as {', '.join(sorted(dtypes))} together. "
            "Choose one with dtype (--dtype bf16)"
        )
    return {name: entry.shape for name, entry in found.items()}


def _is_quantized(name: str, entry: StoredTensor) -> bool:
    """Whether a tensor of a quantized layer has its own dtype: scales, zero points and values of few bits."""
    is_scale = name.endswith(("_scale", "_zero_point", ".weight_packed", ".weight_g_idx", *_RENAMED))
    return is_scale or (name.endswith(".weight") and entry.dtype in ("I8", "F8_E4M3"))


def _name_in_model(name: str, family: Any) -> str | None:
    stem, dot, last = name.rpartition(".")
    ours: str | None = family.name_in_model(stem + _RENAMED.get(dot + last, dot + last))
    return ours


def _without_variants(name: str, entry: StoredTensor) -> StoredTensor:
    """A scale of a tensor may be stored as [], [1] or [1, 1], scales of outputs as [N] or [N, 1]."""
    if name.endswith(("_scale", ".input_zero_point")) and math.prod(entry.shape) == 1:
        return entry._replace(shape=(1,))
    return entry._replace(shape=(*entry.shape, 1)) if name.endswith("_scale") and len(entry.shape) == 1 else entry


def match_tensors(shapes: dict[str, tuple[int, ...]], model: nn.Module, family: Any, folder: Path) -> dict[str, str]:
    """Checkpoint name to parameter name, complete in both directions; otherwise one error names everything wrong."""
    expected = checkpoint_shapes(model)
    names = {name: _name_in_model(name, family) for name in shapes if not name.startswith(family.unused_prefixes)}
    names = {name: ours for name, ours in names.items() if ours in expected or not str(ours).endswith(_OPTIONAL)}
    is_tied = "head.weight" not in expected
    found = [ours for ours in names.values() if ours]
    duplicates = sorted({ours for ours in found if found.count(ours) > 1})
    wrong = [
        *(f"two tensors for {family.name_on_disk(ours)}" for ours in duplicates),
        *(f"missing {family.name_on_disk(ours)}" for ours in sorted(expected.keys() - set(found))),
        *(
            f"surplus {name}"
            for name, ours in names.items()
            if ours not in expected and not (is_tied and ours == "head.weight")
        ),
        *(
            f"{name} is {list(shapes[name])}, expected {list(expected[ours])}"
            for name, ours in names.items()
            if ours in expected and shapes[name] != expected[ours]
        ),
    ]
    if wrong:
        shown = "; ".join(wrong[:12]) + (f"; and {len(wrong) - 12} more" if len(wrong) > 12 else "")
        raise CheckpointError(
            f"{folder}: the tensors do not fit config.json: {shown}. Use the config.json these weights were saved with"
        )
    return {name: ours for name, ours in names.items() if ours in expected}


def check_finite(tensors: Mapping[str, Tensor], folder: str | Path) -> None:
    """Refuse weights with NaN or infinity, by their names on disk: the model would answer nonsense.

    One reduction per tensor and one synchronisation in all: 0.1 s for 1.9 GB on one CPU core.
    """
    extremes = [torch.stack(torch.aminmax(tensor.detach())) for tensor in tensors.values()]  # NaN propagates
    is_finite = torch.stack(extremes).isfinite().all(1).tolist() if extremes else []
    bad = [name for name, is_fine in zip(tensors, is_finite, strict=True) if not is_fine]
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise CheckpointError(
            f"{folder}: NaN or infinity in {', '.join(bad[:4])}{more}. The training run diverged or the file is "
            "damaged: use an earlier checkpoint, or copy it again"
        )


def _check_tied_copy(
    files: dict[str, Path],
    model: VLM,
    head_names: Iterable[str],
    part: tuple[slice, ...] | None,
    folder: Path,
) -> None:
    """A tied checkpoint may store the head as well; it must then equal the embedding."""
    embedding, found = model.language.embed_tokens.weight, [name for name in head_names if name in files]
    parts = {} if part is None else dict.fromkeys(found, part)
    for head_name, head in read_tensors(files, found, embedding.device, parts):
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise CheckpointError(
                f"{folder}: config.json says tie_word_embeddings, but {head_name} differs from the embedding. "
                "Set it to false"
            )


def load_tensor(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Set a parameter. Projections bring it into their storage form."""
    module_name, _, parameter_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    if isinstance(module, Projection):
        module.load_tensor(parameter_name, tensor, dtype)
    else:
        setattr(module, parameter_name, nn.Parameter(tensor if dtype is None else tensor.to(dtype)))


def config_for_export(like: str | Path) -> dict[str, Any]:
    """The `config.json` of a folder that is written like another, without entries of tensors that are not exported."""
    return family_of(like).without_unused(read_config(Path(like)))


def save_model(model: VLM, folder: str | Path, *, like: str | Path, max_shard_bytes: int = 2 * 2**30) -> None:
    """Write a checkpoint folder: the model's weights, and the config and processor files of the folder `like`."""
    like = Path(like)
    raw, family = config_for_export(like), family_of(like)
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise CheckpointError("a quantized model cannot be saved. Copy its folder, or save the original model")
    if load_model_config(like) != model.config:
        raise CheckpointError(
            f"{like}/config.json describes another model than the one to be saved. Use the folder it was loaded from"
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) == 1:
        raw = raw | {"torch_dtype" if "torch_dtype" in raw else "dtype": DTYPE_NAMES[dtypes.pop()]}
    with CheckpointWriter(folder, max_shard_bytes=max_shard_bytes) as writer:
        writer.check_space(sum(parameter.nbytes for parameter in model.parameters()))
        writer.write_json("config.json", raw)
        for name in PROCESSOR_FILES:
            if (like / name).is_file():
                writer.copy(like / name)
        shapes = checkpoint_shapes(model)
        for name, parameter in model.named_parameters():  # a tied head appears once, as the embedding
            stored = parameter.detach()[tuple(slice(size) for size in shapes[name])]
            writer.add(family.name_on_disk(name), stored)
