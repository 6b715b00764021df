"""The stream when things go wrong: bad samples, cut shards, killed processes.

Good samples come exactly once, or a clear error.
"""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from commands import is_alive
from data.making import begin_of, make_sample, make_shards, write_samples
from data.test_loader import assert_gone, assert_same_batches, ids_of

from saccade.data.index import open_index
from saccade.data.index_builder import build_index
from saccade.data.sample import Sample
from saccade.data.storage import StorageConfig
from saccade.errors import DataError, StorageError


def listed(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def spoiled(sample):
    """A sample whose picture breaks off: its header is whole, so it is measured and planned."""
    return Sample(sample.key, sample.source, sample.members | {"jpg": sample.members["jpg"][:-800]})


@pytest.fixture
def partly_bad(tmp_path):
    """200 samples in four shards; two of them have a picture that breaks off."""
    folder = tmp_path / "photos"
    for shard in range(4):
        samples = [make_sample(f"{shard}{number:02d}", seed=number, width=60, height=60) for number in range(50)]
        if shard < 2:
            samples[7] = spoiled(samples[7])
        write_samples(folder / f"{shard:05d}.tar", samples)
    build_index(folder, num_workers=1)
    return folder


def cut_shards(folder):
    """Take away the last three samples of shard 2 and the last five of shard 3."""
    index = open_index(folder)
    for shard, first_lost in ((2, 47), (3, 45)):
        with (folder / f"{shard:05d}.tar").open("r+b") as tar:
            tar.truncate(begin_of(index, shard, first_lost) + 100)


# ------------------------------------------------------------------ bad samples


def test_every_good_sample_comes_once_beside_bad_pictures_and_shards_cut_meanwhile(
    partly_bad, opened, tmp_path, caplog
):
    log = tmp_path / "logs" / "bad.jsonl"
    settings = {"num_epochs": 1, "num_workers": 2, "max_bad_share": 0.2, "bad_log": log}
    num_planned = len(list(opened(partly_bad, num_epochs=1)))
    caplog.clear()
    stream = opened(partly_bad, **settings)
    cut_shards(partly_bad)
    batches = list(stream)
    lost = {"007", "107", "247", "248", "249", "345", "346", "347", "348", "349"}
    keys = [sample_id.rpartition("/")[2] for sample_id in ids_of(batches)]
    assert Counter(keys) == {f"{s}{n:02d}": 1 for s in range(4) for n in range(50) if f"{s}{n:02d}" not in lost}
    assert {entry["sample_id"] for entry in listed(log)} == {f"photos/{int(key) // 100:05d}/{key}" for key in lost}
    for entry in listed(log):
        is_picture = entry["sample_id"][-3:] in ("007", "107")
        assert ("truncated or corrupt" if is_picture else "was cut or replaced") in entry["reason"]
    assert sum(len(batch.bad) for batch in batches) == 10
    assert caplog.text.count("is skipped") == 1
    assert len(batches) == num_planned, "the batches stay as sampled"


def test_shards_that_were_cut_before_they_were_indexed_give_their_complete_samples(tmp_path, opened):
    folder = make_shards(tmp_path / "photos", 3, 10)
    for shard in (0, 2):
        with (folder / f"{shard:05d}.tar").open("r+b") as tar:
            tar.truncate(tar.seek(0, os.SEEK_END) // 2)
    index = open_index(folder, num_workers=1)
    counts = Counter(sample_id.split("/")[1] for sample_id in ids_of(opened(folder, num_epochs=1)))
    assert counts == {f"{shard:05d}": size for shard, size in enumerate(index.sizes.tolist())}
    assert 0 < counts["00000"] < 10 == counts["00001"]


def test_too_many_bad_samples_stop_the_stream_and_are_named(tmp_path, opened):
    samples = [make_sample(f"s{number:03d}", seed=number, width=60, height=60) for number in range(100)]
    samples = [spoiled(sample) if number % 5 == 0 else sample for number, sample in enumerate(samples)]
    write_samples(tmp_path / "photos" / "00000.tar", samples)
    log = tmp_path / "bad.jsonl"
    stream = opened(tmp_path / "photos", num_epochs=1, max_bad_share=0.05, bad_log=log)
    with pytest.raises(
        DataError, match=rf"samples are bad, over max_bad_share 0.05.*{log}.*photos/00000/s\d+"
    ) as caught:
        list(stream)
    assert 10 <= len(listed(log)) <= 20
    assert all(entry["sample_id"] in str(caught.value) for entry in listed(log)[:5])
    with pytest.raises(StopIteration):
        next(stream)
    assert len(ids_of(opened(tmp_path / "photos", num_epochs=1, max_bad_share=0.5))) == 80


def test_a_few_bad_samples_never_stop_a_stream(tmp_path, opened):
    samples = [make_sample("good"), *(spoiled(make_sample(f"bad{number}")) for number in range(9))]
    write_samples(tmp_path / "photos" / "00000.tar", samples)
    assert ids_of(opened(tmp_path / "photos", num_epochs=1, max_bad_share=0.0)) == ["photos/00000/good"]


def test_samples_that_cannot_be_measured_or_packed_are_named_once_over_all_ranks(tmp_path, opened):
    samples = [make_sample(f"s{number}", seed=number) for number in range(20)]
    samples[3] = make_sample("s3", width=900, height=4)
    samples[8] = make_sample("s8", text="word " * 3000)
    samples[9] = make_sample("s9", width=1000, height=900)
    write_samples(tmp_path / "photos" / "00000.tar", samples)
    log = tmp_path / "bad.jsonl"
    for rank in range(2):
        list(opened(tmp_path / "photos", num_epochs=1, rank=rank, num_ranks=2, global_batch_size=2, bad_log=log))
    reasons = {entry["sample_id"].rpartition("/")[2]: entry["reason"] for entry in listed(log)}
    assert len(listed(log)) == len(reasons) == 3
    assert "an aspect ratio of 225 over the limit" in reasons["s3"]
    assert "over max_seq_len 1024 or max_patches" in reasons["s8"]
    assert "over max_seq_len 1024 or max_patches" in reasons["s9"]


def test_a_bad_sample_is_listed_once_in_all_epochs_ranks_and_resumed_streams(tmp_path, opened):
    samples = [
        spoiled(make_sample(f"s{n}", seed=n)) if n in (3, 8) else make_sample(f"s{n}", seed=n) for n in range(12)
    ]
    write_samples(tmp_path / "photos" / "00000.tar", samples)
    log = tmp_path / "bad.jsonl"
    settings = {"num_epochs": 4, "num_ranks": 2, "global_batch_size": 2, "bad_log": log, "max_bad_share": 1.0}
    for _ in range(2):
        ranks = [opened(tmp_path / "photos", rank=rank, **settings) for rank in range(2)]
        assert len(list(zip(*ranks, strict=True))) == 4
    assert sorted(entry["sample_id"] for entry in listed(log)) == ["photos/00000/s3", "photos/00000/s8"]
    whole = log.read_text()
    log.write_text(whole[:-20])  # cut off by a crash
    list(opened(tmp_path / "photos", num_epochs=1, bad_log=log, max_bad_share=1.0))
    first, cut, again = log.read_text().splitlines()
    assert f"{first}\n{again}\n" == whole
    assert again.startswith(cut)


# ------------------------------------------------------------------ storage


def quick(max_wait_s):
    return StorageConfig(first_wait_s=0.02, max_wait_s=max_wait_s)


def test_storage_that_fails_stops_the_stream_and_a_resume_loses_no_sample(tmp_path, opened):
    folder = make_shards(tmp_path / "photos", 2, 20)
    whole = list(opened(folder, num_epochs=1))
    log = tmp_path / "bad.jsonl"
    stream = opened(folder, num_epochs=1, storage=quick(0.1), bad_log=log, num_workers=1, prefetch=1)
    (folder / "00001.tar").rename(tmp_path / "away.tar")
    batches = []
    with pytest.raises(StorageError, match=r"00001.tar: No such file.*resume when the storage is back"):
        batches.extend(stream)
    assert not log.exists(), "a failing disk is not a bad sample"
    (tmp_path / "away.tar").rename(folder / "00001.tar")
    batches += list(opened(folder, num_epochs=1, state=stream.state_dict()))
    assert_same_batches(batches, whole)


@pytest.mark.slow
def test_a_stream_waits_for_storage_that_comes_back(tmp_path, opened):
    folder = make_shards(tmp_path / "photos", 1, 10)
    stream = opened(folder, num_epochs=1, storage=quick(60.0), num_workers=1)
    (folder / "00000.tar").rename(tmp_path / "away.tar")
    back = threading.Timer(2.0, lambda: (tmp_path / "away.tar").rename(folder / "00000.tar"))
    back.start()
    assert len(ids_of(stream)) == 10
    back.join()


def test_the_opening_line_says_what_a_source_has_and_what_was_lost(tmp_path, opened, caplog):
    caplog.set_level(logging.INFO)
    folder = make_shards(tmp_path / "photos", 2, 10)
    opened(folder)
    assert "source photos: 20 of 20 samples in 2 shards" in caplog.text
    with (folder / "00001.tar").open("r+b") as tar:
        tar.truncate(tar.seek(0, os.SEEK_END) // 2)
    write_samples(folder / "00002.tar", [make_sample("good"), make_sample("bad", members={"txt": b" "})])
    caplog.clear()
    opened(folder)
    line = next(record for record in caplog.records if record.message.startswith("source photos"))
    assert line.levelno == logging.WARNING
    assert re.search(
        r"15 of 16 samples in 3 shards; 1 unusable; 1 damaged shards \(00001.tar\), [\d,]+ bytes lost", line.message
    )


# ------------------------------------------------------------------ killed processes


@pytest.fixture
def photos(tmp_path):
    folder = make_shards(tmp_path / "photos", 2, 40)
    build_index(folder, num_workers=1)
    return folder


def test_a_killed_worker_and_a_killed_fork_server_are_replaced_and_nothing_is_lost(photos, opened, caplog):
    settings = {"num_epochs": 4, "global_batch_size": 2}
    expected = list(opened(photos, **settings))
    stream = opened(photos, num_workers=2, prefetch=1, **settings)
    batches, killers = [], []
    for batch in stream:
        batches.append(batch)
        if batch.number == 2:
            killers.append(threading.Thread(target=kill_at_work, args=(stream,)))
            killers[0].start()
        if batch.number == 8:
            os.kill(parent_of(stream.worker_pids[0]), signal.SIGKILL)
    killers[0].join()
    assert_same_batches(batches, expected)
    assert batches[8].number < len(expected) - 5
    assert "worker process" in caplog.text
    assert "retrying photos/0000" in caplog.text


def kill_at_work(stream):
    """Kill a worker in the middle of a packed sequence: stopped, it gets one and does not finish it."""
    [worker, *_] = stream._pool._pool._workers
    os.kill(worker.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 120
    while not worker.jobs and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_packed_sequence_that_kills_every_worker_ends_the_stream_with_its_samples_named(photos, opened, caplog):
    caplog.set_level(logging.ERROR)
    stream = opened(photos, num_workers=1, num_epochs=1000)
    next(stream)
    is_over = threading.Event()

    def kill_all():
        while not is_over.is_set():
            for pid in stream.worker_pids:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        with pytest.raises(
            DataError, match=r"3 worker processes crashed on the same packed sequence.*photos/0000\d/0000"
        ):
            list(stream)
    finally:
        is_over.set()
        killer.join()
    assert stream.worker_pids == []


def test_what_keeps_workers_from_starting_is_reported(photos, opened, checkpoint, tmp_path):
    stream = opened(photos, num_workers=1)
    (photos / "index" / "shards.json").rename(tmp_path / "away")
    with pytest.raises(DataError, match="not indexed"):
        next(stream)


SCRIPT = """
import sys, time
from saccade.data import open_stream

stream = open_stream(sys.argv[1], checkpoint=sys.argv[2], max_seq_len=1024, num_workers=2)
next(stream)
print(*stream.worker_pids, flush=True)
while True:
    next(stream)
"""


def abandoned(files):
    """The files that no process has mapped: other tests use shared memory at the same time."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return [file for file in files if str(file) not in mapped and file.exists()]


def test_nothing_outlives_a_trainer_that_is_killed(photos, checkpoint, opened):
    """Even one whose script has no `if __name__ == "__main__"`."""
    opened(photos)  # measures the samples
    shared_before = set(Path("/dev/shm").iterdir())
    trainer = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(photos), str(checkpoint)], stdout=subprocess.PIPE, text=True
    )
    with trainer, contextlib.ExitStack() as killed:
        killed.callback(trainer.kill)
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        pids.append(parent_of(pids[0]))
        assert len(set(pids)) == 3
        assert all(map(is_alive, pids))
        assert len(list(Path(f"/proc/{pids[-1]}/task").iterdir())) == 1, "the process that forks has one thread"
    assert_gone(pids)
    deadline = time.monotonic() + 120
    while left := abandoned(
        set(Path("/dev/shm").iterdir()) - shared_before
    ):  # another test may be making one right now
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
