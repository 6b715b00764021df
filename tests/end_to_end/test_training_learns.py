"""From random weights to answers about pictures never seen: data, training, export, generation, in one go.

The run is short, so it trains and asks for colours only: nearly all are right, while guessing gets one in eight.
`bench/learn_toy.py` continues to shapes.
"""

import json
from pathlib import Path

import pytest
import torch

from saccade.config import load_config
from saccade.data.shards import ShardWriter
from saccade.data.toy import QUESTIONS, toy_sample
from saccade.model.initialize import initialize_random, named_size
from saccade.train import TrainConfig, train

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"


def write_colours(folder, numbers):
    """The toy samples of these numbers that ask for a colour, about half of them."""
    with ShardWriter(folder, max_samples=2000) as writer:
        for sample in map(toy_sample, numbers):
            if QUESTIONS["colour"].encode() in sample.members["json"]:
                writer.write(sample)


@pytest.mark.slow
def test_a_model_learns_to_name_colours_from_pictures(tmp_path):
    initialize_random(tmp_path / "checkpoint", named_size("tiny"), dtype=torch.float32)
    write_colours(tmp_path / "toy", range(1200))
    write_colours(tmp_path / "held-out", range(1_000_000, 1_000_080))
    settings = [
        f"run={tmp_path / 'run'}",
        f"model.folder={tmp_path / 'checkpoint'}",
        f"stages.learn.data.sources=[{{path='{tmp_path / 'toy'}'}}]",
        f"validation={{every=1000, sources=[{{path='{tmp_path / 'held-out'}'}}], "
        "num_generations=32, max_new_tokens=10}",
        "stages.learn.steps=110",
        "stages.learn.schedule.warmup_steps=15",
        "stages.learn.data.num_workers=0",
    ]
    train(load_config(TrainConfig, RECIPE, settings), device="cpu")
    answers = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    right = sum(answer["output"] == answer["reference"] for answer in answers)
    assert len(answers) > 20
    assert right / len(answers) > 0.8, [(answer["reference"], answer["output"]) for answer in answers]
