"""Lanes at the size of a cluster: bytes that nodes download, balance over ranks, planning time, quality of shuffling.

    python -m bench.data_lanes            all tables, about three minutes on one core
    python -m bench.data_lanes egress     or egress, plan, shuffle, training: one of them

The shards do not exist; order, packing, owners and division over ranks are those of training. `bench/data_egress.py`
counts the bytes at a real S3 server instead.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from bench.data_scale import peak_mb, write_index
from saccade.data.batch_sampler import BatchOutline, BatchSampler, Position
from saccade.data.config import Source, StreamConfig
from saccade.data.index import open_index
from saccade.data.lanes import Owners, round_order
from saccade.data.lengths import Lengths
from saccade.data.order import EpochOrder, Ints, Permutation, key_of
from saccade.data.packing_buffer import BufferId, PackingBuffer
from saccade.data.rank_batches import RankBatches
from saccade.data.sources import IndexedSource
from saccade.data.units import Units

SAMPLE_BYTES = 41_000


class Synthetic:
    """Samples of 41 kB in shards of 1000, with lengths of LAION that vary by 15 % between shards."""

    name, weight, fingerprint = "laion", None, "1"

    def __init__(self, num_shards: int) -> None:
        self.sizes: Ints = np.full(num_shards, 1000)
        self.num_bytes: Ints = self.sizes * SAMPLE_BYTES

    def lengths(self, shard: int, kept_rows: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Tokens and patches."""
        rng = np.random.default_rng(shard)
        patches = (4 * rng.integers(8, 25, 1000) * rng.integers(8, 25, 1000) * rng.normal(1, 0.15)).astype(np.int64)
        tokens = np.maximum(patches, 0) // 4 + np.clip(rng.lognormal(3.3, 0.8, 1000), 8, 400).astype(np.int64) + 20
        return tokens[kept_rows], np.maximum(patches, 0)[kept_rows]


# ------------------------------------------------------------------ egress and balance


