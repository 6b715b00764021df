"""`saccade plan`: the memory of training, its layouts on a cluster, and the capacity of serving."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from saccade.cli.options import JsonOption, SetOption
from saccade.errors import ConfigError

Recompute = Literal["none", "selective", "full"]


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder, published checkpoint (ORG/NAME), size by name (3b, ...; see saccade models), "
            "or a recipe."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, ..., or its memory in GiB.")] = "H200",
    gpus: Annotated[int, typer.Option("--gpus", "--ranks", min=1, help="Number of GPUs.")] = 1,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="GPUs of one engine, which divide every matrix; for serving.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a packed sequence; default 16384. A recipe has its own.")
    ] = None,
    patches: Annotated[
        int | None, typer.Option(min=0, help="Vision patches of a packed sequence; default 2.25 per token.")
    ] = None,
    recompute_vision: Annotated[
        str | None,
        typer.Option(help="Activation checkpointing of the vision tower: none (default), selective or full."),
    ] = None,
    recompute_language: Annotated[
        str | None, typer.Option(help="Activation checkpointing of the decoder, likewise.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1024, help="Compare layouts of --gpus for packed sequences of so many tokens; default 16384."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Compare layouts; between nodes: ib-ndr (default), ib-hdr, roce-400, efa, ethernet-100, "
            "ethernet-25, or the Gbit/s of each GPU."
        ),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node, for layouts.")] = 8,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Compare layouts; packed sequences of a step, default one per GPU.")
    ] = None,
    gpu_hour_price: Annotated[float | None, typer.Option(min=0.0, help="Price of a GPU hour, for layouts.")] = None,
    explain: Annotated[
        Path | None, typer.Option(help="Compare layouts; write a page with the timeline of the best one.")
    ] = None,
    set_: SetOption = None,
    serve: Annotated[bool, typer.Option("--serve", help="Plan serving; every option below implies it.")] = False,
    text_tokens: Annotated[
        int | None, typer.Option(min=1, help="Text tokens of a request, prompt and output together; default 1024.")
    ] = None,
    image_tokens: Annotated[int | None, typer.Option(min=0, help="Image tokens of a request.")] = None,
    image_size: Annotated[
        list[str] | None,
        typer.Option(help="WIDTHxHEIGHT of an image of a request, instead of its tokens; may be repeated."),
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=0, help="Text tokens that are generated; default a quarter.")
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="Requests that arrive at all GPUs.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in progress at once, on all GPUs.")] = None,
    latency_s: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that a request takes; estimated if not given.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a request; default: the model's context length.")
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(min=1, help="Instead of a model, its sizes: parameters, such as 13e9.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads; default: query heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Width of a head.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan training (memory, or layouts of a cluster) or the capacity of serving: what fits, why, what to change."""
    sizes = {"--parameters": parameters, "--layers": layers, "--heads": heads, "--head-dim": head_dim}
    load = {
        "text_tokens": text_tokens,
        "image_tokens": image_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": requests_per_second,
        "concurrency": concurrency,
        "latency_s": latency_s,
    }
    asked = {
        "--seq-len": seq_len, "--network": network, "--global-batch-size": global_batch_size, "--explain": explain,
    }  # fmt: skip
    serving = (tensor_parallel_size, *load.values(), image_size, context, *sizes.values(), kv_heads)
    training = {
        "--tokens": tokens,
        "--patches": patches,
        "--recompute-vision": recompute_vision,
        "--recompute-language": recompute_language,
        "--set": set_,
    }
    asks_layouts = any(value is not None for value in asked.values())
    if serve or any(value is not None for value in serving):
        if given := [flag for flag, value in asked.items() if value is not None]:
            raise ConfigError(
                f"{given[0]} compares layouts of training, but a plan of serving was asked for. Remove it"
            )
        if given := [flag for flag, value in training.items() if value is not None]:
            raise ConfigError(f"{given[0]} is for training, but a plan of serving was asked for. Remove it")
        images = [_image_size(text) for text in image_size or []]
        made = _plan_serving(model, sizes, kv_heads, gpu, gpus, load, images, context, tensor_parallel_size or 1)
        layouts = [] if as_json else _compare_layouts(model, sizes, gpu, gpus, made, context)
        typer.echo(json.dumps(made.record()) if as_json else "\n".join([*made.lines(), *layouts]))
        return
    if model is None:
        raise ConfigError("no model. Give a checkpoint folder, a size such as 3b, or a training recipe")
    if asks_layouts:
        if given := [flag for flag, value in training.items() if value is not None and flag != "--patches"]:
            raise ConfigError(f"{given[0]} is for the plan of one layout. Remove it, or {', '.join(asked)}")
        report = _plan_layouts(
            model, gpu, gpus, network or "ib-ndr", gpus_per_node, seq_len or 16384, global_batch_size or gpus, patches,
            gpu_hour_price,
        )  # fmt: skip
        typer.echo(json.dumps(report.record()) if as_json else "\n".join(report.lines()))
        if explain is not None:
            report.write(explain)
        return
    plans = _plan_training(model, gpu, gpus, training)
    if as_json:
        typer.echo(json.dumps({name: made.record() for name, made in plans.items()}))
        return
    for name, made in plans.items():
        typer.echo("\n  ".join([name, *made.lines()]))


# ------------------------------------------------------------------ serving


