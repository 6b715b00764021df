"""Curation by partitions: the same decisions for any number of them, exact leaders, and resumption of every stage."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from data.making import encode, make_caption, make_picture, make_sample, make_shards, write_samples

from saccade.data.curate import CurationSettings, curate
from saccade.data.curate import image_search as search
from saccade.data.curate.exchange import Exchange, Runner
from saccade.data.curate.leaders import EDGE, find_leaders, read_leaders, wanted
from saccade.data.curate.partitions import Partitions
from saccade.data.curate.pipeline import decide
from saccade.data.index import open_index
from saccade.data.jobs import Workers
from saccade.data.shared_folder import SharedFolder
from saccade.data.storage import StorageConfig
from saccade.errors import DataError

DUPLICATES = ("exact duplicate", "near-duplicate image", "near-duplicate text")
RULES = CurationSettings(min_side=8, near_duplicate_texts=True, max_images_per_text=3)


def folder_with_copies(folder, num_shards=6, per_shard=30):
    """Shards in which a third of the samples are copies: exact, resized, cropped, mirrored, and texts that repeat."""
    random = np.random.default_rng(0)
    for shard in range(num_shards):
        samples = []
        for row in range(per_shard):
            seed = int(random.integers(0, num_shards * per_shard * 2 // 3))
            picture = make_picture(120, 90, seed)
            kind = int(random.integers(4))
            if kind == 1:
                picture = picture.resize((96, 72))
            if kind == 2:
                picture = picture.crop((2, 2, 118, 88))
            if kind == 3:
                picture = picture.transpose(0)
            text = "Stock photo, royalty free" if row % 15 == 7 else make_caption(seed // 2) + " today" * (seed % 2)
            members = {"jpg": encode(picture, "JPEG", quality=90), "txt": text.encode()}
            samples.append(make_sample(f"{shard:03d}{row:03d}", members=members))
        write_samples(folder / f"{shard:05d}.tar", samples)
    return folder


def decisions(folder):
    index = open_index(folder)
    return [index.decisions(shard).to_pylist() for shard in range(len(index.shards))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with features, curated in one partition."""
    folder = folder_with_copies(tmp_path_factory.mktemp("curated") / "set")
    report = curate(folder, RULES, num_workers=1, num_partitions=1)
    return folder, report, decisions(folder)


@pytest.mark.parametrize("num_partitions", [2, 7])
def test_decisions_do_not_depend_on_the_number_of_partitions(tmp_path, monkeypatch, measured, num_partitions):
    """Also with clusters so small that images are looked for in several of them."""
    folder, report, decided = measured
    assert {*DUPLICATES, "text shared by many images"} == report.dropped.keys()
    shutil.copytree(folder, tmp_path / "set")
    assert curate(tmp_path / "set", RULES, num_workers=1, num_partitions=num_partitions).dropped == report.dropped
    assert decisions(tmp_path / "set") == decided
    assert not list((tmp_path / "set" / "index").glob("curation-*")), "nothing is left of the stages"
    monkeypatch.setattr(search, "CLUSTER_SIZE", 5)
    monkeypatch.setattr(search, "_MAX_BRANCHES", 4)
    results = []
    for number in (1, num_partitions):
        curate(tmp_path / "set", RULES, num_workers=1, num_partitions=number)
        results.append(decisions(tmp_path / "set"))
    assert results[0] == results[1]


def test_a_curation_that_was_stopped_after_any_job_resumes_and_decides_the_same(tmp_path, monkeypatch, measured):
    folder, _, decided = measured
    shutil.copytree(folder, tmp_path / "set")
    shutil.rmtree(tmp_path / "set" / "index" / "decisions")
    index, write, left = open_index(tmp_path / "set"), SharedFolder.write, [0]

    def write_until_stopped(self, name, data):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(self, name, data)

    monkeypatch.setattr(SharedFolder, "write", write_until_stopped)
    for _ in range(200):
        left[0] = 9
        try:
            decide(index, RULES, num_workers=1, num_partitions=3)
            break
        except KeyboardInterrupt:
            continue
    monkeypatch.undo()
    assert decisions(tmp_path / "set") == decided


