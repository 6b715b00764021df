"""`saccade plan`: the memory of training, and the capacity of serving."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from saccade.cli.options import JsonOption, SetOption
from saccade.errors import ConfigError

Recompute = Literal["none", "selective", "full"]
_TRAINING, _SERVING, _SIZES = "Training", "Serving", "Serving a model of which only sizes are known"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder, published checkpoint (ORG/NAME), size by name (3b, ...; see saccade models), or a recipe."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, ..., or its memory in GiB.")] = "H200",
    gpus: Annotated[int, typer.Option("--gpus", "--ranks", min=1, help="Number of GPUs.")] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a packed sequence; default 16384. A recipe has its own.", rich_help_panel=_TRAINING
        ),
    ] = None,
    patches: Annotated[
        int | None,
        typer.Option(
            min=0, help="Vision patches of a packed sequence; default 2.25 per token.", rich_help_panel=_TRAINING
        ),
    ] = None,
    recompute_vision: Annotated[
        str | None,
        typer.Option(
            help="Activation checkpointing of the vision tower: none (default), selective or full.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    recompute_language: Annotated[
        str | None,
        typer.Option(help="Activation checkpointing of the decoder, likewise.", rich_help_panel=_TRAINING),
    ] = None,
    set_: SetOption = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Plan serving; any option of this group does too.", rich_help_panel=_SERVING),
    ] = False,
    text_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Text tokens of a request, prompt and output together; default 1024.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    image_tokens: Annotated[
        int | None, typer.Option(min=0, help="Image tokens of a request.", rich_help_panel=_SERVING)
    ] = None,
    image_size: Annotated[
        list[str] | None,
        typer.Option(
            help="WIDTHxHEIGHT of an image of a request, instead of its tokens; may be repeated.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Text tokens that are generated; default a quarter.", rich_help_panel=_SERVING),
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="Requests that arrive at all GPUs.", rich_help_panel=_SERVING)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests in progress at once, on all GPUs.", rich_help_panel=_SERVING),
    ] = None,
    latency_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds that a request takes; estimated if not given.", rich_help_panel=_SERVING),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum tokens of a request; default: the model's context length.", rich_help_panel=_SERVING
        ),
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(min=1, help="Parameters, such as 13e9.", rich_help_panel=_SIZES)
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers.", rich_help_panel=_SIZES)] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.", rich_help_panel=_SIZES)] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key and value heads; default: query heads.", rich_help_panel=_SIZES)
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Width of a head.", rich_help_panel=_SIZES)] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the GPU memory of training, or the capacity of serving: what fits, why, and what to change if it does not."""
    sizes = {"--parameters": parameters, "--layers": layers, "--heads": heads, "--head-dim": head_dim}
    load = {"text_tokens": text_tokens, "output_tokens": output_tokens, "requests_per_s": requests_per_second, "concurrency": concurrency, "latency_s": latency_s}  # fmt: skip
    serving = (*load.values(), image_tokens, image_size, context, *sizes.values(), kv_heads)
    training = {"--tokens": tokens, "--patches": patches, "--recompute-vision": recompute_vision, "--recompute-language": recompute_language, "--set": set_}  # fmt: skip
    if serve or any(value is not None for value in serving):
        if given := [flag for flag, value in training.items() if value is not None]:
            raise ConfigError(f"{given[0]} is for training, but a plan of serving was asked for. Remove it")
        given_load = {name: value for name, value in load.items() if value is not None}
        _plan_serving(model, sizes, kv_heads, gpu, gpus, given_load, image_tokens, image_size or [], context, as_json)
        return
    if model is None:
        raise ConfigError("no model. Give a checkpoint folder, a size such as 3b, or a training recipe")
    _plan_training(model, gpu, gpus, tokens, patches, recompute_vision, recompute_language, set_, as_json)


# ------------------------------------------------------------------ serving


def _plan_serving(
    model: str | None, sizes: dict[str, Any], kv_heads: int | None, gpu: str, gpus: int, load: dict[str, Any],
    image_tokens: int | None, image_sizes: list[str], context: int | None, as_json: bool,
) -> None:  # fmt: skip
    from saccade.engine.capacity import Load, plan_serving
    from saccade.gpus import gpu_named

    if image_tokens is not None and image_sizes:
        raise ConfigError("--image-tokens and --image-size both say how many image tokens there are. Give one of them")
    wanted = [_image_size(text) for text in image_sizes]
    served, cost = _served_model(model, sizes, kv_heads, wanted, context)
    made = plan_serving(
        served,
        gpu_named(gpu),
        Load(
            image_tokens=cost[0] if image_tokens is None else image_tokens,
            image_patches=cost[1],
            **{"text_tokens": 1024} | load,
        ),
        num_gpus=gpus,
    )
    typer.echo(json.dumps(made.record()) if as_json else "\n".join(made.lines()))


