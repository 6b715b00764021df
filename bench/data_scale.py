"""Batch sampling at the size of LAION: positions in 5.85 billion samples, the first batch of 100 million indexed ones.

    python -m bench.data_scale

The shards do not exist; their index does (a few Parquet files under ten thousand names). The code is that of training.
"""

import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from saccade.data.batch_sampler import BatchSampler, Position
from saccade.data.config import Source, StreamConfig
from saccade.data.index import open_index
from saccade.data.index_builder import write_entries
from saccade.data.index_files import IndexLocation, ShardEntry
from saccade.data.lengths import Lengths
from saccade.data.order import EpochOrder
from saccade.data.sources import IndexedSource
from saccade.data.storage import StorageConfig

NUM_SHARDS, SAMPLES = 10_000, 10_000


def peak_mb() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def positions() -> None:
    """The next 10,000 samples, anywhere in an epoch of 5.85 billion."""
    begin = time.perf_counter()
    order = EpochOrder(np.full(585_000, 10_000), seed=0, epoch=0, window_shards=16)
    opened = time.perf_counter() - begin
    worst = 0.0
    for start in (0, 1_234_567_890, 5_849_990_000):
        begin = time.perf_counter()
        order.locate(np.arange(start, start + 10_000))
        worst = max(worst, time.perf_counter() - begin)
    print(
        f"5.85e9 samples: opened in {opened * 1e3:.0f} ms, 10,000 positions in {worst * 1e3:.1f} ms, {peak_mb():.0f} "
        "MB resident"
    )


def write_index(folder: Path, num_shards: int = NUM_SHARDS) -> None:
    """Index and lengths of shards of 10,000 samples of LAION-like lengths."""
    rng = np.random.default_rng(0)
    patches = 4 * rng.integers(8, 25, SAMPLES) * rng.integers(8, 25, SAMPLES)
    tokens = patches // 4 + np.clip(rng.lognormal(3.3, 0.8, SAMPLES), 8, 400).astype(int) + 20
    row = pa.table({"key": [f"{n:09d}" for n in range(SAMPLES)], "error": pa.nulls(SAMPLES, pa.string())})
    lengths = pa.table(
        {
            "tokens": pa.array([[t] for t in tokens.tolist()], pa.list_(pa.int32())),
            "patches": pa.array(patches, pa.int32()),
            "error": pa.nulls(SAMPLES, pa.string()),
        }
    )
    for target, table in ((folder / "index", row), (folder / "index" / "lengths-synthetic", lengths)):
        target.mkdir(parents=True)
        pq.write_table(table, target / "00000.parquet")
        for shard in range(1, num_shards):
            if shard % 50_000:  # a file has at most 65,000 names
                os.link(target / f"{shard - shard % 50_000:05d}.parquet", target / f"{shard:05d}.parquet")
            else:
                pq.write_table(table, target / f"{shard:05d}.parquet")
    names = [f"{shard:05d}.tar" for shard in range(num_shards)]
    entries = {name: ShardEntry(name, 410 << 20, SAMPLES, 0) for name in names}
    write_entries(IndexLocation.of(str(folder), StorageConfig()), entries, keep_others=False)


def first_batch() -> None:
    """Open 100 million samples, sample the first batch; then one at 90 % as a resumed run would."""
    with tempfile.TemporaryDirectory() as scratch:
        write_index(Path(scratch))
        begin = time.perf_counter()
        index = open_index(scratch, check_files=False)
        opened = time.perf_counter() - begin
        source = IndexedSource(Source(path=scratch, name="laion"), index, Lengths(index, "synthetic"))
        config = StreamConfig(checkpoint="", max_seq_len=16384, max_patches=65536, global_batch_size=8)
        sampler = BatchSampler([source], config)
        first = next(sampler.batches())
        sampled = time.perf_counter() - begin
        print(
            f"{len(index):.2e} samples: opened in {opened:.2f} s, first batch at {sampled:.2f} s "
            f"({len(first.sequences)} sequences)"
        )
        late = Position(buffer=int(0.9 * len(index) / config.packing_buffer_size), sequence=5, batch=10**6)
        state = sampler.save(late)
        times = []
        for _ in range(5):
            index.forget()
            begin = time.perf_counter()
            next(sampler.batches(sampler.restore(state)))
            times.append(time.perf_counter() - begin)
        print(
            f"resumed at 90 %: {min(times) * 1e3:.0f} ms, state {len(json.dumps(state))} bytes, {peak_mb():.0f} MB "
            "resident"
        )


if __name__ == "__main__":
    positions()
    first_batch()
