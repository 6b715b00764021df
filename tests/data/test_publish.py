"""An index is published once, next to the shards; another machine reads no sample before training. Takedown."""

import json
import os

import numpy as np
import pytest
from data.making import make_shards
from data.serving import proxy_to
from typer.testing import CliRunner

from saccade.cli.data import app
from saccade.data import open_stream
from saccade.data.curate import CurationSettings, curate
from saccade.data.curate.features import is_measured, measure_features
from saccade.data.curate.pipeline import decide
from saccade.data.index import open_index
from saccade.data.lengths import Measurer
from saccade.data.publish import publish
from saccade.data.sample import TextRules
from saccade.data.shards import list_shards
from saccade.data.storage import StorageConfig
from saccade.data.takedown import take_down
from saccade.errors import DataError


@pytest.fixture
def bucket(s3_port, tmp_path, new_bucket):
    """A folder of shards on S3, and the requests it gets: (URL, bytes of the tars, faults)."""
    with proxy_to(s3_port) as (url, faults):
        make_shards(tmp_path / "set", 4, 6)
        filesystem, name = new_bucket(url)
        for file in list_shards(tmp_path / "set"):
            filesystem.put(file.url, f"{name}/set/{file.name}")
        faults.requests.clear()
        yield f"s3://{name}/set", sum(file.num_bytes for file in list_shards(tmp_path / "set")), faults


def config(tmp_path, name):
    return StorageConfig(cache_folder=str(tmp_path / name), first_wait_s=0.01)


def tar_requests(faults):
    return [line for line in faults.requests if line.startswith("GET") and ".tar " in line]


def bytes_of(requests):
    spans = [line.rpartition("bytes=")[2].split("-") for line in requests]
    return sum(int(end) - int(begin) + 1 for begin, end in spans)


def ids_of(stream):
    return [sample_id for batch in stream for sample_id in batch.sample_ids]


def test_one_pass_publishes_what_another_machine_needs_to_start(tmp_path, bucket, checkpoint):
    url, num_bytes, faults = bucket
    measurer = Measurer(str(checkpoint), TextRules())
    report = publish(url, [measurer], features=True, num_workers=1, config=config(tmp_path, "first"))
    assert (report.num_shards, report.num_read, report.num_samples) == (4, 4, 24)
    assert bytes_of(tar_requests(faults)) == num_bytes, "every byte of the shards was read once"
    faults.requests.clear()
    options = {"checkpoint": checkpoint, "max_seq_len": 1024, "num_workers": 0, "num_epochs": 1}
    stream = open_stream(url, storage=config(tmp_path, "second"), **options)
    assert tar_requests(faults) == [], "a machine with an empty cache reads no sample before training"
    index = open_index(url, config=config(tmp_path, "second"))
    assert all(is_measured(index, shard) for shard in range(4))
    assert sorted(ids_of(stream)) == sorted(ids_of(open_stream(tmp_path / "set", **options)))
    faults.requests.clear()
    again = publish(url, [measurer], features=True, num_workers=1, config=config(tmp_path, "third"))
    assert (again.num_read, again.num_samples) == (0, 24)
    assert tar_requests(faults) == []


@pytest.mark.slow
def test_another_rank_opens_the_columns_without_listing_and_sees_the_same(tmp_path, bucket, checkpoint):
    url, _, faults = bucket
    publish(url, [Measurer(str(checkpoint), TextRules())], num_workers=1, config=config(tmp_path, "first"))
    options = {"checkpoint": checkpoint, "max_seq_len": 1024, "num_workers": 0, "num_epochs": 1}
    first = open_stream(url, storage=config(tmp_path, "second"), **options)
    faults.requests.clear()
    other = open_stream(url, storage=config(tmp_path, "third"), check_files=False, **options)
    listings = [line for line in faults.requests if "list-type" in line and "max-keys=1&" not in line]
    assert listings == [], "the others ask whether a missing file is a folder"
    assert other.fingerprint == first.fingerprint
    assert list((tmp_path / "third").rglob("shards-*.arrow")), "a copy that the processes of this node map"
    assert ids_of(other) == ids_of(first)


