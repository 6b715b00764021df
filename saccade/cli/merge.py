"""`saccade merge`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.hub import checkpoint_folder
from saccade.cli.options import JsonOption
from saccade.cli.progress import count_progress
from saccade.errors import CheckpointError


def merge(
    adapter: Annotated[Path, typer.Argument(help="Adapter folder that PEFT or saccade train wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Checkpoint folder to make.")],
    base: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder of the base model, or ORG/NAME of the Hugging Face Hub.",
            show_default="the one that the adapter names",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Merge a LoRA adapter into its base model: a full checkpoint folder that needs no adapter."""
    from saccade.model.checkpoint_writer import check_new_folder
    from saccade.model.merging import base_of_adapter, merge_adapter

    check_new_folder(out)
    named = base_of_adapter(adapter) if base is None else base
    folder = checkpoint_folder(named)
    if base is None and not folder.exists():
        raise CheckpointError(f"{adapter}: its base model {named} is not here. Give its checkpoint folder with --base")
    with count_progress("tensors") as advance:
        layers = merge_adapter(adapter, folder, out, on_tensor=advance)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(out), "base": str(folder), "layers": len(layers)}))
    else:
        typer.echo(f"{out}: {folder} with {len(layers)} layers of {adapter} merged")