FULL = """
import resource, sys
from saccade.data.curate import CurationSettings
from saccade.data.curate.pipeline import decide
from saccade.data.index import open_index
from saccade.errors import DataError
sys.dont_write_bytecode = True  # it would be cut off, and stay
index = open_index(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a write beyond fails, as on a full disk
try:
    decide(index, CurationSettings(near_duplicate_texts=True, **eval(sys.argv[2])), num_workers=1, num_partitions=3)
except DataError as error:
    print(error)
"""


def test_a_full_disk_stops_a_curation_with_one_line_and_with_space_it_resumes(tmp_path, measured):
    folder, _, decided = measured
    shutil.copytree(folder, tmp_path / "set")
    shutil.rmtree(tmp_path / "set" / "index" / "decisions")
    settings = repr({"min_side": RULES.min_side, "max_images_per_text": RULES.max_images_per_text})
    command = [sys.executable, "-c", FULL, str(tmp_path / "set"), settings]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(r"near-image-seen/\S+: cannot be written: File too large. Free space", run.stdout), run.stdout
    stages = [path.name for path in (tmp_path / "set" / "index").glob("curation-*/done-*")]
    assert {"done-rules", "done-exact-firsts"} <= set(stages), "finished stages are kept"
    decide(open_index(tmp_path / "set"), RULES, num_workers=1, num_partitions=3)
    assert decisions(tmp_path / "set") == decided


class Written:
    """Items that repeat each other as a table says; an item is compared by its number."""

    def __init__(self, same):
        self.same = same

    def payloads(self, partitions, ids):
        return [int(item).to_bytes(8, "little") for item in ids]

    def is_same(self, worse, better):
        return np.array([frozenset((one, other)) in self.same for one, other in zip(worse, better, strict=True)], bool)


def greedy(items, pairs):
    """Every item follows the best leader it repeats; `pairs` has the better item first."""
    leader = {item: item for item in items}
    for better, worse in sorted(pairs):
        if leader[better] == better and leader[worse] == worse:
            leader[worse] = better
    return {item: lead for item, lead in leader.items() if item != lead}


@pytest.mark.parametrize("num_partitions", [1, 2, 7])
def test_leaders_are_those_of_one_pass_over_all_pairs_in_order_of_quality(tmp_path, num_partitions):
    index = open_index(make_shards(tmp_path / "set", 7, 30), num_workers=1)
    random = np.random.default_rng(num_partitions)
    for trial in range(6):
        ids = np.array([shard << 40 | row << 16 for shard in range(7) for row in range(30)], np.uint64)
        quality = dict(zip(ids.tolist(), random.permutation(len(ids)).tolist(), strict=True))
        by_rank = sorted(quality, key=quality.get)
        num = int(random.integers(50, 900))
        ranks = np.sort(random.integers(0, len(ids), (num, 2)), axis=1)
        pairs = {(int(a), int(b)) for a, b in ranks if a != b}
        same = {frozenset(by_rank[rank].to_bytes(8, "little") for rank in pair) for pair in pairs}
        folder = SharedFolder(str(tmp_path / f"work-{trial}"), StorageConfig())
        partitions = Partitions(index, CurationSettings(), folder, num_partitions)
        rows = np.array([(by_rank[b], by_rank[a], a) for a, b in pairs], EDGE)
        sender = wanted(partitions, "items").sender(0)
        sender.send(partitions.of_ids(rows["better"]), rows)
        sender.close()
        where = find_leaders(Runner(folder, Workers(num_workers=1)), partitions, Written(same), "items")
        found = np.concatenate([read_leaders(partitions, where, number) for number in range(num_partitions)])
        first = greedy(range(len(ids)), pairs)
        expected = {by_rank[item]: by_rank[lead] for item, lead in first.items()}
        assert dict(zip(found["worse"].tolist(), found["leader"].tolist(), strict=True)) == expected


