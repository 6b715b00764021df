"""`saccade quickstart`, `init` and `chat`."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.options import DeviceOption, Dtype, DtypeOption, JsonOption, progress
from saccade.errors import ConfigError


def quickstart(
    folder: Annotated[Path, typer.Option(help="Where to put the picture and the checkpoint.")] = Path("quickstart"),
) -> None:
    """The whole flow at toy size on this machine."""
    from saccade.quickstart import quickstart as run

    run(folder, say=typer.echo)


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
    from saccade.model import load_model
    from saccade.model.generation import Sampling, stream
    from saccade.processor import Processor, TextStream

    *images, question = words
    if os.path.isfile(question):  # noqa: PTH113  Path.is_file raises for a question longer than a file name
        raise ConfigError(f"the last word is the question, but {question} is a file. Ask something about it")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    processor = Processor.load(checkpoint)
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
    messages = [{"role": "system", "content": system}] if system is not None else []
    inputs = processor([[*messages, {"role": "user", "content": content}]], add_generation_prompt=True)
    model = load_model(checkpoint, device=device, dtype=dtype)
    text, token_ids = TextStream(processor.decode), []
    for [token_id] in stream(model, inputs, max_new_tokens=max_tokens, eos_ids=processor.eos_ids, sampling=sampling):
        assert token_id is not None, "the only conversation has not ended"
        token_ids.append(token_id)
        if not as_json:
            typer.echo(text.push([token_id]), nl=False)
    if as_json:
        ending = "stop" if token_ids[-1] in processor.eos_ids else "length"
        answer = {
            "text": processor.decode(token_ids),
            "prompt_tokens": inputs.num_tokens,
            "tokens": len(token_ids),
            "finish_reason": ending,
        }
        typer.echo(json.dumps(answer, ensure_ascii=False))
    else:
        typer.echo(text.finish())
