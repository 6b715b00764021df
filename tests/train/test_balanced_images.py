"""Images moved between data ranks: equal work, and runs that equal one device."""

import json
import random

import pytest
from train.recorded import LORA, run_cases
from train.running import make_root, run_together, write_recipe

from saccade.train.balanced_images import encoders_of

BALANCED = "parallel.balance_images=true"
LAYOUTS = {
    "replicate 4": ["parallel.strategy=ddp", BALANCED],
    "shard 4": ["parallel.shard=4", BALANCED],
    "context 2 x replicate 2": ["parallel.context=2", "parallel.replicate=2", BALANCED],
    "context 2 x tensor 2": ["parallel.context=2", "parallel.tensor=2", BALANCED],
}
CASES = [
    ("replicate 4", "qwen3_vl", "full"),
    ("shard 4", "qwen2_5_vl", "full"),
    ("context 2 x replicate 2", "llava_next", "full"),
    ("context 2 x tensor 2", "qwen2_5_vl", "lora"),
]
STEPS = ["stages.0.steps=10", "stages.0.data.global_batch_size=5", "stages.0.data.max_seq_len=720"]
"""Sequences of many images; in the second micro-batch one of four parts of the data has all of them."""


@pytest.mark.slow
def test_runs_with_balanced_images_equal_one_device(tmp_path):
    """Ranks with text only, images of several sizes, empty micro-batches, image features of several layers, tiles."""
    run_cases(tmp_path, CASES, LAYOUTS, {"full": [], "lora": LORA}, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUTS["replicate 4"], ["parallel.tensor=4"]], ids=["replicate 4", "tensor 4"])
def test_a_run_whose_forward_pass_needs_all_ranks_validates_and_skips_generations(layout, tmp_path):
    root = make_root(tmp_path, text_every=2)
    recipe = write_recipe(
        tmp_path / "run.toml", run=tmp_path / "run", checkpoint=root / "checkpoint", shards=root / "shards"
    )
    settings = [
        "stages.0.schedule.warmup_steps=1", "stages.0.steps=2", "stages.0.data.global_batch_size=4",
        "validation.every=1", f"validation.sources=[{{path='{root / 'shards'}'}}]",
        "validation.num_samples=6", "validation.num_generations=2",
    ]  # fmt: skip
    run_together([{"recipe": str(recipe), "set": [*settings, *layout]}], tmp_path, num_ranks=4, timeout_s=90)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert len([line for line in lines if "validation" in line]) == 2


def test_images_move_until_no_move_makes_the_busiest_rank_less_busy():
    rng = random.Random(0)
    for _ in range(300):
        num_ranks = rng.randint(1, 9)
        readers = sorted(rng.randrange(num_ranks) for _ in range(rng.randint(0, 40)))
        costs = [rng.lognormvariate(0.0, 1.0) for _ in readers]
        encoders = encoders_of(costs, readers, num_ranks)
        before, after = (work_of(costs, owners, num_ranks) for owners in (readers, encoders))
        assert max(after) <= max(before) + 1e-9
        of_busiest = [cost for cost, one in zip(costs, encoders, strict=True) if one == after.index(max(after))]
        assert max(after) - min(after) <= 1.02 * min(of_busiest, default=0.0) + 1e-9
        assert encoders_of(costs, encoders, num_ranks) == encoders, "what is balanced stays"


def work_of(costs, owners, num_ranks):
    work = [0.0] * num_ranks
    for cost, owner in zip(costs, owners, strict=True):
        work[owner] += cost
    return work
