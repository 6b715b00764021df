"""Read the tensors of a checkpoint folder's safetensors files.

Memory: 64 MiB or one tensor of mapped file, for a GPU 128 MiB of pinned memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.processor.folder import read_json
from saccade.workers.shared_memory import byte_view

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAPPED_BYTES = 64 * 2**20
"""Files are remapped after this many bytes: mapped pages count as memory of the process until the mapping is closed."""
_STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_READ_BYTES, _NUM_READERS = 16 * 2**20, 8
"""Bytes that a thread reads at once for a GPU, and threads. A mapped file, read by pages, took 6 s for 7 GB."""


Parts = Mapping[str, tuple[slice, ...]]
"""The part of a tensor that is read, by its name; others are read whole."""


class StoredTensor(NamedTuple):
    """Header entry of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of it."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by checkpoint name. Missing files are an error that names them."""
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


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors of a safetensors file."""
    return list(read_header(file))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. Only its header is read."""
    with _open(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        return {name: StoredTensor(tuple(entry.get_shape()), entry.get_dtype()) for name, entry in slices.items()}


def read_tensors(
    files: dict[str, Path], names: Iterable[str], device: torch.device, parts: Parts | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor on the device, file by file, in the order of the files. `parts`: those of which a part is read."""
    by_file: dict[Path, set[str]] = {}
    for name in names:
        by_file.setdefault(files[name], set()).add(name)
    read = _read_on_cpu if device.type == "cpu" else _read_to_gpu
    for file, wanted in by_file.items():
        with _open(file) as opened:
            in_order = [name for name in opened.offset_keys() if name in wanted]
        yield from read(file, in_order, device, parts or {})


def _read_on_cpu(file: Path, names: list[str], device: torch.device, parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Copy tensors out of the mapped file."""
    while names:
        with _open(file, device) as opened:
            num_bytes = 0
            while names and num_bytes < _MAPPED_BYTES:
                name = names.pop(0)
                if name in parts:
                    whole = opened.get_slice(name)
                    tensor = whole[parts[name][: len(whole.get_shape())]]
                else:
                    tensor = opened.get_tensor(name)
                num_bytes += tensor.nbytes
                yield name, tensor.clone(memory_format=torch.contiguous_format)
                del tensor


def _read_to_gpu(file: Path, names: Sequence[str], device: torch.device, parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Threads read parts of the file into pinned memory, from where they are copied in order."""
    with _checked(file), file.open("rb", buffering=0) as opened:
        # safetensors has checked the header.
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
        unknown = [name for name in names if header[name]["dtype"] not in _STORED_DTYPES]
        if unknown:
            stored = header[unknown[0]]["dtype"]
            raise CheckpointError(f"{file}: {unknown[0]} is stored as {stored}; use {', '.join(_STORED_DTYPES)}")
        dtypes = {name: _STORED_DTYPES[header[name]["dtype"]] for name in names}
        runs = {
            name: _Runs.of(header[name]["shape"], dtypes[name].itemsize, parts.get(name, ()))
            .after(8 + header_bytes + header[name]["data_offsets"][0])
            for name in names
        }  # fmt: skip
        reads = [read for name in names for read in runs[name].reads()]
        with _ReadAhead(opened.fileno(), reads) as read_ahead:
            for name in names:
                data = torch.empty(runs[name].num_bytes, dtype=torch.uint8, device=device)
                for target in torch.split(data, _READ_BYTES) if len(data) else ():
                    read_ahead.copy_next(target)
                yield name, data.view(dtypes[name]).view(runs[name].shape)


class _Runs(NamedTuple):
    """Where a part of a tensor is in its file: runs of consecutive bytes, at equal distances."""

    shape: tuple[int, ...]
    first: int
    num_runs: int
    distance: int
    length: int
    """Bytes of a run."""

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int, part: Sequence[slice]) -> _Runs:
        """The part of a tensor that begins at byte 0. At most one dim is divided."""
        spans = [one.indices(size) for one, size in zip(part, shape, strict=False)]
        divided = [dim for dim, (start, stop, _) in enumerate(spans) if (start, stop) != (0, shape[dim])]
        assert len(divided) < 2, "one dim is divided"
        dim = divided[0] if divided else 0
        start, stop = spans[dim][:2] if divided else (0, shape[0] if shape else 1)
        inner = itemsize * math.prod(shape[dim + 1 :])
        own = tuple(stop - start if index == dim else size for index, size in enumerate(shape))
        distance = inner * (shape[dim] if shape else 1)
        return cls(own, start * inner, math.prod(shape[:dim]), distance, (stop - start) * inner)

    def after(self, num_bytes: int) -> _Runs:
        """The same, that many bytes later."""
        return self._replace(first=self.first + num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.num_runs * self.length

    def reads(self) -> Iterator[list[tuple[int, int]]]:
        """Runs (start, bytes) of up to `_READ_BYTES` together."""
        together: list[tuple[int, int]] = []
        room = _READ_BYTES
        for index in range(self.num_runs):
            start, end = self.first + index * self.distance, self.first + index * self.distance + self.length
            while start < end:
                num_bytes = min(room, end - start)
                together.append((start, num_bytes))
                start, room = start + num_bytes, room - num_bytes
                if room == 0:
                    yield together
                    together, room = [], _READ_BYTES
        if together:
            yield together


class _ReadAhead:
    """Reads parts of a file, each as its runs (start, bytes), with several threads into their own pinned memory."""

    def __init__(self, fd: int, parts: Sequence[Sequence[tuple[int, int]]]) -> None:
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
        slot = index % len(self._buffers)
        self._copied[slot].synchronize()  # the earlier part in this buffer
        free = byte_view(self._buffers[slot].numpy())
        for offset, num_bytes in self._parts[index]:
            rest, free = free[:num_bytes], free[num_bytes:]
            while rest:
                if not (num_read := os.preadv(self._fd, [rest], offset)):
                    raise OSError("it is shorter than its header says")
                rest, offset = rest[num_read:], offset + num_read

    def copy_next(self, target: Tensor) -> None:
        """Copy the next part to the device, after the work of its current stream."""
        index, slot = self._num_copied, self._num_copied % len(self._buffers)
        self._reading[slot].result()
        target.copy_(self._buffers[slot][: len(target)], non_blocking=True)
        self._copied[slot].record(torch.cuda.current_stream(target.device))  # which may not be the current device
        self._num_copied += 1
        if index + len(self._buffers) < len(self._parts):
            self._reading[slot] = self._threads.submit(self._read, index + len(self._buffers))


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
