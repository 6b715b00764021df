"""`saccade models` and `saccade init`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.options import Dtype, JsonOption
from saccade.cli.progress import count_progress
from saccade.errors import ConfigError


def models(as_json: JsonOption = False) -> None:
    """List the model families, their sizes, and what is supported."""
    import torch

    from saccade.model.families import TEXT, VISION_LANGUAGE, size_name
    from saccade.model.vlm import VLM

    def num_parameters(config: Any) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in VLM(config).parameters())

    described: list[dict[str, Any]] = [
        {
            "family": family.model_type,
            "name": family.name,
            "summary": family.summary,
            "tool_calls": family.tool_calls,
            "sizes": {size_name(family, size): num_parameters(config) for size, config in family.sizes.items()},
            "towers": list(family.towers),
        }
        for family in VISION_LANGUAGE.values()
    ]
    if as_json:
        typer.echo(json.dumps({"families": described, "text_models": list(TEXT)}))
        return
    for one in described:
        sizes = ", ".join(f"{size} ({_amount(count)})" for size, count in one["sizes"].items())
        typer.echo(f"{one['name']} (model_type {one['family']})\n  {one['summary']}\n  sizes for init: {sizes}")
    typer.echo(
        "Every family: checkpoint folders of Hugging Face as they are, images (and videos unless it says none), "
        "full and LoRA training, serving with adapters, int8, fp8 and int4 folders.\n"
        f"Text models to build on (saccade init --text): {', '.join(TEXT)}, as folders or GGUF files"
    )


def _amount(count: int) -> str:
    return f"{count / 1e9:.2g}B" if count >= 1e8 else f"{count / 1e6:.2g}M"


def init(
    out: Annotated[Path, typer.Argument(help="Checkpoint folder to make.")],
    size: Annotated[
        str | None,
        typer.Option(help="A named size with random weights, such as tiny or 3b; saccade models lists them."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with custom sizes, random weights.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text model to build on: a checkpoint folder (Qwen2, Llama) or a GGUF file.")
    ] = None,
    tower: Annotated[
        str | None, typer.Option(help="With --text, the new vision tower: tiny, 22m, 90m, 670m.", show_default="90m")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="With --size or --config: section.key=value, may be repeated.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --size or --config: take the tokenizer of this checkpoint folder.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the stored weights.")] = Dtype.BF16,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint folder: a named size, custom sizes, or a text model with a new vision tower."""
    from saccade.config import load_config, override_config
    from saccade.device import DTYPES
    from saccade.model.config import ModelConfig
    from saccade.model.initialize import initialize_from_text, initialize_random, named_size

    if sum(option is not None for option in (size, config, text)) != 1:
        raise ConfigError("saccade init takes exactly one of --size, --config and --text. See saccade init --help")
    if text is not None and (set_ or tokenizer):
        raise ConfigError(
            "--set and --tokenizer go with --size or --config; a text model has its own sizes and tokenizer"
        )
    if text is None and tower is not None:
        raise ConfigError("--tower goes with --text; --size and --config include a tower")
    if size is not None:
        chosen = override_config(named_size(size), set_ or [], f"size {size}")
    elif config is not None:
        chosen = load_config(ModelConfig, config, set_ or [])
    storage = DTYPES[dtype]
    with count_progress("tensors") as advance:
        if text is not None:
            made = initialize_from_text(out, text, tower or "90m", dtype=storage, seed=seed, on_tensor=advance)
        else:
            made = initialize_random(out, chosen, tokenizer_from=tokenizer, dtype=storage, seed=seed, on_tensor=advance)
    num_bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(out), "family": made.family, "bytes": num_bytes}))
    else:
        amount = f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
        typer.echo(f"{out}: {made.family}, {amount} of {dtype} weights")
