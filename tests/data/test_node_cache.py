"""The cache of a node: all its processes download each byte once, and damage is repaired."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data.making import make_shards
from data.serving import serve_folder

from saccade.data import open_stream
from saccade.data.index_builder import build_index
from saccade.data.read_ahead import ReadAhead
from saccade.data.shards import list_shards
from saccade.data.sources import open_sources
from saccade.data.storage import Region, Storage, StorageConfig, storage
from saccade.errors import DataError

CHUNK = 8_000


def config(tmp_path, **changes):
    defaults = {"cache_folder": str(tmp_path / "cache"), "max_cache_bytes": 10**8, "chunk_bytes": CHUNK}
    return StorageConfig(**defaults | {"first_wait_s": 0.01, "timeout_s": 20.0} | changes)


@pytest.fixture
def content(tmp_path):
    """100 kB of noise in served/x.bin."""
    (tmp_path / "served").mkdir()
    data = random.Random(0).randbytes(100_000)
    (tmp_path / "served" / "x.bin").write_bytes(data)
    return data


@pytest.fixture
def folder(tmp_path, checkpoint):
    """Shards in served/set with index and lengths next to them."""
    folder = make_shards(tmp_path / "served" / "set", 6, 20)
    build_index(folder, num_workers=1)
    open_sources(folder, checkpoint=checkpoint)
    return folder


def bytes_of_shards(requests):
    """Bytes that were requested of the tars."""
    total = 0
    for line in requests:
        _, path, span = [*line.split(" "), ""][:3]
        if path.endswith(".tar") and span:
            begin, end = map(int, span.removeprefix("bytes=").split("-"))
            total += end - begin + 1
    return total


READER = """
import random, sys
from saccade.data.storage import Storage, StorageConfig
url, cache, seed = sys.argv[1:]
storage = Storage(StorageConfig(cache_folder=cache, chunk_bytes=8000, max_cache_bytes=10**8))
offsets = list(range(0, 100_000, 500))
random.Random(int(seed)).shuffle(offsets)
data = {offset: storage.read_range(url, 100_000, offset, 500) for offset in offsets}
sys.stdout.buffer.write(b"".join(data[offset] for offset in sorted(data)))
"""


def test_32_processes_on_one_cache_download_every_byte_once(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, faults):
        command = [sys.executable, "-c", READER, f"{url}/x.bin", str(tmp_path / "cache")]
        readers = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE) for seed in range(32)]
        assert [reader.communicate(timeout=120)[0] == content for reader in readers] == [True] * 32
        asked = [line for line in faults.requests if "bytes=" in line]
    spans = [tuple(map(int, line.split("bytes=")[1].split("-"))) for line in asked]
    assert sum(end - begin + 1 for begin, end in spans) == 100_000


def test_a_process_that_dies_while_it_downloads_leaves_no_lock(tmp_path, content):
    with serve_folder(tmp_path / "served", "hang", every=1) as (url, _):
        command = [sys.executable, "-c", READER, f"{url}/x.bin", str(tmp_path / "cache"), "0"]
        reader = subprocess.Popen(command)
        while not list((tmp_path / "cache").glob("locks/*")):
            time.sleep(0.05)
        reader.kill()
        reader.wait()
    with serve_folder(tmp_path / "served") as (url, _):
        assert Storage(config(tmp_path)).read_range(f"{url}/x.bin", 100_000, 0, 100_000) == content


def test_chunks_of_neighbouring_regions_share_no_byte(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, _):
        one, other = (Storage(config(tmp_path, cache_folder=str(tmp_path / name))) for name in ("a", "b"))
        first, second = Region(100, 50_123), Region(50_123, 99_000)
        assert one.read_range(f"{url}/x.bin", 100_000, 100, 50_023, first) == content[100:50_123]
        assert other.read_range(f"{url}/x.bin", 100_000, 60_000, 100, second) == content[60_000:60_100]
        assert other.read_range(f"{url}/x.bin", 100_000, 50_123, 48_877, second) == content[50_123:99_000]
        assert one.counters.num_bytes + other.counters.num_bytes == 98_900


def test_what_is_read_ahead_is_there_when_it_is_needed(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, faults):
        settings = config(tmp_path)
        chunks = storage(settings).chunks(f"{url}/x.bin", 100_000, 0, 100_000)
        ReadAhead(settings).add(chunks)
        deadline = time.monotonic() + 20
        while storage(settings).counters.num_ahead < 13 and time.monotonic() < deadline:
            time.sleep(0.01)
        asked = len(faults.requests)
        assert storage(settings).read_range(f"{url}/x.bin", 100_000, 0, 100_000) == content
        assert len(faults.requests) == asked
        counters = storage(settings).counters
        assert (counters.num_hits, counters.num_misses, counters.num_bytes) == (13, 0, 100_000)
        assert storage(settings).cached_bytes == 100_000


# ------------------------------------------------------------------ streams


def stream_of(url, checkpoint, tmp_path, cache="cache", **changes):
    settings = {
        "max_seq_len": 512,
        "packing_buffer_size": 16,
        "global_batch_size": 6,
        "num_epochs": 1,
        "window_shards": 2,
        "num_lanes": 6,
        "unit_bytes": 30_000,
        "num_workers": 0,
        "storage": config(tmp_path, cache_folder=str(tmp_path / cache)),
    }
    return open_stream(f"{url}/set", checkpoint=checkpoint, **settings | changes)


def ids_of(stream):
    return [sample_id for batch in stream for sample_id in batch.sample_ids]


@pytest.mark.slow
def test_nodes_with_lanes_download_the_shards_about_once(tmp_path, folder, checkpoint):
    """Three nodes, each with a cache of its own; foreign sequences are read by range and not cached."""
    num_bytes = sum(file.num_bytes for file in list_shards(folder))
    with serve_folder(tmp_path / "served") as (url, faults):
        whole = ids_of(stream_of(url, checkpoint, tmp_path, "whole"))
        faults.requests.clear()
        seen = [
            ids_of(stream_of(url, checkpoint, tmp_path, f"node{rank}", rank=rank, num_ranks=3, ranks_per_node=1))
            for rank in range(3)
        ]
        with_lanes = bytes_of_shards(faults.requests)
        faults.requests.clear()
        for rank in range(3):
            plain = {"rank": rank, "num_ranks": 3, "num_lanes": 1, "unit_bytes": None}
            ids_of(stream_of(url, checkpoint, tmp_path, f"plain{rank}", **plain))
        without = bytes_of_shards(faults.requests)
    assert sorted(sample_id for each in seen for sample_id in each) == sorted(whole)
    assert len(set(whole)) == 120
    assert with_lanes < 1.3 * num_bytes, "units at lane starts are read by two nodes: a third of so few units"
    assert without > 1.5 * num_bytes


@pytest.mark.slow
def test_a_damaged_or_truncated_file_of_the_cache_is_downloaded_again(tmp_path, folder, checkpoint, caplog):
    with serve_folder(tmp_path / "served") as (url, faults):
        whole = ids_of(stream_of(url, checkpoint, tmp_path))
        files = sorted((tmp_path / "cache" / "blocks").iterdir())
        for number, file in enumerate(files):
            data = bytearray(file.read_bytes())
            if number % 2:
                data = data[: len(data) // 2]
            else:
                data[::50] = bytes(len(data[::50]))
            file.write_bytes(data)
        faults.requests.clear()
        again = stream_of(url, checkpoint, tmp_path)
        batches = list(again)
        assert [sample_id for batch in batches for sample_id in batch.sample_ids] == whole
        assert not [bad for batch in batches for bad in batch.bad]
        assert bytes_of_shards(faults.requests) > 0
    assert "the cached copy of sample" in caplog.text


def test_a_shard_that_was_rewritten_in_the_store_is_never_a_wrong_sample(tmp_path, folder, checkpoint):
    with serve_folder(tmp_path / "served") as (url, _):
        shard = folder / "00002.tar"
        data = bytearray(shard.read_bytes())
        stream = stream_of(url, checkpoint, tmp_path)
        data[::700] = bytes(len(data[::700]))
        shard.write_bytes(data)
        with pytest.raises(DataError, match=r"00002.*differs from its checksum"):
            list(stream)


@pytest.mark.slow
def test_workers_read_the_next_round_ahead(tmp_path, folder, checkpoint):
    with serve_folder(tmp_path / "served") as (url, faults):
        whole = ids_of(stream_of(url, checkpoint, tmp_path, "whole"))
        faults.requests.clear()
        with stream_of(url, checkpoint, tmp_path, num_workers=2) as stream:
            assert ids_of(stream) == whole
            counters = stream.storage_counters
            assert stream.cached_bytes == counters.num_bytes
        assert bytes_of_shards(faults.requests) == counters.num_bytes
        assert counters.num_ahead > counters.num_misses
        assert json.dumps(vars(counters))


@pytest.mark.slow
def test_two_jobs_with_other_limits_share_one_cache(tmp_path, folder, checkpoint):
    with serve_folder(tmp_path / "served") as (url, faults):
        first = ids_of(stream_of(url, checkpoint, tmp_path))
        faults.requests.clear()
        second = ids_of(stream_of(url, checkpoint, tmp_path, seed=1, max_seq_len=300))
        assert sorted(first) == sorted(second)
        assert bytes_of_shards(faults.requests) == 0


JOB = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from data.test_node_cache import seen_of, stream_of
print(json.dumps(seen_of(stream_of(sys.argv[2], sys.argv[3], Path(sys.argv[4]), **json.loads(sys.argv[5])))))
"""


