"""Curation of many samples on a local Ray cluster while workers, a node and the driver are killed: the same decisions.

    python -m bench.data_curate_scale rows FOLDER --samples 20e6      # feature rows without images: rules, duplicates
    python -m bench.data_curate_scale photos FOLDER --from photos/ --samples 50e3   # small photos, through all stages
    python -m bench.data_curate_scale run FOLDER [--kills]            # on two nodes of one CPU; prints a digest
    python -m bench.data_curate_scale run FOLDER --local              # on this machine, for comparison

With `--kills`, workers, nodes (another one joins) and the driver (it is started again) are killed at the moments of
`KILLS`, which are spread over all stages. A run that was stopped from outside resumes, so a long one can be divided.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from bench.data_duplicates import load, read_photos
from saccade.data.curate.features import SCHEMA, VERSION, measure_features
from saccade.data.curate.pipeline import decide
from saccade.data.curate.settings import CurationSettings
from saccade.data.index import open_index
from saccade.data.index_builder import SCHEMA as INDEX_SCHEMA
from saccade.data.index_builder import write_entries
from saccade.data.index_files import IndexLocation, ShardEntry, parquet_name, write_table
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.data.storage import StorageConfig

PER_SHARD = 20_000
ROWS = "rows"
"""Marks a folder of rows without images."""


def make_rows(folder: Path, num_samples: int) -> None:
    """Index and features of samples that do not exist: a tenth repeats an image, a twentieth breaks a rule."""
    random = np.random.default_rng(0)
    captions = [
        " ".join(random.choice(["a", "red", "boat", "on", "the", "river", "old", "house"], 8)) for _ in range(999)
    ]
    some = [captions[number] for number in random.integers(0, 999, PER_SHARD)]
    one = np.ones(PER_SHARD, np.int32)
    lists = {
        "texts": some, "num_words": 8 * one, "word_repetition": 0.0 * one, "character_repetition": 0.0 * one,
        "languages": ["en"] * PER_SHARD,
    }  # fmt: skip
    columns: dict[str, Any] = {
        name: pa.nulls(PER_SHARD, kind.type) for name, kind in zip(SCHEMA.names, SCHEMA, strict=True)
    }
    for name, values in lists.items():
        columns[name] = _single(pa.array(values, SCHEMA.field(name).type.value_type))
    columns["is_conversation"] = pa.array(np.zeros(PER_SHARD, bool))
    num_shards = -(-num_samples // PER_SHARD)
    location = IndexLocation.of(str(folder), StorageConfig())
    entries = {}
    for shard in range(num_shards):
        entry = ShardEntry(f"{shard:06d}.tar", 10**9, PER_SHARD, 0)
        sizes = random.integers(48, 1000, (2, PER_SHARD)).astype(np.int32)
        contents = random.integers(0, 2**64, (PER_SHARD, 2), dtype=np.uint64)
        repeated = random.integers(0, PER_SHARD, PER_SHARD // 10)
        contents[: len(repeated)] = np.random.default_rng(1).integers(0, 2**64, (PER_SHARD, 2), dtype=np.uint64)[
            repeated
        ]
        binary = pa.Array.from_buffers(pa.binary(16), PER_SHARD, [None, pa.py_buffer(contents.tobytes())])
        columns["contents"] = _single(binary)
        columns["text_hash"] = pa.array(random.integers(0, 1000, PER_SHARD, dtype=np.uint64))
        table = pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)
        note = {"name": entry.name, "bytes": entry.num_bytes}
        write_table(location.folder / "features" / parquet_name(entry.name), table, note | {"features": VERSION})
        known = _index_rows(sizes, random)
        write_table(location.folder / parquet_name(entry.name), known, note)
        entries[entry.name] = entry
    write_entries(location, entries, keep_others=False)
    (folder / ROWS).touch()


def _single(values: pa.Array) -> pa.ListArray:
    """Lists of one value each."""
    return pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1, dtype=np.int32)), values)


def _index_rows(sizes: np.ndarray[Any, Any], random: np.random.Generator) -> pa.Table:
    num = sizes.shape[1]
    values: dict[str, Any] = {
        name: pa.nulls(num, kind.type) for name, kind in zip(INDEX_SCHEMA.names, INDEX_SCHEMA, strict=True)
    }
    values |= {
        "key": pa.array(np.arange(num).astype(str)),
        "names": _single(pa.array(["jpg"] * num)),
        "offsets": _single(pa.array(np.arange(num), pa.int64())),
        "sizes": _single(pa.array(np.arange(num), pa.int64())),
        "checksum": pa.array([bytes(16)] * num, pa.binary(16)),
        "widths": _single(pa.array(sizes[0])),
        "heights": _single(pa.array(sizes[1])),
        "text_bytes": pa.array(random.integers(20, 200, num), pa.int32()),
        "source": pa.array(["rows"] * num),
    }
    return pa.table({name: values[name] for name in INDEX_SCHEMA.names}, schema=INDEX_SCHEMA)


def make_photos(folder: Path, source: str, num_samples: int, side: int) -> None:
    """Parts of photos, `side` pixels square; every tenth is a copy of an earlier one: mirrored, or encoded again."""
    random = np.random.default_rng(0)
    photos = [load(data) for data in read_photos(source)]
    recent: list[Image.Image] = []
    with ShardWriter(folder, max_samples=1000) as writer:
        for number in range(num_samples):
            if number % 10 == 9:
                image = recent[int(random.integers(len(recent)))]
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number % 20 == 9 else image
            else:
                image = photos[int(random.integers(len(photos)))]
                cut = int(image.height * random.uniform(0.3, 0.6))
                left, top = random.integers(0, image.width - cut), random.integers(0, image.height - cut)
                image = image.resize((side, side), box=(left, top, left + cut, top + cut))
                recent = [*recent[-999:], image]
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=int(random.integers(70, 95)))
            writer.write(
                Sample(f"{number:08d}", "photos", {"jpg": buffer.getvalue(), "txt": f"photo number {number}".encode()})
            )


def settings_of(folder: Path) -> CurationSettings:
    """Rows have no thumbnails."""
    has_images = not (folder / ROWS).exists()
    return CurationSettings(near_duplicate_images=has_images, keep_one_per="image")


def curate_all(folder: Path, ray_address: str | None, partitions: int | None) -> None:
    """What the driver does: all stages."""
    begin = time.perf_counter()
    is_rows = (folder / ROWS).exists()
    index = open_index(folder, check_files=not is_rows, num_workers=None, ray_address=ray_address)
    num_measured = 0 if is_rows else measure_features(index, ray_address=ray_address).num_shards
    measured = time.perf_counter() - begin
    report = decide(
        index,
        settings_of(folder),
        num_workers=2,
        ray_address=ray_address,
        num_partitions=partitions,
        num_measured=num_measured,
    )
    print(
        json.dumps(
            {
                "samples": report.num_samples,
                "kept": report.num_kept,
                "dropped": report.dropped,
                "shards measured": num_measured,
                "measuring s": round(measured),
                "all s": round(time.perf_counter() - begin),
            }
        )
    )


def digest(folder: Path) -> str:
    """The checksum of all decisions."""
    found = hashlib.sha256()
    index = open_index(folder, check_files=not (folder / ROWS).exists())
    for shard in range(len(index.shards)):
        table = index.decisions(shard)
        assert table is not None, "the folder is curated"
        for name in ("keep", "reason", "repeats_shard", "repeats_row"):
            found.update(repr(table[name].to_pylist()).encode())
    return found.hexdigest()[:16]


# ------------------------------------------------------------------ a cluster


KILLS = [
    ("index", 0.05, "worker"),
    ("features", 0.2, "worker"), ("features", 0.4, "node"), ("features", 0.6, "driver"),
    ("rules", 0.3, "worker"), ("exact-firsts", 0.3, "node"),
    ("near-image-views", 0.3, "worker"), ("near-image-pairs", 0.3, "node"), ("near-image-verify-0", 0.3, "driver"),
    ("near-image-samples", 0.3, "worker"),
    ("decisions", 0.1, "worker"), ("decisions", 0.2, "driver"), ("decisions", 0.4, "node"),
]  # fmt: skip
"""When something is killed: a stage, the share of its jobs that have ended, and what."""


def run(folder: Path, kills: bool, partitions: int, limit: float) -> None:
    """Curate on two nodes, and kill."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 200 * 2**20})
    second = cluster.add_node(num_cpus=1, object_store_memory=200 * 2**20)
    peak = threading.Event(), [0.0, 0.0]
    threading.Thread(target=_watch, args=(*peak, folder), daemon=True).start()
    command = [sys.executable, "-m", "bench.data_curate_scale", "driver", str(folder), "--address", cluster.address]
    command += ["--partitions", str(partitions)]
    begin = time.monotonic()
    driver = subprocess.Popen(command)
    pending = [kill for kill in KILLS if _share_done(folder, kill[0], partitions) < kill[1]] if kills else []
    if (folder / ROWS).exists():
        pending = [kill for kill in pending if kill[0] in ("rules", "exact-firsts", "decisions")]
    while pending and driver.poll() is None and time.monotonic() - begin < limit:
        time.sleep(0.02)
        due = next((kill for kill in pending if _share_done(folder, kill[0], partitions) >= kill[1]), None)
        if due is None:
            continue
        stage, _, what = due
        at = _share_done(folder, stage, partitions)
        if what == "worker":
            victims = [pid for pid, line in _processes() if "spawn_main" in line and _is_curating(pid)]
            if not victims:  # between two stages
                continue
            os.kill(victims[0], signal.SIGKILL)
        elif what == "node":
            os.kill(second.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            second = cluster.add_node(num_cpus=1, object_store_memory=200 * 2**20)
        else:
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
            driver = subprocess.Popen(command)
        pending.remove(due)
        print(f"{time.monotonic() - begin:.0f} s: killed a {what} at {at:.0%} of {stage}", flush=True)
    try:
        status = driver.wait(max(1.0, limit - (time.monotonic() - begin)))
        print(f"driver ended with {status} after {time.monotonic() - begin:.0f} s")
        print(digest(folder))
    except subprocess.TimeoutExpired:
        driver.kill()
        print("not finished: run it again to resume")
    print(f"not killed: {pending}" if pending else "all were killed" if kills else "nothing was killed")
    peak[0].set()
    print(f"largest worker {peak[1][0] / 1e9:.2f} GB, driver {peak[1][1] / 1e9:.2f} GB resident")
    cluster.shutdown()


def _share_done(folder: Path, stage: str, partitions: int) -> float:
    """How much of a stage has been finished: shards of the first two, parts of the others."""
    if stage in ("index", "features"):
        num_shards = sum(1 for _ in folder.glob("*.tar"))
        done = folder / "index" if stage == "index" else folder / "index" / "features"
        return sum(1 for _ in done.glob("*.parquet")) / num_shards if num_shards else 0.0
    return sum(1 for _ in folder.glob(f"index/curation-*/done-{stage}/*.json")) / partitions


def _is_curating(pid: int) -> bool:
    """Whether a process is a child of a worker of this cluster, which this process has started."""
    parent = _parent(pid)
    try:
        is_of_worker = "ray::" in Path(f"/proc/{parent}/cmdline").read_text()
    except OSError:
        return False
    while is_of_worker and parent not in (None, os.getpid()):
        parent = _parent(parent)
    return is_of_worker and parent is not None


def _parent(pid: int | None) -> int | None:
    try:
        number = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
    return number or None


def _processes() -> list[tuple[int, str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append((int(path.parent.name), path.read_text().replace("\0", " ")))
        except OSError:
            continue
    return found


def _watch(stop: threading.Event, peaks: list[float], folder: Path) -> None:
    """Largest resident size of a worker's child, and of the driver."""
    while not stop.wait(0.5):
        for pid, line in _processes():
            is_driver = "data_curate_scale driver" in line and str(folder) in line
            if is_driver or ("spawn_main" in line and _is_curating(pid)):
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                size = next((int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM")), 0)
                peaks[is_driver] = max(peaks[is_driver], size)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["rows", "photos", "run", "driver", "digest"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=float, default=1e6)
    parser.add_argument("--from", dest="source", default="")
    parser.add_argument("--side", type=int, default=96, help="of the photos' parts, pixels")
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--partitions", type=int, default=8, help="with 1 and --local, all jobs run in this process")
    parser.add_argument("--limit", type=float, default=1400.0)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--address")
    options = parser.parse_args()
    if options.command == "rows":
        make_rows(options.folder, int(options.samples))
    elif options.command == "photos":
        make_photos(options.folder, options.source, int(options.samples), options.side)
    elif options.command == "driver" or options.local:
        curate_all(options.folder, options.address, options.partitions)
        if options.local:
            print(digest(options.folder))
            peaks = (
                resource.getrusage(who).ru_maxrss / 1e6 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            )
            print("at most {:.2f} GB resident in this process, {:.2f} GB in each worker".format(*peaks))
    elif options.command == "digest":
        print(digest(options.folder))
    else:
        run(options.folder, options.kills, options.partitions, options.limit)


if __name__ == "__main__":
    main()
