"""Options shared by several commands, and checks of them."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from saccade.errors import ConfigError

_ADAPTER_FILE = "adapter_config.json"


class Dtype(StrEnum):
    """Data types of weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Data type to compute in; that of the checkpoint if not given.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: the GPU if there is one.")]
TensorParallelOption = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", min=1, help="GPUs of one engine, which divide every matrix; on a CPU, processes."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for scripts.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, overrides the file; may be repeated.")]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Worker processes; one per core for large inputs if not given."),
]


class CommandGroup(TyperGroup):
    """A group whose help has the first sentence of every command, however long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands; click itself cuts each after one line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=400)) for name, one in self.commands.items()])


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to copy."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def check_modules(command: str, modules: Sequence[str]) -> None:
    """Refuse a command whose extra is not installed before it does anything."""
    from importlib.util import find_spec

    from saccade.imports import missing_extra

    for name in modules:
        if find_spec(name) is None:
            raise ConfigError(missing_extra(name, command))


def check_adapter(folder: Path, option: str) -> None:
    """Refuse a folder that is no adapter before a model is loaded."""
    if (folder / _ADAPTER_FILE).is_file():
        return
    if not folder.is_dir():
        raise ConfigError(f"{option}: no such folder. Check the path")
    # The folder may be a checkpoint, the checkpoints of a run, or the run.
    below = ("adapter", "step-*/adapter", "checkpoints/step-*/adapter")
    found = sorted(path.parent for pattern in below for path in folder.glob(f"{pattern}/{_ADAPTER_FILE}"))
    remedy = f"The adapter is {found[-1]}" if found else "An adapter is a folder that PEFT or saccade train wrote"
    raise ConfigError(f"{option}: no {_ADAPTER_FILE}. {remedy}")
