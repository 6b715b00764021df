"""Tensors out of safetensors files, read straight into the memory they stay in.

    length of the header (8 bytes) | header: JSON, name -> dtype, shape, place | data

Headers are checked by the library. The data is read by plain reads and not through a mapping, whose pages come one fault at a time and
stay in memory until it is closed. On the way to a GPU it passes through two pieces of pinned memory per reader, one of which is filled
while the other is copied, and several readers work at once. (7.5 GB took 6.5 s so, no less than by one thread through a mapping.)
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saccade.errors import CheckpointError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What is read, by the name in headers."""

_READERS = 4
_PIECE_BYTES = 32 * 2**20


class StoredTensor(NamedTuple):
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    place: int
    """Where it begins in the file."""


def read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. Only its header is read."""
    with _naming_errors(file):
        with safe_open(file, framework="pt"):
            pass  # checks that the header is sound and that the file is as long as it says
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(size))
    entries.pop("__metadata__", None)
    return {
        name: StoredTensor(tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def read_tensors(files: dict[str, Path], names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each tensor on the device, file by file, in the order in which they lie there."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    stored = [
        (file, name, entry)
        for file, wanted in by_file.items()
        for header in [read_header(file)]
        for name, entry in sorted(((name, header[name]) for name in wanted), key=lambda item: item[1].place)
    ]
    if device.type == "cpu":
        for file, name, entry in stored:
            yield name, _read(file, entry)
    else:
        yield from _read_to_gpu(stored, device)


def _read(file: Path, entry: StoredTensor) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    with _naming_errors(file), file.open("rb", buffering=0) as opened:
        opened.seek(entry.place)
        _fill(_bytes_of(tensor), opened)
    return tensor


def _read_to_gpu(
    stored: Sequence[tuple[Path, str, StoredTensor]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """In order, a few ahead of whoever takes them."""
    free: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
    for _ in range(_READERS):
        free.put(_Staging(device))

    def read(file: Path, entry: StoredTensor) -> Tensor:
        staging = free.get()
        try:
            return staging.read(file, entry)
        finally:
            free.put(staging)

    with ThreadPoolExecutor(_READERS, "saccade-weights") as pool:
        under_way: deque[tuple[str, Future[Tensor]]] = deque()
        try:
            for file, name, entry in stored:
                under_way.append((name, pool.submit(read, file, entry)))
                if len(under_way) > 2 * _READERS:
                    name, future = under_way.popleft()
                    yield name, future.result()
            for name, future in under_way:
                yield name, future.result()
        finally:
            for _, future in under_way:
                future.cancel()
    torch.cuda.synchronize(device)  # pinned memory may be given back now, and any stream may read


class _Staging:
    """Two pieces of pinned memory, used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [
            (torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]

    def read(self, file: Path, entry: StoredTensor) -> Tensor:
        """The tensor on the GPU, or on its way there on the current stream."""
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=self._device)
        with _naming_errors(file), file.open("rb", buffering=0) as opened, torch.cuda.device(self._device):
            opened.seek(entry.place)
            for target in torch.split(_bytes_of(tensor), _PIECE_BYTES):
                memory, is_copied = self._pieces[0]
                self._pieces.reverse()
                is_copied.synchronize()
                piece = memory[: len(target)]
                _fill(piece, opened)
                target.copy_(piece, non_blocking=True)
                is_copied.record()
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as a row of bytes."""
    return tensor.view(-1).view(torch.uint8)


def _fill(target: Tensor, opened: RawIOBase) -> None:
    """Read as many bytes as there is room for."""
    rest: memoryview = target.numpy().data
    while rest:
        num_read = cast(int, opened.readinto(rest))
        if not num_read:
            raise EOFError("it ends too early")
        rest = rest[num_read:]


@contextlib.contextmanager
def _naming_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{file}: not a readable safetensors file: {error}. Copy it from the original again"
        ) from error
