"""Remote shards through real servers: exact bytes in spite of faults, a bounded shared cache, clear errors."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from data.making import make_shards, measure_words, read_samples
from data.serving import proxy_to, serve_folder

from saccade.data.decisions import finish_decisions, write_decisions
from saccade.data.index import open_index
from saccade.data.index_builder import build_index
from saccade.data.lengths import Lengths
from saccade.data.shards import list_shards, read_range
from saccade.data.storage import Storage, StorageConfig, is_remote, shown
from saccade.errors import ConfigError, DataError

CHUNK = 20_000


@pytest.fixture
def content(tmp_path):
    """100 kB of noise in served/x.bin."""
    folder = tmp_path / "served"
    folder.mkdir()
    data = random.Random(0).randbytes(100_000)
    (folder / "x.bin").write_bytes(data)
    return data


def config(tmp_path, **changes):
    defaults = {"cache_folder": str(tmp_path / "cache"), "max_cache_bytes": 10 * CHUNK, "chunk_bytes": CHUNK}
    return StorageConfig(**defaults | {"first_wait_s": 0.01, "timeout_s": 20.0} | changes)


def random_ranges(num_bytes, count=40, seed=1):
    chosen = random.Random(seed)
    for _ in range(count):
        offset = chosen.randrange(num_bytes)
        yield offset, chosen.randrange(num_bytes - offset + 1)


def cached(tmp_path):
    return list((tmp_path / "cache" / "blocks").glob("*"))


def test_ranges_are_exact_and_each_chunk_is_requested_once(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, faults):
        storage = Storage(config(tmp_path))
        assert storage.num_bytes(f"{url}/x.bin") == 100_000
        asked_before = len(faults.requests)
        for offset, size in random_ranges(100_000):
            assert storage.read_range(f"{url}/x.bin", 100_000, offset, size) == content[offset : offset + size]
        assert len(faults.requests) - asked_before == 5
        again = Storage(config(tmp_path))
        assert again.read_range(f"{url}/x.bin", 100_000, 50_000, 100) == content[50_000:50_100]
        assert len(faults.requests) - asked_before == 5
    assert len(cached(tmp_path)) == 5


@pytest.mark.parametrize("kind", [503, 500, 429, "cut", "reset"])
def test_a_server_that_fails_every_third_request_costs_time_and_nothing_else(tmp_path, content, kind):
    with serve_folder(tmp_path / "served", kind) as (url, faults):
        storage = Storage(config(tmp_path, max_cache_bytes=0))
        for offset, size in random_ranges(100_000, count=12):
            assert storage.read_range(f"{url}/x.bin", 100_000, offset, size) == content[offset : offset + size]
        assert faults.num_faults >= 4


def test_a_server_that_hangs_is_retried(tmp_path, content):
    with serve_folder(tmp_path / "served", "hang", every=2) as (url, faults):
        storage = Storage(config(tmp_path, timeout_s=2.0))
        for offset in (0, 50_000):
            assert storage.read_range(f"{url}/x.bin", 100_000, offset, 10) == content[offset : offset + 10]
        assert faults.num_faults == 1


def test_after_the_last_attempt_one_error_names_the_file_and_the_reason(tmp_path, content):
    with serve_folder(tmp_path / "served", 503, every=1) as (url, faults):
        storage = Storage(config(tmp_path, max_attempts=4))
        with pytest.raises(DataError, match=r"/x\.bin: .*503.* after 4 attempts\. .*run again"):
            storage.read_range(f"{url}/x.bin", 100_000, 0, 10)
        assert len(faults.requests) == 4
    assert not cached(tmp_path)
    with pytest.raises(DataError, match="after 2 attempts"):  # the server has stopped
        Storage(config(tmp_path, max_attempts=2)).num_bytes(f"{url}/x.bin")


@pytest.mark.parametrize(
    ("status", "advice"), [(404, "no such file"), (403, "check the credentials"), (401, "credentials")]
)
def test_permanent_faults_are_not_retried(tmp_path, content, status, advice):
    with serve_folder(tmp_path / "served", status, every=1) as (url, faults):
        with pytest.raises(DataError, match=f"(?i){advice}"):
            Storage(config(tmp_path)).read_range(f"{url}/x.bin", 100_000, 0, 10)
        assert len(faults.requests) == 1
        assert Storage(config(tmp_path)).read_file(f"{url}/nothing.json") is None


def test_a_server_without_ranges_is_refused(tmp_path, content):
    with (
        serve_folder(tmp_path / "served", "no ranges") as (url, _),
        pytest.raises(DataError, match="support range requests"),
    ):
        Storage(config(tmp_path)).read_range(f"{url}/x.bin", 100_000, 0, 10)


def test_reading_beyond_the_end_is_an_error_before_any_request(tmp_path):
    with pytest.raises(DataError, match="wanted 20 bytes at 90 of a file of 100"):
        Storage(config(tmp_path)).read_range("http://127.0.0.1:9/x.bin", 100, 90, 20)


def test_threads_that_need_the_same_chunk_request_it_once(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, faults):
        storage = Storage(config(tmp_path))
        got = []
        read = lambda: got.append(storage.read_range(f"{url}/x.bin", 100_000, 100, 50))  # noqa: E731
        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [content[100:150]] * 8
        assert len(faults.requests) == 1


# ------------------------------------------------------------------ the cache


def test_the_cache_stays_within_its_bytes_and_the_least_recently_used_chunks_are_evicted(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, _):
        storage = Storage(config(tmp_path, max_cache_bytes=3 * CHUNK, chunk_bytes=CHUNK))
        for number in (0, 1, 2, 3, 4):
            storage.read_range(f"{url}/x.bin", 100_000, number * CHUNK, 10)
            assert sum(path.stat().st_size for path in cached(tmp_path)) <= 3 * CHUNK
            time.sleep(0.02)  # files' times must differ
        kept = sorted(path.name.rpartition("-")[2] for path in cached(tmp_path))
        assert kept == ["2", "3", "4"]
        Storage(config(tmp_path)).read_range(f"{url}/x.bin", 100_000, 2 * CHUNK, 10)  # now the youngest
        storage.read_range(f"{url}/x.bin", 100_000, 0, 10)
        kept = sorted(path.name.rpartition("-")[2] for path in cached(tmp_path))
        assert kept == ["0", "2"]


def test_chunks_that_disappear_or_are_damaged_are_downloaded_again(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, _):
        for damage in (Path.unlink, lambda path: path.write_bytes(b"short")):
            Storage(config(tmp_path)).prefetch(f"{url}/x.bin", 100_000)
            for path in cached(tmp_path):
                damage(path)
            assert Storage(config(tmp_path)).read_range(f"{url}/x.bin", 100_000, 0, 100_000) == content


READ = """
import random, sys
from saccade.data.storage import Storage, StorageConfig
url, cache, seed, expected = sys.argv[1], sys.argv[2], int(sys.argv[3]), open(sys.argv[4], "rb").read()
storage = Storage(StorageConfig(cache_folder=cache, max_cache_bytes=60_000, chunk_bytes=10_000, first_wait_s=0.01))
chosen = random.Random(seed)
for _ in range(150):
    offset = chosen.randrange(100_000)
    size = chosen.randrange(min(20_000, 100_001 - offset))
    assert storage.read_range(url, 100_000, offset, size) == expected[offset:offset + size]
