"""What adapters cost: TPOT and throughput of requests over several LoRA adapters, and of the base model alone.

    python -m bench.serve_adapters [--size 3b | --checkpoint FOLDER] [--adapters 8] [--rank 16] [--requests 64]
                                   [--rounds 3] [--out rows.json]

Three engines, one after another: without slots for adapters, with slots and requests of the base model alone, and with
requests over all adapters in turn. Adapters are random, on every projection of the decoder. TPOT is the time of
`--requests` requests of 128 tokens less that of one token each, divided by 127, with prompts of 256 tokens; `text` is
the workload of bench.serve with 256 requests.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.serve import NUM_OUTPUT, NUM_REQUESTS, Prompt, Prompts, greedy, run_with_checkpoint, workloads
from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.model.families import family_of
from saccade.model.linear import projections
from saccade.model.weights import meta_model


def write_adapter(checkpoint: Path, folder: Path, rank: int, seed: int) -> Path:
    """Write a random adapter on every projection of the decoder, in PEFT's layout."""
    family, generator = family_of(checkpoint), torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in projections(meta_model(checkpoint)[0].language.layers):
        outputs, inputs = layer.stored_shape
        stem = f"base_model.model.{family.name_in_transformers(f'language.layers.{name}')}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator).bfloat16() * 0.01
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator).bfloat16() * 0.01
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def timed(engine: Engine, prompts: list[Prompt], samplings: list[SamplingParams], names: list[str | None]) -> float:
    """Return the seconds until the last completion; requests use the adapters of `names` in turn."""
    left, failures, done = len(prompts), [], threading.Event()
    begin = time.perf_counter()

    def on_delta(delta: Any) -> None:
        nonlocal left
        if delta.completion is not None:
            failures.extend([delta.completion.failure] if delta.completion.failure else [])
            left -= 1
            if left == 0:
                done.set()

    for number, ((ids, images), sampling) in enumerate(zip(prompts, samplings, strict=True)):
        options = RequestOptions(adapter=names[number % len(names)])
        engine.submit(engine.preprocess_tokens(ids, images), sampling, on_delta, options=options)
    done.wait()
    assert not failures, failures[0]
    return time.perf_counter() - begin


def measure(engine: Engine, prompts: Prompts, names: list[str | None], options: argparse.Namespace) -> dict[str, float]:
    """Measure TPOT in ms and output tokens per second."""

    def of_length(num_tokens: int) -> float:
        made = [prompts.text(256, 256) for _ in range(options.requests)]
        return timed(engine, made, [greedy(num_tokens)] * options.requests, names)

    of_length(NUM_OUTPUT)
    first = statistics.median(of_length(1) for _ in range(options.rounds))
    whole = statistics.median(of_length(NUM_OUTPUT) for _ in range(options.rounds))
    make = workloads(prompts, options.text_requests)["text"]
    seconds = statistics.median(timed(engine, *make(), names) for _ in range(options.rounds))
    return {
        "tpot_ms": (whole - first) / (NUM_OUTPUT - 1) * 1e3,
        "text_tok_s": options.text_requests * NUM_OUTPUT / seconds,
    }


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--text-requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.checkpoint is None:
        run_with_checkpoint("bench.serve_adapters", options.size)
    config = EngineConfig(prefix_cache=False, max_requests=options.text_requests, max_length=8192)
    prompts, rows = Prompts(options.checkpoint, seed=0, side=28), {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            f"a{n}": write_adapter(options.checkpoint, Path(scratch) / f"a{n}", options.rank, n)
            for n in range(options.adapters)
        }
        with Engine.load(options.checkpoint, config=config) as engine:
            rows["base, no slots"] = measure(engine, prompts, [None], options)
        with Engine.load(options.checkpoint, config=config, adapters=folders) as engine:
            assert not engine.refused_adapters, engine.refused_adapters
            rows["base with slots"] = measure(engine, prompts, [None], options)
            rows[f"over {options.adapters} adapters"] = measure(engine, prompts, list(folders), options)
    base = rows["base, no slots"]
    for name, row in rows.items():
        tpot, text = row["tpot_ms"] / base["tpot_ms"], row["text_tok_s"] / base["text_tok_s"]
        print(
            f"{name:<20} TPOT {row['tpot_ms']:7.2f} ms ({tpot:.3f} x)   text {row['text_tok_s']:8.0f} tok/s "
            f"({text:.3f} x)"
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