def seen_of(stream):
    """The samples of each packed sequence, its tokens, and the sum of its pixels."""
    with stream:
        packed = [sequence for batch in stream for sequence in batch.sequences]
    return [[each.sample_ids, each.inputs.token_ids.tolist(), each.inputs.patches.sum().item()] for each in packed]


@pytest.mark.slow
def test_two_jobs_at_once_on_one_cache_get_their_samples_and_download_every_byte_once(tmp_path, folder, checkpoint):
    """Two processes with another seed and length; each gets what it gets alone, and together they download as much."""
    settings = [{}, {"seed": 1, "max_seq_len": 400}]
    with serve_folder(tmp_path / "served") as (url, faults):
        arguments = [sys.executable, "-c", JOB, str(Path(__file__).parents[1]), url, str(checkpoint), str(tmp_path)]
        jobs = [subprocess.Popen([*arguments, json.dumps(each)], stdout=subprocess.PIPE) for each in settings]
        seen = [json.loads(job.communicate(timeout=120)[0]) for job in jobs]
        together = bytes_of_shards(faults.requests)
        for number, each in enumerate(settings):
            faults.requests.clear()
            assert seen_of(stream_of(url, checkpoint, tmp_path, f"alone-{number}", **each)) == seen[number]
            assert bytes_of_shards(faults.requests) == together
    for sequences in seen:
        assert len({sample for samples, _, _ in sequences for sample in samples}) == 120


@pytest.mark.slow
def test_a_cache_that_is_too_small_costs_requests_and_stays_within_its_bytes(tmp_path, folder, checkpoint):
    with serve_folder(tmp_path / "served") as (url, _):
        whole = ids_of(stream_of(url, checkpoint, tmp_path, "whole"))
        settings = config(tmp_path, max_cache_bytes=5 * CHUNK)
        assert ids_of(stream_of(url, checkpoint, tmp_path, storage=settings)) == whole
        assert sum(file.stat().st_size for file in Path(tmp_path / "cache" / "blocks").iterdir()) <= 5 * CHUNK
