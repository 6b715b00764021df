"""Bytes that nodes download of the shards of one epoch, counted by an S3 server.

    python -m bench.data_egress            64, 63 and 48 nodes, resumed 64 -> 63, and no lanes on 8 nodes

moto's server on loopback holds scaled-down shards: tars of 256 KiB in units of 64 KiB, 320 lanes, one global batch for
all. Every node is a process with an empty cache, one after the other; it reads and verifies its samples as training
does, without decoding. The index is in a folder that all nodes share. Counted are bodies of answers to GET of tars.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from saccade.data.batch_sampler import BatchSampler, Position
from saccade.data.config import Source, StreamConfig
from saccade.data.index import open_index
from saccade.data.lengths import Lengths
from saccade.data.packing_buffer import BufferId, PackingBuffer
from saccade.data.rank_batches import RankBatch, RankBatches
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter, list_shards
from saccade.data.sources import IndexedSource
from saccade.data.storage import StorageConfig

NUM_SAMPLES, SAMPLES_PER_SHARD, UNIT_BYTES, NUM_LANES = 81_920, 128, 64 << 10, 320
TAR = re.compile(r"/bucket/set/[^/]+\.tar$")


class Counter:
    """WSGI middleware: bytes of the tars that were sent."""

    def __init__(self, app: Any) -> None:
        self._app, self.num_bytes, self.num_requests = app, 0, 0
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: D102
        parts: list[bytes] = list(self._app(environ, start_response))
        if environ["REQUEST_METHOD"] == "GET" and TAR.search(environ["PATH_INFO"]):
            with self._lock:
                self.num_bytes += sum(map(len, parts))
                self.num_requests += 1
        return parts


def serve() -> Counter:
    """Start the server; the storage client is configured with its address."""
    from moto.server import (  # type: ignore[attr-defined,import-not-found]
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # type: ignore[import-not-found]

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    counter = Counter(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, counter, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.server_port}"
    return counter


def measure(sample: Sample) -> tuple[list[int], int]:
    """Tokens and patches of a sample: what its text says."""
    return [int(sample.members["txt"].split()[0])], 0


def upload(folder: Path) -> int:
    """Write the shards with index and lengths, and upload the tars; returns their bytes."""
    import boto3  # type: ignore[import-not-found]

    rng = np.random.default_rng(0)
    with ShardWriter(folder, max_samples=SAMPLES_PER_SHARD) as writer:
        for number in range(NUM_SAMPLES):
            text = f"{rng.integers(200, 700)} ".encode() + rng.bytes(rng.integers(500, 1500)).hex().encode()
            writer.write(Sample(f"{number:08d}", "set", {"txt": text}))
    index = open_index(folder, num_workers=1)
    Lengths(index, "toy").build(measure, num_workers=1)
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.create_bucket(Bucket="bucket")
    for path in sorted(folder.glob("*.tar")):
        client.upload_file(str(path), "bucket", f"set/{path.name}")
    return sum(file.num_bytes for file in list_shards(folder))


class Job:
    """A run on so many nodes of one rank each."""

    def __init__(self, folder: Path, num_nodes: int, position: Position | None = None, **options: Any) -> None:
        settings = {"num_lanes": NUM_LANES, "unit_bytes": UNIT_BYTES, "window_shards": 4} | options
        self._planned: dict[BufferId, PackingBuffer] = {}
        self.folder, self.num_nodes, self.position = folder, num_nodes, position or Position()
        self.settings = {
            "checkpoint": "", "max_seq_len": 8192, "global_batch_size": 320, "packing_buffer_size": 128,
            "num_epochs": 1, "num_ranks": num_nodes, "ranks_per_node": 1,
        } | settings  # fmt: skip

    def shares(self, rank: int, source: IndexedSource) -> Iterator[RankBatch]:
        """What one rank reads."""
        sampler = BatchSampler([source], StreamConfig(**self.settings, rank=rank))

        def compute(key: BufferId) -> Future[PackingBuffer]:
            if key not in self._planned:  # once for all nodes: they are forks of this process
                self._planned[key] = sampler.packing_buffer(*key)
            done: Future[PackingBuffer] = Future()
            done.set_result(self._planned[key])
            return done

        return RankBatches(sampler, compute, None).read(self.position)

    def local(self) -> IndexedSource:
        """The source on this disk: the same order."""
        index = open_index(self.folder, check_files=False)
        return IndexedSource(Source(path=self.folder, name="set"), index, Lengths(index, "toy"))

    def read(self, rank: int, cache: str, num_batches: int | None, found: Any) -> None:
        """The process of one node: read every sample of its sequences; tell which."""
        config = StorageConfig(cache_folder=cache, chunk_bytes=UNIT_BYTES, num_ahead=0)
        shipped = str(self.folder / "index")
        index = open_index("s3://bucket/set", check_files=False, config=config, index_folder=shipped)
        source = IndexedSource(Source(path="s3://bucket/set", name="set"), index, Lengths(index, "toy"))
        samples = []
        for share in itertools.islice(self.shares(rank, source), num_batches):
            for sequence, is_own in zip(share.sequences, share.is_own, strict=True):
                for ref in sequence.samples:
                    source.read(ref.shard, ref.kept_row, self.settings["unit_bytes"], is_cached=is_own)
                    samples.append(ref.shard * SAMPLES_PER_SHARD + ref.kept_row)
        found.put(samples)

    def run(self, counter: Counter, caches: Path, num_batches: int | None = None) -> tuple[int, list[int]]:
        """All nodes, one after the other: bytes sent, and the samples read."""
        for _ in self.shares(0, self.local()):
            """Plan everything."""
        before, samples, context = counter.num_bytes, [], multiprocessing.get_context("fork")
        for rank in range(self.num_nodes):
            found = context.Queue()
            node = context.Process(target=self.read, args=(rank, str(caches / str(rank)), num_batches, found))
            node.start()
            samples += found.get(timeout=600)
            node.join()
        return counter.num_bytes - before, samples

    def simulated(self) -> int:
        """The bytes that the nodes need: their own units once, and samples of others' lanes."""
        source, total = self.local(), 0
        for rank in range(self.num_nodes):
            regions = set()
            for share in self.shares(rank, source):
                for sequence, is_own in zip(share.sequences, share.is_own, strict=True):
                    for ref in sequence.samples:
                        if is_own:
                            regions.add((ref.shard, source.region(ref.shard, ref.kept_row, UNIT_BYTES)))
                        else:
                            [begin], [end] = source.index.byte_ranges(ref.shard, np.array([ref.kept_row]))
                            total += int(end - begin)
            total += sum(region.end - region.begin for _, region in regions)
        return total