def _served_model(
    model: str | None, sizes: dict[str, Any], kv_heads: int | None, images: list[tuple[int, int]], context: int | None
) -> tuple[Any, tuple[int, int]]:
    """(model, (tokens, patches) of the images)."""
    from saccade.engine.config import EngineConfig
    from saccade.engine.served_model import configured_model, described_model, image_cost, named_image_cost
    from saccade.model.families import load_model_config, named_size, published_as
    from saccade.model.weights import meta_model

    if any(value is not None for value in (*sizes.values(), kv_heads)):
        _check_sizes(model, sizes, images)
        described = described_model(
            parameters=sizes["--parameters"], num_layers=sizes["--layers"], num_heads=sizes["--heads"],
            head_dim=sizes["--head-dim"], num_kv_heads=kv_heads, max_length=context or 32768,
        )  # fmt: skip
        return described, (0, 0)
    if model is None or model.endswith(".toml"):
        raise ConfigError(
            "serving is planned for a checkpoint folder, a size such as 3b, or --parameters, --layers, --heads and --head-dim. Give one"
        )
    folder = Path(model)
    _check_model(model)
    if not folder.is_dir():
        known = published_as(model)
        config = named_size(model if known is None else known[1])
        return configured_model(model, config, EngineConfig(), context), named_image_cost(config, images)
    stored, quantization = meta_model(folder)
    compressed = None if quantization is None else stored
    served = configured_model(model, load_model_config(folder), EngineConfig(), context, compressed)
    return served, image_cost(folder, images)


def _check_sizes(model: str | None, sizes: dict[str, Any], images: list[tuple[int, int]]) -> None:
    if missing := [flag for flag, value in sizes.items() if value is None]:
        raise ConfigError(f"a model by its sizes needs {', '.join(sizes)}. Add {' and '.join(missing)}")
    if model is not None:
        raise ConfigError(f"both a model ({model}) and sizes were given. Remove one of them")
    if images:
        raise ConfigError("tokens of an image depend on the model, of which only sizes are given. Use --image-tokens")


def _image_size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise ConfigError(f"--image-size {text!r}: write WIDTHxHEIGHT in pixels, such as 672x672")
    return int(width), int(height)


# ------------------------------------------------------------------ training


def _plan_training(
    model: str, gpu: str, ranks: int, tokens: int | None, patches: int | None, recompute_vision: str | None,
    recompute_language: str | None, set_: list[str] | None, as_json: bool,
) -> None:  # fmt: skip
    from saccade.train.memory_planner import report

    if model.endswith(".toml"):
        _check_left_out(
            {
                "--tokens": (tokens, "stages.NAME.data.max_seq_len"),
                "--patches": (patches, "stages.NAME.data.max_patches"),
                "--recompute-vision": (recompute_vision, "parallel.recompute_vision"),
                "--recompute-language": (recompute_language, "parallel.recompute_language"),
            }
        )
        plans = _plans_of_recipe(Path(model), set_ or [], ranks)
    else:
        if set_:
            raise ConfigError("--set applies to a recipe. Give a recipe instead of a model, or remove --set")
        _check_model(model)
        plans = [_plan_of_model(model, ranks, tokens or 16384, patches, recompute_vision, recompute_language)]
    reports = {name: report(planner, size, gpu) for name, planner, size in plans}
    if as_json:
        typer.echo(json.dumps({name: made.record() for name, made in reports.items()}))
        return
    for name, made in reports.items():
        typer.echo(name)
        for line in made.lines():
            typer.echo(f"  {line}")


def _plans_of_recipe(recipe: Path, overrides: list[str], ranks: int) -> list[tuple[str, Any, Any]]:
    """(name, planner, size of a micro-batch) of each stage."""
    from saccade.config import load_config
    from saccade.model.families import download_advice
    from saccade.train.config import TrainConfig
    from saccade.train.memory_planner import folder_config, model_config, stage_planner

    config = load_config(TrainConfig, recipe, overrides)
    folder = config.model.folder
    if not folder.exists() and (advice := download_advice(folder)):
        typer.echo(f"{folder} is not here: planned with its published sizes. {advice}", err=True)
        start = model_config(str(folder))
    else:
        start = folder_config(folder)
    return [(f"stage {stage.name}", *stage_planner(config, stage, start, ranks)) for stage in config.stages]


def _plan_of_model(
    model: str, ranks: int, tokens: int, patches: int | None, vision: str | None, language: str | None
) -> tuple[str, Any, Any]:
    """(name, planner, size of a micro-batch) of one model and size."""
    from saccade.train.config import ParallelConfig
    from saccade.train.memory_planner import MicroBatchSize, Planner, model_config

    extents = {"recompute_vision": vision or "none", "recompute_language": language or "none"}
    _check_recompute(*extents.values())
    planner = Planner(config=model_config(model), world_size=ranks, parallel=ParallelConfig(**extents))  # type: ignore[arg-type]
    return model, planner, MicroBatchSize(tokens=tokens, patches=round(2.25 * tokens) if patches is None else patches)


def _check_model(model: str) -> None:
    from saccade.model.families import named_sizes, published_as

    if not Path(model).is_dir() and model not in named_sizes() and published_as(model) is None:
        raise ConfigError(
            f"{model}: neither a checkpoint folder, nor a recipe (.toml), nor a size that saccade models lists. Check the name"
        )


def _check_left_out(flags: dict[str, tuple[object, str]]) -> None:
    """Refuse flags that a recipe sets itself."""
    for flag, (value, key) in flags.items():
        if value is not None:
            raise ConfigError(f"{flag} applies to a model, but a recipe was given. Use --set {key}={value}")


def _check_recompute(*extents: str) -> None:
    if unknown := [extent for extent in extents if extent not in get_args(Recompute)]:
        raise ConfigError(f"recompute {unknown[0]!r} is unknown. Use one of {', '.join(get_args(Recompute))}")
