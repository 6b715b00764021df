"""Loss curves of a toy run with compressed gradients, next to those of fp32 reduction, on gloo ranks.

    python -m bench.gradient_compression [--steps 300] [--seeds 3] [--ranks 2]

Every form of communication trains the tiny model on toy images from the same seeds (order of the data) and the same
weights. Printed per form: the mean loss of the last fifty steps over the seeds, the largest difference of a seed's
curve from that of fp32 (both smoothed over fifty steps), and bytes sent by a rank for gradients. The noise of seeds is
the largest difference between two fp32 curves. A line per form as JSON.
"""

import argparse
import itertools
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from saccade.config import load_config
from saccade.data.shards import ShardWriter
from saccade.data.toy import toy_sample
from saccade.model.initialize import initialize_random, named_size
from saccade.train import parallelize
from saccade.train.config import TrainConfig
from saccade.train.gradient_compression import CompressedReduceScatter, Rounding, compress_gradients
from saccade.train.stages import train_in
from saccade.world import open_world

FORMS = ("none", "bf16", "int8")
SMOOTHED = 50
RECIPE = """
run = "{run}"
seed = {seed}
[model]
folder = "{checkpoint}"
dtype = "fp32"
[parallel]
compress_gradients = "{form}"
[checkpoint]
every = 100000
[log]
every = 1
[[stages]]
name = "learn"
steps = {steps}
[stages.data]
sources = [{{ path = "{shards}" }}]
max_seq_len = 240
max_patches = 512
global_batch_size = {ranks}
num_workers = 0
[stages.optimizer]
lr = 1e-3
[stages.schedule]
kind = "constant"
warmup_steps = 10
"""


def run_rank(rank: int, num_ranks: int, port: int, folder: str, recipes: list[str]) -> None:
    """Train all recipes, one after another, and write the bytes that this rank sent for each."""
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    sent = {}
    with open_world("cpu") as world:
        for recipe in recipes:
            made: list[CompressedReduceScatter] = []

            def compress(module: nn.Module, rounding: Rounding, made: list[Any] = made) -> list[Any]:
                made += compress_gradients(module, rounding)
                return made

            with mock.patch.object(parallelize, "compress_gradients", compress):
                train_in(world, load_config(TrainConfig, Path(recipe)))
            sent[Path(recipe).stem] = sum(one.sent_bytes for one in made)
    if rank == 0:
        (Path(folder) / "sent.json").write_text(json.dumps(sent))


def curve(run: Path) -> npt.NDArray[np.float64]:
    """Losses of a run, smoothed."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    return np.convolve(losses, np.ones(SMOOTHED) / SMOOTHED, "valid")


def main() -> None:
    """Train every form from every seed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        initialize_random(folder / "checkpoint", named_size("tiny"), dtype=torch.float32)
        with ShardWriter(folder / "shards", max_samples=256) as writer:
            for number in range(512):
                writer.write(toy_sample(number, side=56))
        recipes = []
        for form, seed in itertools.product(FORMS, range(options.seeds)):
            file = folder / f"{form}-{seed}.toml"
            paths = {"run": folder / f"{form}-{seed}", "checkpoint": folder / "checkpoint", "shards": folder / "shards"}
            file.write_text(RECIPE.format(**paths, form=form, seed=seed, steps=options.steps, ranks=options.ranks))
            recipes.append(str(file))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        del store  # rank 0 opens its own
        spawn(run_rank, (options.ranks, port, name, recipes), nprocs=options.ranks)
        report(folder, options)


def report(folder: Path, options: argparse.Namespace) -> None:
    """Print a line per form."""
    curves = {form: [curve(folder / f"{form}-{seed}") for seed in range(options.seeds)] for form in FORMS}
    noise = max(float(np.abs(a - b).max()) for a, b in itertools.combinations(curves["none"], 2))
    sent = json.loads((folder / "sent.json").read_text())
    fp32 = sent["bf16-0"] * 2  # what rounding to bf16 halves
    for form in FORMS:
        pairs = zip(curves[form], curves["none"], strict=True)
        row = {
            "form": form,
            "last losses": round(float(np.mean([one[-1] for one in curves[form]])), 4),
            "largest difference": round(max(float(np.abs(a - b).max()) for a, b in pairs), 4),
            "noise of seeds": round(noise, 4),
            "bytes per rank and step": (sent[f"{form}-0"] or fp32) // options.steps,
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