def main() -> None:
    """All runs."""
    counter = serve()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "set"
        num_bytes = upload(folder)
        print(f"{NUM_SAMPLES} samples, {NUM_SAMPLES // SAMPLES_PER_SHARD} tars, {num_bytes / 1e6:.0f} MB", flush=True)
        for num_nodes in (64, 63, 48):
            job, began = Job(folder, num_nodes), time.perf_counter()
            sent, samples = job.run(counter, Path(scratch) / f"caches-{num_nodes}")
            assert sorted(samples) == list(range(NUM_SAMPLES)), "every sample is read by one node"
            print(
                f"{num_nodes} nodes: {sent / num_bytes:.3f}x of the shards, {sent / job.simulated():.3f}x of the "
                f"simulation ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
        half = 8
        first, rest = Job(folder, 64), Job(folder, 63)
        sent, samples = first.run(counter, Path(scratch) / "resumed-64", num_batches=half)
        *_, last = itertools.islice(first.shares(0, first.local()), half)
        rest.position = last.after
        more, others = rest.run(counter, Path(scratch) / "resumed-63")
        assert sorted(samples + others) == list(range(NUM_SAMPLES)), "nothing is lost or repeated"
        print(f"64 nodes, then 63 with empty caches: {(sent + more) / num_bytes:.3f}x", flush=True)
        without = Job(folder, 8, num_lanes=1, unit_bytes=None, window_shards=16, packing_buffer_size=4096)
        sent, samples = without.run(counter, Path(scratch) / "without")
        print(f"8 nodes without lanes: {sent / num_bytes:.3f}x")


if __name__ == "__main__":
    main()
