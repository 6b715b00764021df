"""A row in shared memory: written by the process that makes it, used in place by the one that learns from it.

    patches, where they are decoded to | the other tensors | a description in JSON: where each tensor lies, sample ids, bad samples

The memory is a file without a name. It is written again when the last tensor of its row is gone: fresh pages are dear (1 of 4.5 ms
a sample in a virtual machine).
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.data.bad_samples import BadSample
from saccade.data.collate import CollateResult, PackedSequence
from saccade.errors import DataError, UserError
from saccade.fork_server import decode_error, encode_error
from saccade.processor.image import Pixels
from saccade.processor.inputs import ModelInputs
from saccade.shared_memory import SharedMemory

_ALIGNMENT = 64


class RowFile:
    """The writer's side of one row's memory. It grows to the largest row and never shrinks."""

    def __init__(self) -> None:
        self._file = SharedMemory()
        self.fd = self._file.fd
        self._mapping: mmap.mmap | None = None

    def num_bytes(self) -> int:
        """Size of the file."""
        return self._file.num_bytes()

    def write(self, make: Callable[[Pixels], CollateResult], num_patches: int, patch_dim: int) -> tuple[int, int]:
        """Have a row made with its patches in place; where its description lies, and how long it is.

        What `make` raises is described instead, and raised by `read_row`.
        """
        end = num_patches * patch_dim
        try:
            made = make(np.frombuffer(self._mapped(end), np.uint8, end).reshape(num_patches, patch_dim))
            description, end = self._append(made, end)
        except Exception as error:
            description = encode_error(error)
        return end, self._file.write(json.dumps(description).encode(), end)

    def _mapped(self, num_bytes: int) -> mmap.mmap:
        """A mapping of at least so many bytes, and some to spare."""
        if self._mapping is None or len(self._mapping) < num_bytes:
            os.ftruncate(self.fd, max(self.num_bytes(), num_bytes + num_bytes // 8, mmap.PAGESIZE))
            self._mapping = mmap.mmap(self.fd, 0)
        return self._mapping

    def _append(self, made: CollateResult, end: int) -> tuple[dict[str, Any], int]:
        """Write the other tensors behind the patches; the description of the row, and the new end."""
        fields = {
            field.name: getattr(made.sequence.inputs, field.name) for field in dataclasses.fields(made.sequence.inputs)
        }
        tensors = {}
        for name, tensor in fields.items():
            if isinstance(tensor, Tensor):
                begin = 0 if name == "patches" else end + -end % _ALIGNMENT
                tensors[name] = (str(tensor.dtype).removeprefix("torch."), tensor.shape, begin, begin + tensor.nbytes)
                if name != "patches":
                    end = begin + self._file.write(tensor.contiguous().numpy(), begin)
        others = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
        row = {name: value for name, value in vars(made.sequence).items() if name != "inputs"}
        bad = [dataclasses.asdict(sample) for sample in made.bad]
        return {"tensors": tensors, "others": others, "row": row, "bad": bad, "num_bytes": made.num_bytes}, end


def read_row(memory: mmap.mmap, begin: int, size: int, when_gone: Callable[[], object]) -> CollateResult:
    """The row in this memory, in place. `when_gone` is called once no tensor of it is left."""
    description = json.loads(memory[begin : begin + size])
    if "error" in description:
        error = decode_error(description, "a row could not be made")
        raise DataError(str(error)) if isinstance(error, UserError) else error
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, when_gone).atexit = False
    content = torch.from_numpy(array)
    tensors: dict[str, Any] = {
        name: content[first:end].view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, first, end) in description["tensors"].items()
    }
    others = {name: tuple(value) if isinstance(value, list) else value for name, value in description["others"].items()}
    row = PackedSequence(inputs=ModelInputs(**(tensors | others)), **description["row"])
    return CollateResult(row, [BadSample(**bad) for bad in description["bad"]], description["num_bytes"])
