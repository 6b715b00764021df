"""Recorded steps on the ranks of a real world: the same program with values, and collectives of gloo."""

import json
from dataclasses import replace
from pathlib import Path

from saccade.model.families import named_size
from saccade.parallel_dims import ParallelDims
from saccade.train.parallel_config import ParallelConfig
from saccade.train.recorded_step import Collective, SequenceShape, StepSettings, record_in

CONFIG = replace(
    named_size("tiny"),
    language=replace(
        named_size("tiny").language, num_layers=9, hidden_size=64, num_heads=16, num_kv_heads=2, explicit_head_dim=16,
        rope_sections=(4, 2, 2), intermediate_size=128, vocab_size=320,
    ),
)  # fmt: skip
SHAPE = SequenceShape(lengths=(40, 1, 87), grids=((1, 8, 8), (1, 4, 8), (1, 4, 4)))
LAYOUTS = {
    "shards and copies": ParallelDims(replicate=2, shard=2),
    "shards and tensor": ParallelDims(shard=2, tensor=2),
    "shards and context": ParallelDims(shard=2, context=2),
    "more ranks than key heads": ParallelDims(tensor=4),
}


def settings(config=CONFIG, **parallel):
    return StepSettings(config=config, parallel=ParallelConfig(**parallel))


def collectives(operations):
    return [list(one) for one in operations if isinstance(one, Collective)]


def compare(world, job):
    """The collectives of a step with values, in every layout."""
    found = {}
    for name, dims in LAYOUTS.items():
        with world.arranged(dims) as arranged:
            found[name] = collectives(record_in(arranged, settings(), SHAPE, has_values=True))
    if world.is_main:
        Path(job["to"]).write_text(json.dumps(found))
