"""Imports on first use, and what to install where a module is missing. Plain Python."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

_EXTRA_OF_MODULE = {
    "aiohttp": "data",
    "av": "video",
    "daft": "data",
    "fastapi": "serve",
    "fsspec": "train",
    "gguf": "train",
    "httptools": "serve",
    "huggingface_hub": "hub",
    "llguidance": "structured",
    "opentelemetry": "otel",
    "orjson": "serve",
    "prometheus_client": "serve",
    "pyarrow": "train",
    "pydantic": "serve",
    "ray": "ray",
    "starlette": "serve",
    "tensorboard": "tensorboard",
    "uvicorn": "serve",
    "uvloop": "serve",
    "wandb": "wandb",
    "xxhash": "train",
}
_EXTRA_OF_COMMAND = {
    "data": "data",
    "train": "train",
    "evaluate": "eval",
    "compress": "eval",
    "serve": "serve",
    "bench": "serve",
    "fleet": "fleet",
    "quickstart": "quickstart",
}
_IN_EXTRA_OF_COMMAND = {"data", "train", "eval", "serve"}
"""Extras that are contained in that of a command; a module of another extra is named by its own."""


def missing_extra(module: str | None, command: str | None = None) -> str | None:
    """One line that says which extra to install for a module; None for a module that no extra has.

    `command`: the command that was run. Several extras have pyarrow; the command's own is named.
    """
    name = (module or "").partition(".")[0]
    extra = _EXTRA_OF_MODULE.get(name)
    if extra is None:
        return None
    if extra in _IN_EXTRA_OF_COMMAND or (extra == "ray" and command == "fleet"):
        extra = _EXTRA_OF_COMMAND.get(command or "", extra)
    what = f"saccade {command} needs {name}" if command else f"{name} is needed here"
    return f"{what}, which is not installed. Install it: pip install 'saccade[{extra}]'"


def lazy_exports(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` (PEP 562) of a package, from exported name to the submodule that defines it.

    Call it as `__getattr__ = lazy_exports(__name__, {"name": "module"})` and repeat the imports under `TYPE_CHECKING`.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{module_of[name]}")
        except ModuleNotFoundError as error:
            if remedy := missing_extra(error.name):
                raise ModuleNotFoundError(f"{package}.{name}: {remedy}", name=error.name) from error
            raise
        return getattr(module, name)

    return __getattr__
