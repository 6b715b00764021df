"""Read and write checkpoint folders: Hugging Face's layout, exactly (docs/formats.md).

    load:  config -> model on `meta` -> compare names and shapes -> read tensor by tensor -> check that weights are finite
    save:  tensors -> shards of bounded size -> index -> rename the finished folder

Memory: reading holds the model and 64 MiB or one tensor of mapped file (peak 1.13 times 1.9 GB), for a GPU 128 MiB of pinned memory; writing
one shard more.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from saccade.device import DTYPE_NAMES, resolve_device, resolve_dtype
from saccade.errors import CheckpointError
from saccade.model.families import family_of, load_model_config
from saccade.model.linear import Projection, checkpoint_shapes
from saccade.model.merged_projections import merge_storage
from saccade.model.quantization import QuantizationConfig, parse_quantization
from saccade.model.quantized_linear import QuantizedLinear, quantize_storage
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config, read_json
from saccade.workers.shared_memory import byte_view

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

PROCESSOR_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "generation_config.json",
)  # fmt: skip
"""Files copied along with the weights from one checkpoint folder to another."""

_MAPPED_BYTES = 64 * 2**20
"""Files are remapped after this many bytes: mapped pages count as memory of the process until the mapping is closed."""


_STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_READ_BYTES, _NUM_READERS = 16 * 2**20, 8
"""Bytes a thread reads at once for a GPU, and threads: page by page, as a mapped file is read, 7 GB took 6 s."""


class StoredTensor(NamedTuple):
    """Header entry of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """F32, F16 or BF16 where it can be loaded."""


# ------------------------------------------------------------------ reading


def load_model(
    folder: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype | None = None
) -> VLM:
    """Load the model of a checkpoint folder, in eval mode. `dtype` None keeps the stored one."""
    folder, device, dtype = Path(folder), resolve_device(device), resolve_dtype(dtype)
    family = family_of(folder)
    model, quantization = meta_model(folder)
    files = tensor_files(folder)
    shapes = tensor_shapes(files, any_dtype=dtype is not None, is_quantized=quantization is not None)
    names = match_tensors(shapes, model, family, folder)
    for name, tensor in read_tensors(files, names, device):
        load_tensor(model, names[name], tensor, dtype)
    parameters = {name: model.get_parameter(names[name]) for name in names}
    check_finite({name: tensor for name, tensor in parameters.items() if tensor.is_floating_point()}, folder)
    if model.config.tied_head:
        _check_tied_copy(files, model, family.all_names("head.weight"), folder)
        model.tie_head()
    merge_storage(model)
    return model.eval()


def meta_model(folder: Path) -> tuple[VLM, QuantizationConfig | None]:
    """The model of a checkpoint folder on the meta device, its projections in the form they are stored in."""
    try:
        raw = read_config(folder)
        quantization = None if "quantization_config" not in raw else parse_quantization(raw, tensor_files(folder))
        with torch.device("meta"):
            model = VLM(load_model_config(folder))
        if quantization is not None:
            quantize_storage(model, quantization, family_of(folder))
    except CheckpointError as error:
        raise CheckpointError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error
    return model, quantization


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by checkpoint name. Missing files are an error that names them."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: no weight_map from tensors to files. Copy it from the original again")
        files = {name: folder / Path(file).name for name, file in weight_map.items()}
    elif (folder / SINGLE_FILE).is_file():
        files = dict.fromkeys(_read_header(folder / SINGLE_FILE), folder / SINGLE_FILE)
    else:
        raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}. Only safetensors checkpoints are read")
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(
            f"{folder}: shard files named in the index are missing: {', '.join(missing)}. Copy them, or download again"
        )
    return files


