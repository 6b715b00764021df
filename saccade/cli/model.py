"""`saccade quickstart`, `init` and `chat`."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.options import DeviceOption, Dtype, DtypeOption, JsonOption, progress
from saccade.errors import ConfigError


def quickstart(
    folder: Annotated[Path, typer.Option(help="Where to put data, checkpoints and pictures.")] = Path("quickstart"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of training: fewer end sooner, and answer worse.")] = 800,
) -> None:
    """The whole flow at toy size on this machine: make data, train, ask. Takes two minutes."""
    from saccade.quickstart import quickstart as run

    run(folder, say=typer.echo, num_steps=steps)


def init(
    out: Annotated[Path, typer.Argument(help="Checkpoint folder to make.")],
    size: Annotated[str | None, typer.Option(help="A named size with random weights: tiny, 3b, 7b, 32b, 72b.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with sizes of your own, random weights.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text model to build on: a checkpoint folder (Qwen2, Llama) or a GGUF file.")
    ] = None,
    tower: Annotated[
        str | None, typer.Option(help="With --text, the fresh vision tower: tiny, 90m, 670m.", show_default="90m")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="With --size or --config: section.key=value, may be repeated.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --size or --config: take the tokenizer of this checkpoint folder.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format to store.")] = Dtype.BF16,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint folder: a named size, sizes of your own, or a text model with a fresh vision tower."""
    from saccade.config import load_config, override_config
    from saccade.device import DTYPES
    from saccade.model.config import ModelConfig
    from saccade.model.initialize import initialize_from_text, initialize_random, named_size

    if sum(option is not None for option in (size, config, text)) != 1:
        raise ConfigError("saccade init takes exactly one of --size, --config and --text. See saccade init --help")
    if text is not None and (set_ or tokenizer):
        raise ConfigError(
            "--set and --tokenizer go with --size or --config; a text model brings its own sizes and tokenizer"
        )
    if text is None and tower is not None:
        raise ConfigError("--tower goes with --text; --size and --config name their own tower")
    if size is not None:
        chosen = override_config(named_size(size), set_ or [], f"size {size}")
    elif config is not None:
        chosen = load_config(ModelConfig, config, set_ or [])
    storage = DTYPES[dtype]
    with progress("tensors") as advance:
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


def chat(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    words: Annotated[list[str], typer.Argument(metavar="[IMAGE]... QUESTION", help="Image files, then the question.")],
    system: Annotated[str | None, typer.Option(help="System message; the template's own if not given.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 for the likeliest words, higher for more varied ones.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the likeliest tokens of this total probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.")] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a model about images, or just talk to it. The answer is printed as it is generated."""
    import asyncio

    from saccade.engine import Engine, EngineConfig, SamplingParams
    from saccade.errors import RequestError

    *images, question = words
    if os.path.isfile(question):  # noqa: PTH113  Path.is_file raises for a question longer than a file name
        raise ConfigError(f"the last word is the question, but {question} is a file. Ask something about it")
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=1.0 if top_p is None else top_p, seed=seed, max_tokens=max_tokens
    )
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    conversation = [*messages, {"role": "user", "content": content}]

    async def answer(engine: Engine) -> None:
        async for part in engine.stream(conversation, sampling):
            if not as_json:
                typer.echo(part.text, nl=False)
            if (whole := part.completion) is None:
                continue
            if whole.failure is not None:
                raise RequestError(whole.failure.message)
            found = {
                "text": whole.text,
                "prompt_tokens": whole.num_prompt_tokens,
                "tokens": len(whole.token_ids),
                "finish_reason": whole.finish_reason,
            }
            typer.echo(json.dumps(found, ensure_ascii=False) if as_json else "")

    config = EngineConfig(max_requests=1, num_workers=0, prefix_cache=False)
    with Engine.load(checkpoint, device=device, dtype=dtype, config=config) as engine:
        asyncio.run(answer(engine))