@pytest.mark.slow
def test_curation_writes_next_to_remote_shards_for_every_machine(tmp_path, bucket):
    """As on a cluster: features, files of the stages and decisions are on the URL, and no copy counts."""
    url, _, _ = bucket
    settings = CurationSettings(min_side=70)
    index = open_index(url, config=config(tmp_path, "one"), num_workers=1, index_folder=f"{url}/index")
    assert measure_features(index, num_workers=1).num_shards == 4
    driver = open_index(url, config=config(tmp_path, "two"), num_workers=1, index_folder=f"{url}/index")
    assert measure_features(driver, num_workers=1).num_shards == 0
    report = decide(driver, settings, num_workers=1, num_partitions=2)
    other = open_index(url, config=config(tmp_path, "three"), num_workers=1)
    assert other.kept_sizes.sum() == report.num_kept == 8
    assert other.summary()["counts"] == {"samples": 24, "image too small": 16, "kept": 8}
    here = curate(tmp_path / "set", settings, num_workers=1)
    assert (here.num_kept, here.dropped) == (report.num_kept, report.dropped)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [503, "reset"])
def test_a_store_that_fails_every_seventh_request_costs_a_curation_time_and_nothing_else(
    tmp_path, bucket, s3_port, monkeypatch, kind
):
    url, _, _ = bucket
    here = curate(tmp_path / "set", CurationSettings(min_side=60), num_workers=1)
    with proxy_to(s3_port, kind, every=7) as (endpoint, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        index = open_index(url, config=config(tmp_path, "one"), num_workers=1, index_folder=f"{url}/index")
        measure_features(index, num_workers=1)
        report = decide(index, CurationSettings(min_side=60), num_workers=1, num_partitions=2)
        assert faults.num_faults > 50
    assert (here.num_kept, here.dropped) == (report.num_kept, report.dropped)


def test_columns_of_another_list_of_shards_are_not_used(tmp_path):
    folder = make_shards(tmp_path / "set", 3, 2)
    entries = list(open_index(folder).entries)
    assert list(open_index(folder, check_files=False).entries) == entries
    listed = folder / "index" / "shards.json"
    content = json.loads(listed.read_text())
    content["shards"] = content["shards"][:2]
    listed.write_text(json.dumps(content))
    again = open_index(folder, check_files=False)
    assert (list(again.entries), list(again.shards)) == (entries[:2], ["00000.tar", "00001.tar"])
    (folder / "index" / "shards.arrow").write_bytes(b"damaged")
    assert len(open_index(folder, check_files=False).shards) == 2
    index = open_index(folder)
    assert index.fingerprint == open_index(folder, check_files=False).fingerprint
    assert index.only([2, 0]).shards[0] == "00002.tar"
    assert [file.num_bytes for file in index.files[1:]] == index.num_bytes[1:].tolist()


def test_a_stream_opened_without_listing_is_built_where_nothing_is_there(tmp_path, checkpoint):
    folder = make_shards(tmp_path / "set", 2, 3)
    stream = open_stream(folder, checkpoint=checkpoint, max_seq_len=512, num_workers=0, num_epochs=1, check_files=False)
    assert len(ids_of(stream)) == 6


@pytest.mark.slow
def test_a_new_processor_adds_its_lengths_and_a_new_shard_is_added(tmp_path, bucket, checkpoint):
    import s3fs

    url = bucket[0]
    publish(url, [], num_workers=1, config=config(tmp_path, "first"))
    make_shards(tmp_path / "more", 1, 5, seed=9)
    s3fs.S3FileSystem(skip_instance_cache=True).put(str(tmp_path / "more" / "00000.tar"), f"{url}/00009.tar")
    report = publish(url, [Measurer(str(checkpoint), TextRules())], num_workers=1, config=config(tmp_path, "first"))
    assert (report.num_shards, report.num_read, report.num_samples) == (5, 5, 29)
    assert len(open_index(url, build=False, config=config(tmp_path, "second"))) == 29


def test_a_folder_on_disk_is_completed_in_place(tmp_path, checkpoint):
    folder = make_shards(tmp_path / "set", 2, 3)
    answer = CliRunner().invoke(app, ["publish", str(folder), "--model", str(checkpoint), "--json"])
    assert json.loads(answer.stdout)["num_read"] == 2
    seen = []
    open_stream(folder, checkpoint=checkpoint, max_seq_len=512, num_workers=0, on_progress=lambda *_: seen.append(1))
    assert seen == []
    with pytest.raises(DataError, match="give the folder"):
        publish(f"{folder}/00000.tar", [])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    folder = make_shards(tmp_path / "set", 1, 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="cannot be written"):
        publish(folder, [])


# ------------------------------------------------------------------ takedown


def test_samples_that_are_taken_down_are_skipped_counted_and_named_and_a_run_resumes(tmp_path, checkpoint):
    folder = make_shards(tmp_path / "set", 3, 20)
    log = tmp_path / "bad.jsonl"

    def opened(state=None):
        return open_stream(
            folder, checkpoint=checkpoint, max_seq_len=512, num_workers=0, num_epochs=1, packing_buffer_size=16,
            max_bad_share=0.0, bad_log=log, state=state,
        )  # fmt: skip

    whole = list(opened())
    half = len(whole) // 2
    ids = [sample_id for batch in whole for sample_id in batch.sample_ids]
    after = [sample_id for batch in whole[half:] for sample_id in batch.sample_ids]
    index = open_index(folder)
    shard, key = after[1].split("/")[1:]
    row = index.read(int(shard), ["key"])["key"].to_pylist().index(key)
    checksum = index.read(int(shard), ["checksum"])["checksum"][row].as_py().hex()
    removed = {after[0], after[1], ids[0]}
    written = tmp_path / "removed.txt"
    written.write_text(f"{after[0]}\n{checksum}\n\n# asked on Monday\n{ids[0].partition('/')[2]}\n")
    answer = CliRunner().invoke(app, ["takedown", str(folder), str(written)])
    assert "3 samples taken down, 3 in all" in answer.stdout
    assert take_down(folder, [after[0]]) == (0, 3)

    stream = opened(state=whole[half - 1].state)
    rest = list(stream)
    assert [batch.state for batch in rest] == [batch.state for batch in whole[half:]]
    assert [i for batch in rest for i in batch.sample_ids] == [i for i in after if i not in removed]
    assert stream.num_taken_down == 2
    named = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(each["sample_id"] for each in named) == sorted(after[:2])
    assert {each["reason"] for each in named} == {"taken down"}
    assert sorted(ids_of(opened())) == sorted(set(ids) - removed)


def test_the_bytes_of_a_sample_that_was_taken_down_are_not_read(tmp_path, checkpoint):
    folder = make_shards(tmp_path / "set", 1, 4)
    open_stream(folder, checkpoint=checkpoint, max_seq_len=512, num_workers=0).close()
    index = open_index(folder)
    begins, ends = index.byte_ranges(0, np.arange(4))
    take_down(folder, [f"00000/{index.read(0, ['key'])['key'][2].as_py()}"])
    content = bytearray((folder / "00000.tar").read_bytes())
    content[begins[2] : ends[2]] = bytes(int(ends[2] - begins[2]))
    (folder / "00000.tar").write_bytes(content)
    with open_stream(folder, checkpoint=checkpoint, max_seq_len=512, num_workers=0, num_epochs=1) as stream:
        bad = [each for batch in stream for each in batch.bad]
    assert [each.reason for each in bad] == ["taken down"]


def test_a_list_with_something_that_is_no_sample_is_refused(tmp_path):
    folder = make_shards(tmp_path / "set", 1, 1)
    with pytest.raises(DataError, match="'abc' is no sample"):
        take_down(folder, ["00000/x", "abc"])