"""


def test_processes_share_one_cache_folder(tmp_path, content):
    with serve_folder(tmp_path / "served", 503, every=20) as (url, _):
        arguments = [f"{url}/x.bin", str(tmp_path / "cache")]
        running = [
            subprocess.Popen([sys.executable, "-c", READ, *arguments, str(seed), str(tmp_path / "served" / "x.bin")])
            for seed in range(3)
        ]
        assert [process.wait() for process in running] == [0, 0, 0]
    assert sum(path.stat().st_size for path in cached(tmp_path)) <= 60_000 + 3 * 10_000
    assert not [path for path in cached(tmp_path) if path.name.startswith(".")]


FULL = """
import resource, sys
sys.dont_write_bytecode = True  # it would be cut off, and stay
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))  # a write beyond fails, as on a full disk
from saccade.data.storage import Storage, StorageConfig
storage = Storage(StorageConfig(cache_folder=sys.argv[2], max_cache_bytes=200_000, chunk_bytes=20_000))
expected = open(sys.argv[3], "rb").read()
for offset in range(0, 100_000, 7_000):
    assert storage.read_range(sys.argv[1], 100_000, offset, 500) == expected[offset:offset + 500]
"""


def test_a_full_disk_is_one_warning_and_reading_continues_without_a_cache(tmp_path, content):
    with serve_folder(tmp_path / "served") as (url, faults):
        command = [
            sys.executable,
            "-c",
            FULL,
            f"{url}/x.bin",
            str(tmp_path / "cache"),
            str(tmp_path / "served" / "x.bin"),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("remote shards are read without a cache") == 1
        assert "SACCADE_CACHE" in run.stderr
        assert faults.requests[1:] == [f"GET /x.bin bytes={at}-{at + 499}" for at in range(7_000, 100_000, 7_000)]
    assert cached(tmp_path) == []


def test_a_cache_folder_that_cannot_be_made_is_ignored(tmp_path, content, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with serve_folder(tmp_path / "served") as (url, _):
        storage = Storage(config(tmp_path))
        assert storage.read_range(f"{url}/x.bin", 100_000, 5, 50_000) == content[5:50_005]
        assert storage.read_range(f"{url}/x.bin", 100_000, 5, 50_000) == content[5:50_005]


# ------------------------------------------------------------------ folders


def test_a_folder_over_http_is_listed_indexed_and_read(tmp_path):
    local = open_index(make_shards(tmp_path / "local" / "set", 3, 4), num_workers=1)
    make_shards(tmp_path / "set", 3, 4)
    with serve_folder(tmp_path, 503) as (url, _):
        remote = open_index(f"{url}/set", config=config(tmp_path), num_workers=1)
        assert remote.shards == local.shards
        assert remote.fingerprint == local.fingerprint
        assert remote.source == "set"
        for shard in range(3):
            assert remote.read(shard).equals(local.read(shard))
            assert read_samples(remote, shard, range(4), verify=True) == read_samples(local, shard, range(4))
        some = list_shards(f"{url}/set/{{00000..00001}}.tar", config(tmp_path))
        assert [file.name for file in some] == ["00000.tar", "00001.tar"]
        assert read_range(some[0], 257, 5, config(tmp_path)) == b"ustar"


def test_an_index_shipped_with_a_remote_folder_is_used(tmp_path):
    make_shards(tmp_path / "set", 2, 4)
    build_index(tmp_path / "set", num_workers=1)
    with serve_folder(tmp_path) as (url, faults):
        index = open_index(f"{url}/set", build=False, config=config(tmp_path))
        assert not any(".parquet" in request for request in faults.requests)
        assert len(index.kept(1)) == 4
        assert index.folder.is_relative_to(tmp_path / "cache" / "shards")
        assert not any(".tar bytes" in request for request in faults.requests)
        assert index.read_sample(1, 2, verify=True) == open_index(tmp_path / "set").read_sample(1, 2)
        assert open_index(f"{url}/set", check_files=False, config=config(tmp_path)).shards == ["00000.tar", "00001.tar"]


def test_lengths_and_decisions_shipped_with_a_remote_folder_count_until_there_are_own_ones(tmp_path):
    make_shards(tmp_path / "set", 2, 4)
    local = open_index(tmp_path / "set", num_workers=1)
    Lengths(local, "abc").build(measure_words, num_workers=1)
    table = pa.table({"keep": [True, False, True, False], "reason": pa.array([None, "dark", None, "dark"])})
    for shard in (0, 1):
        write_decisions(local, shard, table)
    finish_decisions(local, settings={}, counts={"dark": 4})
    with serve_folder(tmp_path) as (url, _):
        index = open_index(f"{url}/set", build=False, config=config(tmp_path))
        assert Lengths(index, "abc").missing() == []
        assert Lengths(index, "other").missing() == [0, 1]
        assert Lengths(index, "abc").of_shard(1)[1].tolist() == Lengths(local, "abc").of_shard(1)[1].tolist()
        assert index.kept_sizes.tolist() == [2, 2]
        assert index.kept(1).tolist() == [0, 2]
        write_decisions(index, 0, table)
        with pytest.raises(DataError, match="curation was not finished"):
            index.kept(0)
        for path in index.folder.glob("*.parquet"):  # someone tidies the cache
            path.unlink()
        again = open_index(f"{url}/set", build=False, config=config(tmp_path))
        assert again.read_sample(0, 3, verify=True) == local.read_sample(0, 3)


def test_a_shard_can_be_prefetched(tmp_path):
    make_shards(tmp_path / "set", 1, 4)
    with serve_folder(tmp_path) as (url, faults):
        index = open_index(f"{url}/set", config=config(tmp_path), num_workers=1)
        for path in cached(tmp_path):
            path.unlink()
        index.prefetch(0)
        asked = len(faults.requests)
        read_samples(index, 0, range(4))
        assert len(faults.requests) == asked


@pytest.fixture
def bucket(tmp_path, new_bucket):
    """A folder of shards, uploaded; the storage client is configured with its address."""
    make_shards(tmp_path / "set", 2, 4)
    filesystem, name = new_bucket()
    for file in list_shards(tmp_path / "set"):
        filesystem.put(file.url, f"{name}/set/{file.name}")
    return f"s3://{name}/set"


def test_a_folder_on_s3_is_indexed_in_processes_and_read(tmp_path, bucket):
    local = open_index(tmp_path / "set", num_workers=1)
    remote = open_index(bucket, config=config(tmp_path), num_workers=2)
    assert remote.fingerprint == local.fingerprint
    assert read_samples(remote, 1, range(4), verify=True) == read_samples(local, 1, range(4))
    with pytest.raises(DataError, match="no such file or folder"):
        open_index(f"{bucket}-not", config=config(tmp_path))
    with pytest.raises(DataError, match=r"00002\.tar: .*no such file"):
        open_index(f"{bucket}/{{00000..00002}}.tar", config=config(tmp_path))


@pytest.mark.parametrize("kind", [503, "reset"])
def test_s3_behind_a_connection_that_fails_every_third_request_works(tmp_path, bucket, s3_port, monkeypatch, kind):
    with proxy_to(s3_port, kind) as (url, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        index = open_index(bucket, config=config(tmp_path), num_workers=1)
        assert [sample.key for sample in read_samples(index, 0, range(4), verify=True)] == [
            f"00000{n:04d}" for n in range(4)
        ]
        assert faults.num_faults >= 3


def test_denied_access_to_s3_says_so_at_once(tmp_path, bucket, s3_port, monkeypatch):
    with proxy_to(s3_port, 403, every=1) as (url, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(DataError, match="Access is denied: check the credentials"):
            open_index(bucket, config=config(tmp_path))
        assert len(faults.requests) <= 4


def test_filesystems_without_asyncio_work_too(tmp_path):
    import fsspec

    make_shards(tmp_path / "set", 1, 3)
    fsspec.filesystem("memory").put(str(tmp_path / "set" / "00000.tar"), "/tests/set/00000.tar")
    index = open_index("memory://tests/set", config=config(tmp_path), num_workers=1)
    assert index.read_sample(0, 1, verify=True) == open_index(tmp_path / "set").read_sample(0, 1)


# ------------------------------------------------------------------ small things


def test_secrets_in_urls_stay_out_of_messages(tmp_path):
    url = "http://user:password@127.0.0.1:9/folder/x.tar?signature=secret"
    assert shown(url) == "http://127.0.0.1:9/folder/x.tar"
    with pytest.raises(DataError) as caught:
        Storage(config(tmp_path, max_attempts=1)).num_bytes(url)
    assert "secret" not in str(caught.value)
    assert "password" not in str(caught.value)


def test_only_paths_with_a_scheme_are_remote():
    assert is_remote("s3://bucket/x")
    assert is_remote("https://host/x")
    assert not is_remote("/data/x")
    assert not is_remote("data/a://b")
    assert not is_remote("file:///data")


def test_settings_that_cannot_work_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="less than one chunk"):
        StorageConfig(max_cache_bytes=10)
    with pytest.raises(ConfigError, match="above 0"):
        StorageConfig(max_attempts=0)
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    assert StorageConfig().folder == tmp_path
    monkeypatch.delenv("SACCADE_CACHE")
    assert StorageConfig().folder == Path(os.environ["HOME"]) / ".cache" / "saccade"
