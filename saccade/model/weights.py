"""Checkpoint folders, read and written: Hugging Face's layout, exactly (docs/formats.md).

    load:  config -> empty model -> compare names and shapes -> fill tensor by tensor
    save:  tensors -> shards of bounded size -> index -> rename the finished folder into place

Memory: reading holds the model and nothing else of it (`tensor_reader.py`); writing holds one shard more than the model.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from saccade.device import DTYPE_NAMES, resolve_device, resolve_dtype
from saccade.errors import CheckpointError
from saccade.model.families import vision_language_family
from saccade.model.layers import checkpoint_shapes
from saccade.model.tensor_reader import DTYPES, read_header, read_tensors
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

PROCESSOR_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "generation_config.json",
)  # fmt: skip
"""What travels with the weights from one checkpoint folder to the next."""


# ------------------------------------------------------------------ reading


def load_model(
    folder: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype | None = None
) -> VLM:
    """The model of a checkpoint folder, in eval mode. `dtype` None keeps the stored one."""
    folder, device, dtype = Path(folder), resolve_device(device), resolve_dtype(dtype)
    raw = read_config(folder)
    family = vision_language_family(raw.get("model_type"))
    with torch.device("meta"):
        model = VLM(family.parse_config(raw))
    files = tensor_files(folder)
    names = _match(tensor_shapes(files, any_dtype=dtype is not None), model, family.name_in_model, folder)
    for name, tensor in read_tensors(files, names, device):
        _set_parameter(model, names[name], tensor if dtype is None else tensor.to(dtype))
    if model.config.tied_head:
        _check_tied_copy(files, model, family.name_on_disk("head.weight"))
        model.head.weight = model.language.embed_tokens.weight
    return model.eval()


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by checkpoint name. Every file is there, or the error names the missing ones."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: no weight_map from tensors to files. Copy it from the original again")
        files = {name: folder / Path(file).name for name, file in weight_map.items()}
    elif (folder / SINGLE_FILE).is_file():
        files = dict.fromkeys(read_header(folder / SINGLE_FILE), folder / SINGLE_FILE)
    else:
        raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}. Only safetensors checkpoints are read")
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(
            f"{folder}: shard files named in the index are missing: {', '.join(missing)}. Copy them, or download again"
        )
    return files


def tensor_shapes(files: dict[str, Path], *, any_dtype: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, from the headers. Without `any_dtype` all must be of one floating-point dtype."""
    headers = {file: read_header(file) for file in sorted(set(files.values()))}
    astray = [
        f"{name} in {file.name}" for file, header in headers.items() for name in header if files.get(name) != file
    ]
    if astray:
        raise CheckpointError(
            f"shards hold tensors that the index does not place there: {', '.join(astray[:8])}. Use the index they came with"
        )
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    dtypes = {entry.dtype for entry in found.values()}
    if not dtypes <= DTYPES.keys():
        raise CheckpointError(f"tensors are stored as {', '.join(sorted(dtypes))}; only F32, F16 and BF16 are read")
    if len(dtypes) > 1 and not any_dtype:
        raise CheckpointError(
            f"tensors are stored as {', '.join(sorted(dtypes))} together. Choose one with dtype (--dtype bf16)"
        )
    return {name: entry.shape for name, entry in found.items()}


def check_finite(tensor: Tensor, name: str, folder: Path) -> None:
    """Refuse NaN and inf in a tensor of a checkpoint folder; `name` is its name on disk. One pass over it, no copy."""
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        num_bad = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{folder}: {name} has {num_bad} values that are NaN or inf. Copy or download the folder again, or use an earlier one"
        )