def tensor_shapes(files: dict[str, Path], *, any_dtype: bool, is_quantized: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, from the headers. Without `any_dtype` all must have one floating-point dtype.

    `is_quantized`: there may be tensors of quantized layers, whose scales have shapes of one kind: [1], or [outputs, scales].
    """
    headers = {file: _read_header(file) for file in sorted(set(files.values()))}
    folder = next((file.parent for file in headers), None)
    misplaced = [
        f"{name} in {file.name}" for file, header in headers.items() for name in header if files.get(name) != file
    ]
    if misplaced:
        raise CheckpointError(
            f"{folder}: shards hold tensors that the index does not list there: {', '.join(misplaced[:8])}. Use their own index"
        )
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    if is_quantized:
        found = {name: _without_variants(name, entry) for name, entry in found.items() if not name.endswith(_UNREAD)}
    dtypes = {entry.dtype for name, entry in found.items() if not (is_quantized and _is_quantized(name, entry))}
    if not dtypes <= {"F32", "F16", "BF16"}:
        other = next(name for name, entry in found.items() if entry.dtype in dtypes - {"F32", "F16", "BF16"})
        raise CheckpointError(
            f"{folder}: tensors are stored as {', '.join(sorted(dtypes))} (such as {other}); only F32, F16 and BF16 are read. "
            "Quantized checkpoints can be served, not trained or converted: use the original one"
        )
    if len(dtypes) > 1 and not any_dtype:
        raise CheckpointError(
            f"{folder}: tensors are stored as {', '.join(sorted(dtypes))} together. Choose one with dtype (--dtype bf16)"
        )
    return {name: entry.shape for name, entry in found.items()}


_UNREAD = (".weight_shape", ".k_scale", ".v_scale")
"""Tensors of quantized layers with nothing that the engine needs: it computes scales of keys and values per token itself."""
_OPTIONAL = (".input_zero_point", ".weight_g_idx")
"""Tensors that say nothing where `config.json` does not announce them: a zero point of 0, groups of inputs in a row."""


def _is_quantized(name: str, entry: StoredTensor) -> bool:
    """Whether a tensor has a dtype of its own: scales, zero points, and values of few bits."""
    is_scale = name.endswith(("_scale", "_zero_point", ".weight_packed", ".weight_g_idx", *_RENAMED))
    return is_scale or (name.endswith(".weight") and entry.dtype in ("I8", "F8_E4M3"))


_RENAMED = {".qweight": ".weight_packed", ".qzeros": ".weight_zero_point", ".scales": ".weight_scale", ".g_idx": ".weight_g_idx"}  # fmt: skip
"""Tensors of AutoGPTQ and AutoAWQ, by the end of their names, and what they become."""


def _name_in_model(name: str, family: Any) -> str | None:
    stem, dot, last = name.rpartition(".")
    ours: str | None = family.name_in_model(stem + _RENAMED.get(dot + last, dot + last))
    return ours


def _without_variants(name: str, entry: StoredTensor) -> StoredTensor:
    """A scale of a tensor may be stored as [], [1] or [1, 1], scales of outputs as [N] or [N, 1]."""
    if name.endswith(("_scale", ".input_zero_point")) and math.prod(entry.shape) == 1:
        return entry._replace(shape=(1,))
    return entry._replace(shape=(*entry.shape, 1)) if name.endswith("_scale") and len(entry.shape) == 1 else entry


def read_tensors(files: dict[str, Path], names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each tensor on the device, file by file, in the order of the files."""
    by_file: dict[Path, set[str]] = {}
    for name in names:
        by_file.setdefault(files[name], set()).add(name)
    read = _read_on_cpu if device.type == "cpu" else _read_to_gpu
    for file, wanted in by_file.items():
        with _open(file) as opened:
            in_order = [name for name in opened.offset_keys() if name in wanted]
        yield from read(file, in_order, device)


def _read_on_cpu(file: Path, names: list[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Copies of parts of the mapped file."""
    while names:
        with _open(file, device) as opened:
            num_bytes = 0
            while names and num_bytes < _MAPPED_BYTES:
                tensor = opened.get_tensor(name := names.pop(0))
                num_bytes += tensor.nbytes
                yield name, tensor.clone()
                del tensor


def _read_to_gpu(file: Path, names: Sequence[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Parts of the file are read by threads into pinned memory, and copied from there in order. safetensors has checked the header."""
    with _checked(file), file.open("rb", buffering=0) as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
        unknown = [name for name in names if header[name]["dtype"] not in _STORED_DTYPES]
        if unknown:
            stored = header[unknown[0]]["dtype"]
            raise CheckpointError(f"{file}: {unknown[0]} is stored as {stored}; use {', '.join(_STORED_DTYPES)}")
        spans = [[8 + header_bytes + offset for offset in header[name]["data_offsets"]] for name in names]
        parts = [
            (start, min(_READ_BYTES, end - start)) for first, end in spans for start in range(first, end, _READ_BYTES)
        ]
        with _ReadAhead(opened.fileno(), parts) as read_ahead:
            for name, (first, end) in zip(names, spans, strict=True):
                data = torch.empty(end - first, dtype=torch.uint8, device=device)
                for target in torch.split(data, _READ_BYTES) if len(data) else ():
                    read_ahead.copy_next(target)
                yield name, data.view(_STORED_DTYPES[header[name]["dtype"]]).view(header[name]["shape"])


class _ReadAhead:
    """Reads parts (start, bytes) of a file with several threads, each into pinned memory of its own."""

    def __init__(self, fd: int, parts: Sequence[tuple[int, int]]) -> None:
        self._fd, self._parts, self._num_copied = fd, parts, 0
        count = min(_NUM_READERS, len(parts))
        self._buffers = [torch.empty(_READ_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(max(1, count), "saccade-weights")
        self._reading = [self._threads.submit(self._read, index) for index in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _read(self, index: int) -> None:
        slot, (offset, num_bytes) = index % len(self._buffers), self._parts[index]
        self._copied[slot].synchronize()  # what was there before
        rest = byte_view(self._buffers[slot].numpy())[:num_bytes]
        while rest:
            if not (num_read := os.preadv(self._fd, [rest], offset)):
                raise OSError("it is shorter than its header says")
            rest, offset = rest[num_read:], offset + num_read

    def copy_next(self, target: Tensor) -> None:
        """Copy the next part to the device, behind the work of the current stream there."""
        index, slot = self._num_copied, self._num_copied % len(self._buffers)
        self._reading[slot].result()
        target.copy_(self._buffers[slot][: len(target)], non_blocking=True)
        self._copied[slot].record(torch.cuda.current_stream(target.device))  # which may not be the current device
        self._num_copied += 1
        if index + len(self._buffers) < len(self._parts):
            self._reading[slot] = self._threads.submit(self._read, index + len(self._buffers))


def check_finite(tensors: Mapping[str, Tensor], folder: str | Path) -> None:
    """Refuse weights with NaN or infinity, by their names on disk: the model would answer, but nonsense.

    One reduction per tensor and one synchronisation in all: 0.1 s for 1.9 GB on one CPU core.
    """
    extremes = [torch.stack(torch.aminmax(tensor.detach())) for tensor in tensors.values()]  # NaN propagates
    is_finite = torch.stack(extremes).isfinite().all(1).tolist() if extremes else []
    bad = [name for name, is_fine in zip(tensors, is_finite, strict=True) if not is_fine]
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise CheckpointError(
            f"{folder}: NaN or infinity in {', '.join(bad[:4])}{more}. The training run diverged or the file is damaged: use an "
            "earlier checkpoint, or copy it again"
        )


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors of a safetensors file."""
    return list(_read_header(file))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. Only its header is read."""
    with _open(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        return {name: StoredTensor(tuple(entry.get_shape()), entry.get_dtype()) for name, entry in slices.items()}


@contextlib.contextmanager
def _open(file: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    with _checked(file), safe_open(file, framework="pt", device=str(device)) as opened:
        yield opened


@contextlib.contextmanager
def _checked(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: not a readable safetensors file: {error}. Copy it from the original again"
        ) from error


def match_tensors(shapes: dict[str, tuple[int, ...]], model: nn.Module, family: Any, folder: Path) -> dict[str, str]:
    """Checkpoint name to parameter name, complete in both directions; else one error with everything that is wrong."""
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


def _check_tied_copy(files: dict[str, Path], model: VLM, head_names: Iterable[str], folder: Path) -> None:
    """A tied checkpoint may store the head as well; it must then equal the embedding."""
    embedding = model.language.embed_tokens.weight
    for head_name, head in read_tensors(files, [name for name in head_names if name in files], embedding.device):
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise CheckpointError(
                f"{folder}: config.json says tie_word_embeddings, but {head_name} differs from the embedding. Set it to false"
            )


def load_tensor(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Set a parameter. Projections bring it into their storage form."""
    module_name, _, parameter_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    if isinstance(module, Projection):
        module.load_tensor(parameter_name, tensor, dtype)
    else:
        setattr(module, parameter_name, nn.Parameter(tensor if dtype is None else tensor.to(dtype)))


# ------------------------------------------------------------------ writing


def config_for_export(like: str | Path) -> dict[str, Any]:
    """The `config.json` of a folder that is written like another, without what is not exported."""
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


def check_new_folder(folder: Path) -> None:
    """Refuse to write a checkpoint where something is already."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file. Choose another folder or remove it first")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and is not empty. Choose another folder or remove it first")
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(f"{folder} is a broken link. Remove it or choose another folder")


class CheckpointWriter:
    """Writes a checkpoint folder under a temporary name and renames it when it is complete; after an error nothing is left."""

    def __init__(self, folder: str | Path, *, max_shard_bytes: int = 2 * 2**30) -> None:
        self.folder = Path(folder)
        check_new_folder(self.folder)
        target = self.folder.resolve()
        self._partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
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
        """Raise if the disk has less free space than this."""
        free = shutil.disk_usage(self._partial).free
        if num_bytes > free:
            raise CheckpointError(
                f"{self.folder}: the weights take {num_bytes / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB free. "
                "Choose another disk"
            )

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor. It must not change before the folder is complete."""
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
        """Copy one file."""
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
        file.chmod(0o644)  # safetensors makes it readable by the owner alone
        self._shard, self._shard_bytes = {}, 0

    def _finish(self) -> None:
        """Give the shards their final names, write the index, rename the folder."""
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
        for file in files:  # into an existing empty folder; config.json, which makes it a checkpoint, comes last
            file.rename(self.folder / file.name)
