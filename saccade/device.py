"""Names of devices and dtypes to torch objects."""

import functools
import logging
import math
import os
import signal
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Short names, for the command line and recipes."""

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
"""Names in `config.json`."""


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """`auto` is the GPU if there is one. A missing device is an error, never a silent CPU."""
    _avoid_broken_amx()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}. Use cpu, cuda, cuda:1 or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported. Use cpu, cuda, cuda:1 or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} requested, but torch {torch.__version__} sees no GPU. Use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} requested, but there are {torch.cuda.device_count()} GPUs, numbered from 0")
    return device


def resolve_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """`bf16`, `fp16`, `fp32`, the names of `config.json`, or a torch dtype; None keeps the stored dtype."""
    if name is None or isinstance(name, torch.dtype):
        return name
    known = DTYPES | {long: dtype for dtype, long in DTYPE_NAMES.items()}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}. Use one of {', '.join(DTYPES)}")
    return known[name]


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a host array to the device asynchronously, through pinned memory if it is a GPU."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU the system provides each memory page when it is first written; unused pages cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


@functools.cache
def _avoid_broken_amx() -> None:
    """Disable AMX in oneDNN on virtual machines that advertise it but fault on it.

    A bf16 product is tried in a child process (about 10 ms).
    """
    if not torch.cpu._is_amx_tile_supported() or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    with warnings.catch_warnings():
        # Forking a process with threads is safe here: the child only multiplies and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        rows = torch.ones(1, 128, dtype=torch.bfloat16)
        torch.nn.functional.linear(rows, torch.ones(128, 128, dtype=torch.bfloat16), rows[0])
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
        logging.getLogger(__name__).debug("this machine advertises AMX but faults on it: disabled in oneDNN")
