"""Lazy exports: a package's public names are imported on first use, so that importing a package loads no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from saccade.extras import missing_extra


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