def _plan_serving(
    model: str | None, sizes: dict[str, Any], kv_heads: int | None, gpu: str, gpus: int, load: dict[str, Any],
    images: list[tuple[int, int]], context: int | None, num_ranks: int,
) -> Any:  # fmt: skip
    from saccade.plan.gpus import gpu_named
    from saccade.plan.served_model import described_model, image_cost, served_model
    from saccade.plan.serving import plan_serving
    from saccade.plan.throughput import RequestLoad

    if load["image_tokens"] is not None and images:
        raise ConfigError("--image-tokens and --image-size both say how many image tokens there are. Give one of them")
    given: dict[str, Any] = {"text_tokens": 1024} | {name: value for name, value in load.items() if value is not None}
    if any(value is not None for value in (*sizes.values(), kv_heads)):
        _check_sizes(model, sizes, images)
        if num_ranks > 1:
            raise ConfigError("--tensor-parallel-size needs a model: give a checkpoint folder or a size such as 72b")
        served = described_model(
            parameters=sizes["--parameters"], num_layers=sizes["--layers"], num_heads=sizes["--heads"],
            head_dim=sizes["--head-dim"], num_kv_heads=kv_heads, max_length=context or 32768,
        )  # fmt: skip
    elif model is None or model.endswith(".toml"):
        raise ConfigError(
            "serving is planned for a checkpoint folder, a size such as 3b, or --parameters, --layers, --heads and "
            "--head-dim. Give one"
        )
    else:
        served, cost = served_model(model, context, num_ranks=num_ranks), image_cost(model, images)
        given = {"image_tokens": cost[0], "image_patches": cost[1]} | given
    return plan_serving(served, gpu_named(gpu), RequestLoad(**given), num_gpus=gpus)


def _compare_layouts(
    model: str | None, sizes: dict[str, Any], gpu: str, gpus: int, made: Any, context: int | None
) -> list[str]:
    """Engines of every possible number of ranks on several GPUs, for a model whose matrices are known."""
    if gpus == 1 or model is None or any(value is not None for value in sizes.values()):
        return []
    from saccade.model.tensor_parallel import possible_ranks
    from saccade.plan.gpus import gpu_named
    from saccade.plan.served_model import model_config, served_model
    from saccade.plan.serving import compare_layouts

    numbers = [size for size in possible_ranks(model_config(model).language) if gpus % size == 0]
    by_ranks = {size: served_model(model, context, num_ranks=size) for size in numbers}
    return list(compare_layouts(by_ranks, gpu_named(gpu), made.load, num_gpus=gpus))


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


# ------------------------------------------------------------------ layouts


def _plan_layouts(
    model: str, gpu: str, gpus: int, network: str, gpus_per_node: int, seq_len: int, global_batch_size: int,
    patches: int | None, gpu_hour_price: float | None,
) -> Any:  # fmt: skip
    """The layouts of a cluster."""
    from saccade.plan.cluster import Cluster, Job
    from saccade.plan.gpus import gpu_named
    from saccade.plan.layout_report import LayoutReport
    from saccade.plan.layouts import LayoutPlanner
    from saccade.plan.prices import network_named
    from saccade.plan.served_model import model_config

    if model.endswith(".toml"):
        raise ConfigError("layouts are compared for a checkpoint folder or a size such as 7b, and a recipe was given")
    job = Job(
        config=model_config(model), seq_len=seq_len, global_batch_size=global_batch_size, patches=patches
    )  # fmt: skip
    cluster = Cluster(gpu=gpu_named(gpu), num_gpus=gpus, network=network_named(network, gpus_per_node))
    return LayoutReport(LayoutPlanner(job, cluster), gpu_hour_price=gpu_hour_price)


# ------------------------------------------------------------------ training

_RECIPE_KEYS = {
    "--tokens": "stages.NAME.data.max_seq_len",
    "--patches": "stages.NAME.data.max_patches",
    "--recompute-vision": "parallel.recompute_vision",
    "--recompute-language": "parallel.recompute_language",
}


def _plan_training(model: str, gpu: str, gpus: int, flags: dict[str, Any]) -> dict[str, Any]:
    """The plan of a model, or of each stage of a recipe."""
    from saccade.plan.gpus import gpu_named
    from saccade.plan.training import plan_model, plan_recipe
    from saccade.train.parallel_config import ParallelConfig

    if model.endswith(".toml"):
        for flag, key in _RECIPE_KEYS.items():
            if flags[flag] is not None:
                raise ConfigError(f"{flag} applies to a model, but a recipe was given. Use --set {key}={flags[flag]}")
        plans, download = plan_recipe(Path(model), flags["--set"] or [], gpu_named(gpu), num_gpus=gpus)
        if download is not None:
            typer.echo(download, err=True)
        return dict(plans)
    if flags["--set"]:
        raise ConfigError("--set applies to a recipe. Give a recipe instead of a model, or remove --set")
    extents: list[Any] = [flags[flag] or "none" for flag in ("--recompute-vision", "--recompute-language")]
    if unknown := [extent for extent in extents if extent not in get_args(Recompute)]:
        raise ConfigError(f"recompute {unknown[0]!r} is unknown. Use one of {', '.join(get_args(Recompute))}")
    parallel = ParallelConfig(recompute_vision=extents[0], recompute_language=extents[1])
    tokens, patches = flags["--tokens"] or 16384, flags["--patches"]
    return {model: plan_model(model, gpu_named(gpu), parallel, tokens=tokens, patches=patches, num_gpus=gpus)}