def test_an_item_is_compared_with_the_leader_of_what_it_repeats(tmp_path):
    """All items follow the first one if they form a chain of pairs 0-1, 1-2, ... and each repeats every other."""
    index = open_index(make_shards(tmp_path / "set", 3, 10), num_workers=1)
    ids = np.array([shard << 40 | row << 16 for shard in range(3) for row in range(10)], np.uint64)
    everything = {frozenset(int(item).to_bytes(8, "little") for item in (a, b)) for a in ids for b in ids if a != b}
    for num_partitions in (1, 3):
        folder = SharedFolder(str(tmp_path / f"work-{num_partitions}"), StorageConfig())
        partitions = Partitions(index, CurationSettings(), folder, num_partitions)
        rows = np.array([(ids[n + 1], ids[n], n) for n in range(29)], EDGE)
        sender = wanted(partitions, "items").sender(0)
        sender.send(partitions.of_ids(rows["better"]), rows)
        sender.close()
        where = find_leaders(Runner(folder, Workers(num_workers=1)), partitions, Written(everything), "items")
        found = np.concatenate([read_leaders(partitions, where, number) for number in range(num_partitions)])
        assert sorted(found["worse"].tolist()) == ids[1:].tolist()
        assert set(found["leader"].tolist()) == {int(ids[0])}


def test_rows_and_their_bytes_arrive_once_whatever_the_size_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.data.curate.exchange._FILE_BYTES", 300)
    dtype = np.dtype([("value", "u4"), ("num_bytes", "u4")])
    exchange = Exchange(SharedFolder(str(tmp_path), StorageConfig()), "rows", dtype, 5)
    random, sent = np.random.default_rng(0), {number: [] for number in range(5)}
    for job in range(4):
        sender = exchange.sender(job)
        for _ in range(6):
            rows = np.zeros(int(random.integers(0, 20)), dtype)
            rows["value"] = random.integers(0, 1000, len(rows))
            to = random.integers(0, 5, len(rows))
            blobs = [bytes([value % 256]) * int(random.integers(0, 9)) for value in rows["value"].tolist()]
            sender.send(to, rows, blobs)
            for partition, value, blob in zip(to.tolist(), rows["value"].tolist(), blobs, strict=True):
                sent[partition].append((value, blob))
        sender.close()
    for partition in range(5):
        got = [
            (value, blob)
            for rows, blobs in exchange.parts_with_blobs(partition)
            for value, blob in zip(rows["value"].tolist(), blobs, strict=True)
        ]
        assert sorted(got) == sorted(sent[partition])
        assert exchange.rows(partition)["value"].tolist() == [value for value, _ in got]


def test_a_quarantined_shard_is_named_and_none_of_its_samples_are_kept(tmp_path):
    make_shards(tmp_path, 3, 6)
    curate(tmp_path, CurationSettings(min_side=8), num_workers=1)
    (tmp_path / "index" / "features" / "00001.parquet").unlink()
    index = open_index(tmp_path)
    with pytest.raises(DataError, match=r"00001.*missing"):
        decide(index, CurationSettings(min_side=8), num_workers=1)
    report = decide(index, CurationSettings(min_side=8), num_workers=1, quarantined={"00001.tar": "its process ended"})
    assert report.quarantined == {"00001.tar": "its process ended"}
    assert report.dropped["quarantined shard"] == 6
    index = open_index(tmp_path)
    assert index.kept_sizes.tolist()[1] == 0
    assert set(index.decisions(1)["reason"].to_pylist()) == {"quarantined shard"}


def test_clusters_bring_copies_together_and_the_most_similar_of_each_are_kept():
    random = np.random.default_rng(0)
    thumbnails = np.repeat(random.integers(0, 256, (400, 8, 8), np.uint8), 4, axis=1).repeat(4, axis=2).reshape(400, -1)
    thumbnails = np.concatenate([thumbnails, np.full((400, 128), 128, np.uint8)], axis=1)
    vectors = search.view_vectors(thumbnails)
    assert vectors.shape == (400, search.NUM_VIEWS, search.DIMS)
    pairs = np.zeros(500, search.LIKELY)
    pairs["worse"], pairs["better"] = random.integers(50, 60, 500), random.integers(0, 50, 500)
    pairs["quality"], pairs["similarity"] = pairs["better"] // 3, random.integers(0, 40, 500)
    whole = search.most_similar(pairs)
    parts = search.most_similar(np.concatenate([search.most_similar(part) for part in np.array_split(pairs, 7)]))
    assert whole.tolist() == parts.tolist()
    assert np.bincount(whole["worse"].astype(int)).max() <= search.MAX_CANDIDATES
