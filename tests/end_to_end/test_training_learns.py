"""From random weights to answers about pictures never seen: data, training, export, generation, in one go.

Short, so only colours are asked for: nearly all right, where guessing gets one in eight. `bench/learn_toy.py` goes on to shapes.
"""

import json
from pathlib import Path

import torch

from saccade.config import load_config
from saccade.data.toy import QUESTIONS, write_toy_shards
from saccade.model.initialize import initialize_random, named_size
from saccade.train import TrainConfig, train

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"


def test_a_model_learns_to_name_colours_from_pictures(tmp_path):
    initialize_random(tmp_path / "checkpoint", named_size("tiny"), dtype=torch.float32)
    write_toy_shards(tmp_path / "toy", first=0, count=1000)
    write_toy_shards(tmp_path / "held-out", first=1_000_000, count=64)
    settings = [
        f"run={tmp_path / 'run'}",
        f"model.folder={tmp_path / 'checkpoint'}",
        f"stages.learn.data.sources=[{{path='{tmp_path / 'toy'}'}}]",
        f"validation={{every=1000, sources=[{{path='{tmp_path / 'held-out'}'}}], num_generations=64, max_new_tokens=10}}",
        "stages.learn.steps=200",
        "stages.learn.schedule.warmup_steps=20",
        "stages.learn.data.num_workers=0",
    ]
    train(load_config(TrainConfig, RECIPE, settings), device="cpu")
    answers = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    colours = [answer for answer in answers if answer["prompt"] == QUESTIONS["colour"]]
    right = sum(answer["output"] == answer["reference"] for answer in colours)
    assert len(colours) > 20
    assert right / len(colours) > 0.8, [(answer["reference"], answer["output"]) for answer in colours]
