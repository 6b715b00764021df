"""Images of data ranks: the busiest vision tower before and after images move, and what a step gains.

    python -m bench.image_balance          any machine, half a minute

Packed sequences of ragged data (`plan/ragged.py`) are assigned to 64 ranks as in a run; all wait for the slowest in
every micro-batch. Seconds are the planner's, of the 3B shape on H200s. What moving costs is not subtracted.
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from saccade.data.packing import assign
from saccade.model.families import named_size
from saccade.parallel_dims import ParallelDims
from saccade.plan.cluster import Cluster, Job
from saccade.plan.gpus import gpu_named
from saccade.plan.layouts import LayoutPlanner
from saccade.plan.prices import network_named
from saccade.plan.ragged import draw_sequences
from saccade.train.balanced_images import encoders_of

NUM_RANKS, NUM_MICRO_BATCHES = 64, 4
CASES = ((4096, 2 / 3), (4096, 0.1), (16384, 2 / 3), (16384, 0.1), (65536, 2 / 3))
"""Tokens of a packed sequence, share of samples with images."""


def measure(seq_len: int, image_share: float) -> dict[str, float]:
    """Largest over mean seconds of the towers in a micro-batch, and the share by which a step is shorter."""
    config, dims = named_size("3b"), ParallelDims(shard=NUM_RANKS)
    job = Job(config=config, seq_len=seq_len, global_batch_size=NUM_RANKS * NUM_MICRO_BATCHES)
    planner = LayoutPlanner(job, Cluster(gpu=gpu_named("H200"), num_gpus=NUM_RANKS, network=network_named("ib-ndr")))
    sequences = vars(planner)["sequences"] = draw_sequences(config, seq_len=seq_len, image_share=image_share)
    plan = planner.plan_layout(dims)
    prices = planner.ragged_prices_of(plan)
    drawn = [sequences[one] for one in np.random.default_rng(0).integers(len(sequences), size=job.global_batch_size)]
    before, after, decoder, moved = [], [], [], []
    table = assign([one.shape.num_tokens + one.num_patches for one in drawn], NUM_RANKS)
    for of_ranks in zip(*table, strict=True):
        costs, readers = list[float](), list[int]()
        for rank, number in enumerate(of_ranks):
            for image in drawn[number].images:
                costs.append(prices.patch * image.num_patches + prices.image_pair * image.pairs)
                readers.append(rank)
        encoders = encoders_of(costs, readers, NUM_RANKS)
        before.append(np.bincount(readers, costs, NUM_RANKS))
        after.append(np.bincount(encoders, costs, NUM_RANKS))
        decoder.append([prices.pair * drawn[number].pairs for number in of_ranks])
        moved.append(np.mean(np.array(encoders) != readers))
    seconds = [float((np.array(tower) + decoder).max(1).sum()) for tower in (before, after)]
    ratios = [float(np.mean(np.max(tower, 1) / np.mean(tower, 1))) for tower in (before, after)]
    return {
        "max/mean": round(ratios[0], 3), "balanced": round(ratios[1], 3), "moved": round(float(np.mean(moved)), 3),
        "tower's share of a step": round(float(np.mean(before)) * NUM_MICRO_BATCHES / plan.step_s, 3),
        "step shorter by": round((seconds[0] - seconds[1]) / plan.step_s, 4),
    }  # fmt: skip


def rows() -> Iterator[dict[str, float]]:
    """All cases."""
    for seq_len, image_share in CASES:
        yield {"seq_len": seq_len, "samples with images": round(image_share, 2)} | measure(seq_len, image_share)


def main() -> None:
    """Print a row for each case."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for row in rows():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