def _match(shapes: dict[str, tuple[int, ...]], model: nn.Module, name_in_model: Any, folder: Path) -> dict[str, str]:
    """Checkpoint name to parameter name, complete in both directions; else one error with all that is wrong."""
    expected = checkpoint_shapes(model)
    names = {name: name_in_model(name) for name in shapes}
    is_tied = "head.weight" not in expected
    found = [ours for ours in names.values() if ours]
    wrong = [
        *(f"two tensors for {ours}" for ours in sorted({ours for ours in found if found.count(ours) > 1})),
        *(f"missing {name}" for name in sorted(expected.keys() - set(found))),
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


def _check_tied_copy(files: dict[str, Path], model: VLM, head_name: str) -> None:
    """A tied checkpoint may carry the head a second time; it must then be the embedding."""
    embedding = model.language.embed_tokens.weight
    for _, head in read_tensors(files, [head_name] if head_name in files else [], embedding.device):
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise CheckpointError(
                f"config.json says tie_word_embeddings, but {head_name} differs from the embedding. Set it to false"
            )


def _set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    module_name, _, parameter_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    shape = getattr(module, parameter_name).shape
    added = [size for have, want in zip(value.shape[::-1], shape[::-1], strict=True) for size in (0, want - have)]
    setattr(module, parameter_name, nn.Parameter(F.pad(value, added) if any(added) else value))


# ------------------------------------------------------------------ writing


def save_model(model: VLM, folder: str | Path, *, like: str | Path, max_shard_bytes: int = 2 * 2**30) -> None:
    """Write a checkpoint folder: the model's weights, and the config and processor files of the folder `like`."""
    like = Path(like)
    raw = read_config(like)
    family = vision_language_family(raw.get("model_type"))
    if family.parse_config(raw) != model.config:
        raise CheckpointError(
            f"{like}/config.json describes another model than the one to be saved. Save it like the folder it came from"
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


class CheckpointWriter:
    """A checkpoint folder in the making; it appears under its name when it is whole, and not at all after an error."""

    def __init__(self, folder: str | Path, *, max_shard_bytes: int = 2 * 2**30) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file. Choose another folder or remove it first")
        if self.folder.exists() and any(self.folder.iterdir()):
            raise CheckpointError(f"{self.folder} exists and is not empty. Choose another folder or remove it first")
        place = self.folder.resolve()
        if self.folder.is_symlink() and not self.folder.exists():
            raise CheckpointError(f"{self.folder} is a link to nowhere. Remove it or choose another folder")
        self._partial = place.with_name(f".{place.name}.partial-{secrets.token_hex(4)}")
        self._max_shard_bytes = max_shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> CheckpointWriter:
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written: {error.strerror}. Choose another folder"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
            elif isinstance(error, OSError):
                raise self._failed(error) from error
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.folder}: writing failed: {error.strerror}. Is the disk full?")

    def check_space(self, num_bytes: int) -> None:
        """Refuse before the work starts what the disk cannot hold."""
        free = shutil.disk_usage(self._partial).free
        if num_bytes > free:
            raise CheckpointError(
                f"{self.folder}: the weights take {num_bytes / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB free. "
                "Choose another disk"
            )

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. It must not change before the folder is complete."""
        if self._shard and self._shard_bytes + tensor.nbytes > self._max_shard_bytes:
            self._write_shard()
        self._shard[name] = tensor.cpu().contiguous()
        self._shard_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON file of the folder."""
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, content: str) -> None:
        """Write one text file of the folder."""
        (self._partial / name).write_text(content, encoding="utf-8")

    def copy(self, file: Path) -> None:
        """Take over one file as it is."""
        shutil.copyfile(file, self._partial / file.name)

    def _write_shard(self) -> None:
        self._shards.append(list(self._shard))
        file = self._partial / f"shard-{len(self._shards)}"
        try:
            save_file(self._shard, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder}: writing {self._shard_bytes} bytes failed: {error}. Is the disk full?"
            ) from error
        file.chmod(0o644)  # safetensors writes for the owner alone
        self._shard, self._shard_bytes = {}, 0

    def _finish(self) -> None:
        """Give the shards their final names, write the index, move the folder into place."""
        if self._shard:
            self._write_shard()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            final = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            (self._partial / f"shard-{number}").rename(self._partial / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            self.write_json(INDEX_FILE, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})
        if not self.folder.exists():
            self._partial.rename(self.folder)
            return
        files = sorted(self._partial.iterdir(), key=lambda file: file.name == "config.json")
        for (
            file
        ) in files:  # an empty folder that was there is filled; config.json, which makes it a checkpoint, comes last
            file.rename(self.folder / file.name)