class Planned:
    """Every packing buffer of an epoch, computed once for all numbers of nodes."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler
        lanes, rounds = range(sampler.config.num_lanes), itertools.takewhile(sampler.has_round, itertools.count())
        self.buffers = {BufferId(turn, lane): sampler.packing_buffer(turn, lane) for turn in rounds for lane in lanes}

    def outlines(self, global_batch_size: int) -> Iterator[BatchOutline]:
        """The batches of the epoch."""
        object.__setattr__(self.sampler.config, "global_batch_size", global_batch_size)
        return self.sampler.outlines(None, lambda ids: [self.buffers[key].costs for key in ids])


def egress_of(planned: Planned, num_nodes: int, ranks_per_node: int, global_batch_size: int) -> tuple[float, float]:
    """Bytes downloaded by all nodes over the bytes of the shards, and the work of the busiest rank over the mean."""
    owners = Owners(planned.sampler.config.num_lanes, num_nodes * ranks_per_node, ranks_per_node)
    own_shards: list[set[int]] = [set() for _ in range(num_nodes)]
    num_foreign, imbalance = 0, []
    for outline in planned.outlines(global_batch_size):
        lanes = outline.lanes
        nodes = owners.nodes_of(lanes)
        is_own = np.zeros(len(lanes), bool)
        for node in range(num_nodes):
            is_own |= (nodes == node) & owners.is_own(lanes, node)
        places = outline.places(range(len(lanes)))
        for (key, number), node, own in zip(places, nodes.tolist(), is_own, strict=True):
            buffer = planned.buffers[key]
            rows = buffer.table[buffer.starts[number] : buffer.starts[number + 1]]
            if own:
                own_shards[node].update(rows[:, 1].tolist())
            else:
                num_foreign += len(rows)
        if len(lanes) == global_batch_size:
            ranks = [each for node in range(num_nodes) for each in owners.assign(nodes, outline.costs, node)]
            work = [int(outline.costs[each].sum()) for each in ranks]
            imbalance.append(max(work) / np.mean(work))
    num_samples = int(planned.sampler.sources[0].sizes.sum())
    return (sum(map(len, own_shards)) * 1000 + num_foreign) / num_samples, float(np.mean(imbalance))


def egress(num_shards: int = 4096) -> None:
    """The table of nodes."""
    settings = {"checkpoint": "", "max_seq_len": 16384, "max_patches": 65536, "num_epochs": 1}
    config = StreamConfig(**settings, num_lanes=512, window_shards=4, global_batch_size=512)
    planned = Planned(BatchSampler([Synthetic(num_shards)], config))
    print(f"{num_shards * 1000 / 1e6:.1f}M samples, 512 lanes, windows of 4 shards of 41 MB, 8 ranks per node")
    print("nodes  batch  egress  max/mean work of a rank")
    cases = [(64, 512), (64, 2048), (63, 504), (63, 512), (60, 480), (48, 384), (48, 512), (96, 768), (8, 64), (7, 504)]
    for num_nodes, batch in cases:
        factor, imbalance = egress_of(planned, num_nodes, 8, batch)
        print(f"{num_nodes:5}  {batch:5}  {factor:5.3f}x  {imbalance:.3f}")


# ------------------------------------------------------------------ planning


class Prefilled:
    """An exchange that has the plans of all other ranks: one buffer for all lanes."""

    def __init__(self, buffer: PackingBuffer) -> None:
        self._values = {"costs": buffer.costs.to_bytes(), "buffer": buffer.to_bytes()}

    def put(self, key: str, value: bytes) -> None:
        """Nobody reads it."""

    def get(self, keys: list[str]) -> list[bytes]:
        """A value for any key."""
        return [self._values[key.rpartition("/")[2]] for key in keys]

    def remove(self, key: str) -> None:
        """Nothing to remove."""


def plan(num_shards: int = 585_000) -> None:
    """What one of 64 x 8 ranks computes per round of an epoch of 5.85 billion samples."""
    with tempfile.TemporaryDirectory() as scratch:
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # its memory is not this process's
            other.submit(write_index, Path(scratch), num_shards).result()
        before, began = peak_mb(), time.perf_counter()
        index = open_index(scratch, check_files=False)
        source = IndexedSource(Source(path=scratch, name="laion"), index, Lengths(index, "synthetic"))
        sizes, memory = source.sizes, peak_mb()
        print(
            f"{int(sizes.sum()):.3g} samples: opened in {time.perf_counter() - began:.2f} s, {memory - before:.0f} MB"
        )
        config = StreamConfig(
            checkpoint="", max_seq_len=16384, max_patches=65536, global_batch_size=512, num_lanes=512,
            unit_bytes=1 << 27, window_shards=4, rank=100, num_ranks=512, ranks_per_node=8,
        )  # fmt: skip
        sampler, times = BatchSampler([source], config), []

        def compute(key: BufferId) -> Future[PackingBuffer]:
            began = time.process_time()
            done: Future[PackingBuffer] = Future()
            done.set_result(sampler.packing_buffer(*key))
            times.append(time.process_time() - began)
            return done

        exchange = Prefilled(compute(BufferId(0, 100)).result())
        first, times = times[0], []
        per_round: list[list[float]] = []
        began, turn = time.process_time(), 0
        spent_planning = 0.0
        for batch in RankBatches(sampler, compute, exchange).read(Position()):
            if batch.after.buffer > turn:
                now = time.process_time()
                per_round.append([sum(times) - spent_planning, now - began])
                began, spent_planning, turn = now, sum(times), batch.after.buffer
            if turn == 12:
                break
        own, whole = (np.array(column) * 1e3 for column in zip(*per_round, strict=True))
        print(f"first plan, which opens the order: {first * 1e3:.0f} ms, {peak_mb() - before:.0f} MB")
        print(
            f"per rank and round of {len(per_round)}: own lane {np.median(own):.1f} ms in a worker, "
            f"all batches of the round {np.median(whole - own):.1f} ms; worst {max(own):.1f} and {max(whole - own):.1f}"
        )


# ------------------------------------------------------------------ shuffle


def shards_of_batches(num_lanes: int, window: int, unit: int, num_batches: int, batch: int) -> list[Ints]:
    """Samples per shard in consecutive batches of an order, somewhere in an epoch of 2e8 samples in 20,000 shards."""
    units = Units(np.full(20_000, 10_000), np.full(20_000, 10_000), max_bytes=unit)
    order = EpochOrder(units.sizes(), seed=0, epoch=0, window_shards=window, num_lanes=num_lanes)
    begins, counts = np.arange(num_lanes) * len(order) // num_lanes, []
    per_lane = batch // num_lanes
    for number in range(num_batches):
        at = 150_000 + number * per_lane
        positions = (begins[:, None] + at + np.arange(per_lane)).ravel()
        shards = units.rows(order.locate(positions)[0]).shards
        counts.append(np.bincount(shards, minlength=20_000))
    return counts


def shuffle(num_batches: int = 60, batch: int = 26_624) -> None:
    """Variance of batch means over that of independent samples, and their autocorrelation.

    A sample's value is that of its shard, with a share of the variance, plus noise: both are exact sums over counts.
    """
    rng = np.random.default_rng(0)
    orders = {
        "today: windows of 16 shards": shards_of_batches(1, 16, 10_000, num_batches, batch),
        "512 lanes, windows of 4 units": shards_of_batches(512, 4, 2500, num_batches, batch),
        "independent": [np.bincount(rng.integers(0, 20_000, batch), minlength=20_000) for _ in range(num_batches)],
    }
    print("order                          effective shards  design effect at 1 / 5 %  autocorrelation, lag 1 / 2 / 8")
    for name, counts in orders.items():
        table = np.stack(counts) / batch
        same = float((table**2).sum(1).mean())
        effects = [1 - share + share * same * batch for share in (0.01, 0.05)]
        lags = [float((table[lag:] * table[:-lag]).sum(1).mean()) for lag in (1, 2, 8)]
        variance = 0.01 * (same - 1 / 20_000) + 0.99 / batch
        auto = " / ".join(f"{0.01 * (lag - 1 / 20_000) / variance:5.2f}" for lag in lags)
        print(f"{name:30} {1 / same:16.0f}  {effects[0]:10.2f} / {effects[1]:5.2f}  {auto:>30}")


# ------------------------------------------------------------------ a toy run


def training(seeds: int = 3) -> None:
    """Validation loss of a small classifier after one epoch over shards that are sorted by class."""
    num_shards, size, classes, batch = 2000, 100, 100, 500
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(classes, 32))
    labels = np.repeat(np.arange(num_shards) * classes // num_shards, size)
    inputs = (centres[labels] + 2.0 * rng.normal(size=(len(labels), 32))).astype(np.float32)
    held_out = rng.integers(0, classes, 20_000)
    held_inputs = (centres[held_out] + 2.0 * rng.normal(size=(len(held_out), 32))).astype(np.float32)

    def order_of(name: str, seed: int) -> Ints:
        if name == "independent":
            return Permutation(len(labels), key_of(seed))(np.arange(len(labels)))
        num_lanes, window = (1, 16) if name == "today" else (50, 4)
        order = EpochOrder(np.full(num_shards, size), seed=seed, epoch=0, window_shards=window, num_lanes=num_lanes)
        per_lane = len(labels) // num_lanes
        lanes, numbers = round_order([per_lane] * num_lanes)
        shards, rows = order.locate(lanes * per_lane + numbers)
        return shards * size + rows

    print("order        validation loss of each seed after an epoch, mean")
    for name in ("today", "lanes", "independent"):
        losses = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, classes))
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
            steps = order_of(name, seed).reshape(-1, batch)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps))
            for part in steps:
                loss = torch.nn.functional.cross_entropy(model(torch.tensor(inputs[part])), torch.tensor(labels[part]))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            with torch.no_grad():
                found = torch.nn.functional.cross_entropy(model(torch.tensor(held_inputs)), torch.tensor(held_out))
            losses.append(float(found))
        print(f"{name:12} {'  '.join(f'{loss:.4f}' for loss in losses)}   {np.mean(losses):.4f}")


if __name__ == "__main__":
    tables = {"egress": egress, "plan": plan, "shuffle": shuffle, "training": training}
    for name in sys.argv[1:] or tables:
        tables[name]()
