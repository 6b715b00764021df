"""Train `recipes/tiny.toml` from random weights, then generate outputs for held-out images.

    python -m bench.learn_toy [--folder toy] [--threads 1] [--held-out 512] [--set stages.learn.steps=500]

It prints the seconds of training and of the answers at its end (by the clock, and of all cores together), and the share
of held-out questions (colour, shape) that are answered word for word. One thread is enough for so small a model: two
wait for each other.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from saccade.config import load_config
from saccade.data.toy import QUESTIONS, write_toy_shards
from saccade.log import set_up_logging
from saccade.model.initialize import initialize_random, named_size
from saccade.train.config import TrainConfig
from saccade.train.stages import train

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
NUM_TRAINED, FIRST_HELD_OUT = 12_000, 1_000_000


def learn(folder: Path, num_held_out: int, overrides: list[str]) -> dict[str, float]:
    """Create data and model in `folder`, train, evaluate; returns what `main` prints."""
    initialize_random(folder / "checkpoint", named_size("tiny"), dtype=torch.float32)
    write_toy_shards(folder / "toy", first=0, count=NUM_TRAINED)
    write_toy_shards(folder / "held-out", first=FIRST_HELD_OUT, count=num_held_out)
    paths = [
        f"run={folder / 'run'}",
        f"model.folder={folder / 'checkpoint'}",
        f"stages.learn.data.sources=[{{path='{folder / 'toy'}'}}]",
        f"validation.sources=[{{path='{folder / 'held-out'}'}}]",
        f"validation.num_generations={num_held_out}",
        "validation.every=1000000",  # only at the end
    ]
    began, began_cpu = time.perf_counter(), time.process_time()
    train(load_config(TrainConfig, RECIPE, [*paths, *overrides]), device="cpu")
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    lines = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] == lines[-1]["step"]]
    right: dict[str, list[bool]] = defaultdict(list)
    for line in lines:
        for kind, question in QUESTIONS.items():
            if line["prompt"] == question:
                right[kind].append(line["output"] == line["reference"])
    shares = {kind: sum(of_kind) / len(of_kind) for kind, of_kind in sorted(right.items())}
    times = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
    return {**times, "held_out": len(lines), **shares, "all": sum(map(sum, right.values())) / len(lines)}


def main() -> None:
    """Train, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="kept; a temporary one where not given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    set_up_logging()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as temporary:
        print(json.dumps(learn(options.folder or Path(temporary), options.held_out, options.set)))


if __name__ == "__main__":
    main()
