"""Kernels are tested on the GPU if there is one, otherwise on the CPU under Triton's interpreter.

A test takes `device` and `dtype`; it runs in every dtype of its device. The interpreter's bf16 matrix product is wrong,
so bf16 is for the GPU. Fresh memory is poisoned: an output that a kernel does not write is NaN, not an earlier result.
"""

from collections.abc import Iterator

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

_CPU_DTYPES = (torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow))
"""Dtypes under the interpreter differ in casts only; a GPU tests all of its own."""
_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(params=_GPU_DTYPES if HAS_GPU else _CPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def one_dtype(device: str) -> torch.dtype:
    """The dtype of a test that does not depend on it: every further one costs a minute of compiling."""
    return torch.bfloat16 if device == "cuda" else torch.float32


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _freed_memory() -> Iterator[None]:
    """Free memory for other test processes on the GPU."""
    yield
    if HAS_GPU:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `empty`, `empty_like` and `new_empty` return with NaN, or with the largest integer."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            x = allocate(*args, **kwargs)
            if x.is_floating_point() and x.dtype.itemsize > 1:
                return x.fill_(float("nan"))
            return x.fill_(torch.iinfo(x.dtype).max) if x.dtype in (torch.int8, torch.int32, torch.int64) else x

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
