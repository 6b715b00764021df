"""Which device and which number format: one place that turns words into torch objects."""

import torch

from saccade.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The short names used on the command line and in recipes."""

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
"""The names used in `config.json`."""


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """`auto` is the GPU when there is one. A device that is not there is an error, never a silent CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}. Use cpu, cuda, cuda:1 or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} asked for, but torch {torch.__version__} sees no GPU. Use --device cpu")
    return device


def resolve_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """`bf16`, `fp16`, `fp32`, the long names of `config.json`, or a torch dtype; None stays None (keep the stored one)."""
    if name is None or isinstance(name, torch.dtype):
        return name
    known = DTYPES | {long: dtype for dtype, long in DTYPE_NAMES.items()}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}. Use one of {', '.join(DTYPES)}")
    return known[name]
