"""Inputs to shards: what is written, what is counted, and that a killed run resumes without a difference."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.loopback import Site
from data.making import make_jpeg, make_png, make_shards
from PIL import Image

from saccade.data.download import DownloadOptions
from saccade.data.prepare import PrepareOptions, prepare
from saccade.data.prepare_report import ItemProgress
from saccade.data.readers import parse_input, read_input
from saccade.data.sample import Sample, description, image_names, images, texts
from saccade.errors import ConfigError, DataError

TESTS = Path(__file__).parents[1]


def make_files(folder, num_samples, *, size=(96, 64)):
    folder.mkdir(parents=True)
    for number in range(num_samples):
        (folder / f"{number:06d}.jpg").write_bytes(make_jpeg(*size, seed=number % 50) + bytes(number % 7))
        (folder / f"{number:06d}.txt").write_text(f"picture {number}")
    return folder


def make_captions(folder, num_images=6, missing=()):
    """COCO, with some image files missing."""
    (folder / "images").mkdir(parents=True)
    for number in set(range(num_images)) - set(missing):
        (folder / "images" / f"{number}.jpg").write_bytes(make_jpeg(seed=number))
    content = {
        "images": [{"id": number, "file_name": f"{number}.jpg"} for number in range(num_images)],
        "annotations": [{"image_id": number, "caption": f"caption {number}"} for number in range(num_images)],
    }
    (folder / "captions.json").write_text(json.dumps(content))
    return parse_input(str(folder / "captions.json"), images=folder / "images", name="coco", licence="CC BY 4.0")


def shard_names(folder):
    return sorted(path.name for path in folder.glob("*.tar"))


def samples_of(folder):
    """Every sample of the shards, read by Python's own tarfile."""
    samples = {}
    for name in shard_names(folder):
        with tarfile.open(folder / name) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                samples.setdefault((name, key), {})[extension] = tar.extractfile(member).read()
    return {key: Sample(key[1], key[0], members) for key, members in samples.items()}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ------------------------------------------------------------------ what is written


def test_inputs_of_several_kinds_become_one_folder_of_shards(tmp_path):
    specs = [
        make_captions(tmp_path / "coco", 6, missing=[2]),
        parse_input(str(make_shards(tmp_path / "laion", 2, 4))),
        parse_input(str(make_files(tmp_path / "photos", 3))),
    ]
    report = prepare(specs, tmp_path / "out", PrepareOptions(samples_per_shard=5))
    written = samples_of(tmp_path / "out")
    expected = [item for spec in specs for item in read_input(spec) if isinstance(item, Sample)]
    assert [sample.members for sample in written.values()] == [sample.members for sample in expected]
    assert [f"{name}/{key}" for name, key in written] == [
        f"{shard:05d}.tar/{shard:05d}{number:04d}" for shard, size in enumerate([5, 5, 5, 1]) for number in range(size)
    ]
    assert report.is_finished
    assert (report.num_samples, report.num_skipped, report.num_shards) == (16, 1, 4)
    assert report.skipped == {"image file missing": 1}
    assert [(entry.name, entry.kind, entry.num_samples) for entry in report.inputs] == [
        ("coco", "coco", 5), ("laion", "tars", 8), ("photos", "files", 3),
    ]  # fmt: skip
    assert report.num_bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar"))


def test_samples_carry_source_licence_and_their_id_in_the_input(tmp_path):
    prepare([make_captions(tmp_path / "coco")], tmp_path / "out")
    sample = samples_of(tmp_path / "out")["00000.tar", "000000003"]
    assert description(sample) == {
        "captions": ["caption 3"],
        "file_name": "3.jpg",
        "id": "3",
        "source": "coco",
        "licence": "CC BY 4.0",
    }
    assert sample.members["jpg"] == make_jpeg(seed=3)


def test_rows_with_one_caption_each_are_merged_also_by_a_run_that_resumes(tmp_path):
    """Every shard holds one sample, so that a run that stops after each item stops in the middle of an image's rows."""
    rows = [{"image": make_jpeg(seed=n // 5), "caption": f"caption {n}"} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "coco.parquet")
    spec, options = parse_input(str(tmp_path / "coco.parquet")), PrepareOptions(samples_per_shard=1)
    whole = prepare([spec], tmp_path / "whole", options)
    assert (whole.num_samples, whole.num_merged, whole.num_skipped) == (4, 16, 0)

    class StopError(Exception):
        pass

    for stop in range(1, 20):
        seen = []

        def stop_after(report, seen=seen, stop=stop):
            seen.append(report)
            if len(seen) == stop:
                raise StopError

        with pytest.raises(StopError):
            prepare([spec], tmp_path / f"stopped-{stop}", options, on_progress=stop_after)
        report = prepare([spec], tmp_path / f"stopped-{stop}", options)
        assert (report.num_samples, report.num_merged) == (4, 16)
        assert contents(tmp_path / f"stopped-{stop}") == contents(tmp_path / "whole")
    assert [len(texts(sample)) for sample in samples_of(tmp_path / "whole").values()] == [5] * 4


def test_the_report_is_written_beside_the_shards(tmp_path):
    seen = []
    report = prepare(
        [make_captions(tmp_path / "coco", 8, missing=[0, 5])],
        tmp_path / "out",
        PrepareOptions(samples_per_shard=2, download=DownloadOptions(user_agent="me")),
        on_progress=lambda report: seen.append((report.num_samples, report.num_skipped, report.num_shards)),
    )
    written = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert written["version"] == 2
    assert written["is_finished"] is True
    assert (written["num_samples"], written["num_skipped"], written["num_shards"]) == (6, 2, 3)
    assert written["skipped"] == {"image file missing": 2}
    assert written["settings"]["samples_per_shard"] == 2
    assert written["settings"]["download"]["user_agent"] == "me"
    [entry] = written["inputs"]
    assert entry["skipped"] == {"image file missing": 2}
    assert [example.partition(":")[0] for example in entry["examples"]["image file missing"]] == ["0", "5"]
    assert seen == [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 1, 1), (4, 1, 1), (4, 2, 1), (5, 2, 2), (6, 2, 2)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "00000.tar",
        "00001.tar",
        "00002.tar",
        "prepare.json",
    ]
    assert report.num_samples == 6


def test_shards_are_bounded_in_bytes_and_a_larger_sample_has_its_own(tmp_path):
    make_files(tmp_path / "photos", 12)
    (tmp_path / "photos" / "000005.jpg").write_bytes(make_jpeg() + bytes(200_000))
    prepare([parse_input(str(tmp_path / "photos"))], tmp_path / "out", PrepareOptions(bytes_per_shard=30_000))
    sizes = {name: (tmp_path / "out" / name).stat().st_size for name in shard_names(tmp_path / "out")}
    [large] = [name for name, size in sizes.items() if size > 30_000]
    written = samples_of(tmp_path / "out")
    assert sum(name == large for name, _ in written) == 1
    assert len(sizes) > 3
    assert [texts(sample) for sample in written.values()] == [[f"picture {number}"] for number in range(12)]
    assert len({key for _, key in written}) == 12


def test_large_shards_have_longer_keys(tmp_path):
    make_files(tmp_path / "photos", 2)
    prepare([parse_input(str(tmp_path / "photos"))], tmp_path / "out", PrepareOptions(samples_per_shard=100_000))
    assert [key for _, key in samples_of(tmp_path / "out")] == ["0000000000", "0000000001"]


def test_only_images_beyond_the_wanted_size_are_encoded_again(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    originals = {
        "a.jpg": make_jpeg(400, 200), "b.jpg": make_jpeg(100, 80), "c.png": make_png(90, 300),
        "d.jpg": make_jpeg(300, 150, orientation=6), "e.jpg": make_jpeg(400, 200)[:800],
    }  # fmt: skip
    for name, data in originals.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text(name)
    report = prepare([parse_input(str(folder))], tmp_path / "out", PrepareOptions(resize_longest=128, num_workers=2))
    written = list(samples_of(tmp_path / "out").values())
    assert [texts(sample) for sample in written] == [["a.jpg"], ["b.jpg"], ["c.png"], ["d.jpg"]]
    (tmp_path / "x").mkdir()
    sizes = []
    for sample in written:
        (tmp_path / "x" / "y").write_bytes(images(sample)[0])
        with Image.open(tmp_path / "x" / "y") as image:
            sizes.append((image.format, image.size))
    assert sizes == [("JPEG", (128, 64)), ("JPEG", (100, 80)), ("PNG", (38, 128)), ("JPEG", (64, 128))]
    assert images(written[1]) == [originals["b.jpg"]]
    assert [image_names(sample.members) for sample in written] == [["jpg"], ["jpg"], ["png"], ["jpg"]]
    assert report.skipped == {"image cannot be decoded": 1}


def test_shrinking_keeps_the_picture(tmp_path):
    make_files(tmp_path / "photos", 1, size=(512, 384))
    prepare([parse_input(str(tmp_path / "photos"))], tmp_path / "out", PrepareOptions(resize_longest=128))
    [sample] = samples_of(tmp_path / "out").values()
    (tmp_path / "small.jpg").write_bytes(images(sample)[0])
    with Image.open(tmp_path / "small.jpg") as small, Image.open(tmp_path / "photos" / "000000.jpg") as large:
        expected = np.asarray(large.resize((128, 96), Image.Resampling.BOX), dtype=np.int16)
        assert np.abs(np.asarray(small, dtype=np.int16) - expected).mean() < 6


# ------------------------------------------------------------------ downloads


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


def make_links(path, site, names):
    columns = {"url": [site.url(name) for name in names], "caption": [f"text {n}" for n in range(len(names))]}
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return parse_input(str(path))


def fetch_options(site):
    return DownloadOptions(
        allow_hosts=frozenset({f"127.0.0.1:{site.port}"}), backoff_s=0.01, host_delay_s=0.0, num_retries=2
    )


def test_links_are_downloaded_and_failures_counted_under_their_reasons(tmp_path, site):
    names = ["img0", "gone", "img2", "noai", "page", "moved-away", "img6", "flapping"]
    spec = make_links(tmp_path / "links.parquet", site, names)
    report = prepare([spec], tmp_path / "out", PrepareOptions(download=fetch_options(site)))
    written = list(samples_of(tmp_path / "out").values())
    assert {texts(sample)[0]: description(sample)["url"] for sample in written} == {
        f"text {number}": site.url(names[number]) for number in (0, 2, 6, 7)
    }
    [sample] = [sample for sample in written if texts(sample) == ["text 2"]]
    assert sample.members["jpg"] == make_jpeg(seed=2)
    assert report.skipped == {"http 404": 1, "not an image": 1, "opted out": 1, "address not public": 1}
    assert report.inputs[0].examples["http 404"] == [f"links.parquet:1: {site.url('gone')}"]


def test_private_addresses_in_a_list_are_never_asked_by_default(tmp_path, site):
    spec = make_links(tmp_path / "links.parquet", site, ["img0"])
    with pytest.raises(DataError, match="port not allowed"):
        prepare([spec], tmp_path / "out")
    assert not site.seen


# ------------------------------------------------------------------ killed, and going on

SCRIPT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from saccade.data.download import DownloadOptions
from saccade.data.prepare import PrepareOptions, prepare
from saccade.data.prepare_report import ItemProgress
from saccade.data.readers import parse_input
from saccade.errors import UserError
arguments = json.loads(sys.argv[2])
allow = frozenset(arguments.get("allow", []))
fetch = DownloadOptions(allow_hosts=allow, host_delay_s=0.0) if allow else DownloadOptions()
options = PrepareOptions(download=fetch, **arguments["options"])
try:
    prepare([parse_input(path) for path in arguments["inputs"]], arguments["out"], options,
            on_progress=lambda report: time.sleep(arguments.get("pause", 0)))
except UserError as error:
    sys.exit(f"user error: {error}")
"""


def start(prefix=(), **arguments):
    command = [*prefix, sys.executable, "-c", SCRIPT, str(TESTS.parent), json.dumps(arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def num_recorded(out):
    """Whole shards as the report on the disk says."""
    path = out / "prepare.json"
    return json.loads(path.read_text())["num_shards"] if path.exists() else 0


def kill_until_done(out, num_kills, **arguments):
    """Run again and again; each time the process is killed at some moment after another shard is whole."""
    moments = random.Random(0)
    for _ in range(num_kills):
        begun = num_recorded(out)
        process = start(out=str(out), pause=0.02, **arguments)
        while process.poll() is None and num_recorded(out) == begun:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
        process.stderr.close()
        assert not json.loads((out / "prepare.json").read_text())["is_finished"]
    process = start(out=str(out), **arguments)
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()


def test_a_killed_run_resumes_and_ends_with_the_same_bytes(tmp_path):
    make_files(tmp_path / "photos", 150)
    make_shards(tmp_path / "tars", 3, 40)
    (tmp_path / "photos" / "000017.jpg").write_bytes(b"broken")
    arguments = {"inputs": [str(tmp_path / "photos"), str(tmp_path / "tars")], "options": {"samples_per_shard": 25}}
    prepare(
        [parse_input(path) for path in arguments["inputs"]], tmp_path / "whole", PrepareOptions(samples_per_shard=25)
    )
    kill_until_done(tmp_path / "killed", 2, **arguments)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_killed_download_resumes_without_requesting_completed_shards_again(tmp_path, site):
    names = [f"img{number}" if number % 5 else "gone" for number in range(120)]
    make_links(tmp_path / "links.parquet", site, names)
    arguments = {
        "inputs": [str(tmp_path / "links.parquet")],
        "options": {"samples_per_shard": 20},
        "allow": [f"127.0.0.1:{site.port}"],
    }
    kill_until_done(tmp_path / "killed", 1, **arguments)
    assert sum(count == 1 for count in site.seen.values()) >= 20, "what was in the first shard is not asked for again"
    options = PrepareOptions(samples_per_shard=20, download=fetch_options(site))
    report = prepare([parse_input(arguments["inputs"][0])], tmp_path / "whole", options)
    assert report.skipped == {"http 404": 24}
    killed = json.loads((tmp_path / "killed" / "prepare.json").read_text())
    assert (killed["num_samples"], killed["skipped"]) == (96, {"http 404": 24})
    once, again = ([s.members for s in samples_of(tmp_path / name).values()] for name in ("whole", "killed"))
    assert sorted(once, key=lambda members: members["json"]) == sorted(again, key=lambda members: members["json"])


def test_the_frontier_knows_what_is_used_however_items_end():
    """Items end in any order; a new progress made from the record at any time starts exactly the unfinished ones."""
    chance = random.Random(7)
    for _ in range(200):
        places = [
            (source, part, item) for source in range(2) for part in range(2) for item in range(chance.randrange(12))
        ]
        progress, open_items, used = ItemProgress((0, 0, 0), []), [], []
        for place in places:
            if progress.start(place):
                open_items.append(place)
            while open_items and chance.random() < 0.5:
                ended = open_items.pop(chance.randrange(min(5, len(open_items))))
                progress.finish(ended)
                used.append(ended)
            if chance.random() < 0.2:  # the run is killed; what was unfinished starts again
                again = ItemProgress(progress.next_item, progress.done_after())
                left = [place for place in places if place >= progress.next_item and again.start(place)]
                assert sorted(left + used) == places
            assert all(ended < progress.next_item for ended in used) or progress.done_after()


def test_what_a_crash_left_behind_is_cleared_away(tmp_path):
    make_files(tmp_path / "photos", 10)
    spec = parse_input(str(tmp_path / "photos"))
    whole = tmp_path / "whole"
    prepare([spec], whole, PrepareOptions(samples_per_shard=3))

    class StoppedError(Exception):
        pass

    def stop(report):
        if report.num_samples == 8:
            raise StoppedError

    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        prepare([spec], out, PrepareOptions(samples_per_shard=3), on_progress=stop)
    assert shard_names(out) == ["00000.tar", "00001.tar"]
    shutil.copy(whole / "00001.tar", out / "00002.tar")  # whole, but killed before the report knew of it
    (out / ".00003.tar.part").write_bytes(b"half")
    (out / ".prepare.json.part").write_bytes(b"{")
    prepare([spec], out, PrepareOptions(samples_per_shard=3))
    assert contents(out) == contents(whole)


def test_a_finished_folder_is_left_alone(tmp_path):
    spec = make_captions(tmp_path / "coco")
    first = prepare([spec], tmp_path / "out")
    (tmp_path / "out" / "index").mkdir()
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare([spec], tmp_path / "out") == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


# ------------------------------------------------------------------ refused, with a remedy


def test_a_folder_with_other_things_is_refused(tmp_path):
    spec = make_captions(tmp_path / "coco")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"thesis\.txt.*another folder"):
        prepare([spec], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Choose a folder"):
        prepare([spec], tmp_path / "file")
    with pytest.raises(ConfigError, match="local folder"):
        prepare([spec], "s3://bucket/shards")


def test_shards_of_other_inputs_or_options_are_not_mixed(tmp_path):
    spec = make_captions(tmp_path / "coco")
    prepare([spec], tmp_path / "out")
    with pytest.raises(DataError, match="other inputs or with other options"):
        prepare([spec], tmp_path / "out", PrepareOptions(samples_per_shard=2))
    with pytest.raises(DataError, match="other inputs or with other options"):
        prepare([spec, spec], tmp_path / "out")
    path = tmp_path / "coco" / "captions.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(DataError, match="other inputs or with other options"):
        prepare([spec], tmp_path / "out")


def test_shards_that_were_lost_or_changed_are_noticed(tmp_path):
    spec = make_captions(tmp_path / "coco")
    prepare([spec], tmp_path / "out", PrepareOptions(samples_per_shard=2))
    with (tmp_path / "out" / "00001.tar").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="sizes have changed"):
        prepare([spec], tmp_path / "out", PrepareOptions(samples_per_shard=2))
    (tmp_path / "out" / "00001.tar").unlink()
    with pytest.raises(DataError, match=r"00001\.tar is missing"):
        prepare([spec], tmp_path / "out", PrepareOptions(samples_per_shard=2))


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"version": 9}'])
def test_a_report_that_cannot_be_read_is_named(tmp_path, content):
    spec = make_captions(tmp_path / "coco")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "prepare.json").write_text(content)
    with pytest.raises(DataError, match=r"prepare\.json"):
        prepare([spec], tmp_path / "out")


def test_two_runs_cannot_share_a_folder(tmp_path):
    spec = make_captions(tmp_path / "coco")
    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another run is writing"):
            prepare([spec], tmp_path / "out")
    finally:
        os.close(handle)


def test_what_cannot_fit_is_refused_before_the_work_begins(tmp_path):
    make_shards(tmp_path / "tars", 1, 2)
    (tmp_path / "tars" / "00001.tar").touch()
    os.truncate(tmp_path / "tars" / "00001.tar", shutil.disk_usage(tmp_path).free + 2**30)  # takes no space itself
    with pytest.raises(DataError, match="GB free"):
        prepare([parse_input(str(tmp_path / "tars"))], tmp_path / "out")
    assert shard_names(tmp_path / "out") == []


def test_bad_inputs_are_found_before_the_folder_is_touched(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        prepare([make_captions(tmp_path / "coco"), parse_input(str(tmp_path / "nowhere"))], tmp_path / "out")
    with pytest.raises(ConfigError, match="no inputs"):
        prepare([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [{"samples_per_shard": 0}, {"resize_longest": 2}, {"max_skipped_share": 0.0}, {"num_workers": 0}]
)
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        PrepareOptions(**options)


def test_a_llava_folder_is_refused_with_the_way_to_name_its_file(tmp_path):
    folder = tmp_path / "llava"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(make_jpeg())
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat"}]
    (folder / "all.json").write_text(json.dumps([{"id": "0", "image": "0.jpg", "conversations": turns}]))
    with pytest.raises(DataError, match=r"no usable text \(3 times\).*json is not an object.*chat:FILE, with --images"):
        prepare([parse_input(str(folder))], tmp_path / "out")
    named = parse_input(f"chat:{folder / 'all.json'}", images=folder)
    assert prepare([named], tmp_path / "out").num_samples == 1


def test_nothing_usable_is_an_error_and_the_folder_stays_usable(tmp_path):
    spec = make_captions(tmp_path / "coco", 4)
    (tmp_path / "empty").mkdir()
    wrong = parse_input(spec.path, images=tmp_path / "empty")
    with pytest.raises(
        DataError, match=r"no sample among 4 items.*image file missing \(4 times\), for instance 0: .*0\.jpg"
    ):
        prepare([wrong], tmp_path / "out")
    assert prepare([spec], tmp_path / "out").num_samples == 4


def test_a_run_that_skips_nearly_everything_stops_early(tmp_path):
    spec = make_captions(tmp_path / "coco", 3000, missing=range(10, 3000))
    seen = []
    with pytest.raises(DataError, match="990 of 1000 items were skipped"):
        prepare([spec], tmp_path / "out", on_progress=lambda report: seen.append(report.num_skipped))
    assert len(seen) == 999


# ------------------------------------------------------------------ a disk that fills up


def test_a_file_that_cannot_grow_ends_in_one_line_and_the_run_resumes_later(tmp_path):
    """The limit on a file's size is met as a full disk is: in the middle of writing."""
    make_files(tmp_path / "photos", 40)
    arguments = {
        "inputs": [str(tmp_path / "photos")],
        "options": {"samples_per_shard": 20},
        "out": str(tmp_path / "out"),
    }
    (tmp_path / "photos" / "000030.jpg").write_bytes(make_jpeg() + bytes(3_000_000))
    process = start(["prlimit", "--fsize=2000000"], **arguments)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith("user error: ")
    assert "no space left after 1 complete shards" in errors
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00000.tar", "prepare.json"]
    prepare([parse_input(arguments["inputs"][0])], tmp_path / "out", PrepareOptions(samples_per_shard=20))
    prepare([parse_input(arguments["inputs"][0])], tmp_path / "whole", PrepareOptions(samples_per_shard=20))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_full_disk_leaves_complete_shards_only_and_the_run_resumes(tmp_path):
    """A small file system of its own, where this user may mount one."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    make_files(tmp_path / "photos", 60)
    (tmp_path / "disk").mkdir()
    arguments = {
        "inputs": [str(tmp_path / "photos")],
        "options": {"samples_per_shard": 10, "resize_longest": 4096},
        "out": str(tmp_path / "disk" / "out"),
    }
    run = f'"{sys.executable}" -c "$SCRIPT" "{TESTS.parent}" "$ARGUMENTS"'
    script = f"""
    cd {tmp_path} && mount -t tmpfs -o size=200k tmpfs disk || exit 77
    {run}; echo "status $?"; ls -A disk/out
    mount -o remount,size=50m disk
    {run}; echo "status $?"; cp -a disk/out copy
    """
    environment = {**os.environ, "SCRIPT": SCRIPT, "ARGUMENTS": json.dumps(arguments)}
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("needs a mount namespace")
    lines = done.stdout.split("\n")
    assert "no space left after" in done.stderr
    assert lines[0] == "status 1"
    listed = lines[1 : lines.index("status 0")]
    assert listed[-1] == "prepare.json"
    assert 1 <= len(listed) - 1 < 6
    assert all(name.endswith(".tar") and not name.startswith(".") for name in listed[:-1])
    prepare(
        [parse_input(str(tmp_path / "photos"))],
        tmp_path / "whole",
        PrepareOptions(samples_per_shard=10, resize_longest=4096),
    )
    assert contents(tmp_path / "copy") == contents(tmp_path / "whole")


# ------------------------------------------------------------------ real data


def test_real_photos_survive_the_way_from_loose_files_to_shards(tmp_path):
    root = os.environ.get("SACCADE_DATA")
    if not root:
        pytest.skip("needs SACCADE_DATA, a folder with flickr8k/val-00000.tar")
    with tarfile.open(Path(root) / "flickr8k" / "val-00000.tar") as tar:
        tar.extractall(tmp_path / "photos", filter="data")
    report = prepare([parse_input(str(tmp_path / "photos"))], tmp_path / "out", PrepareOptions(samples_per_shard=400))
    assert report.num_skipped == 0
    written = samples_of(tmp_path / "out")
    assert Counter(name for name, _ in written) == {"00000.tar": 400, "00001.tar": 400, "00002.tar": 200}
    for sample in written.values():
        key = description(sample)["id"]
        assert sample.members["jpg"] == (tmp_path / "photos" / f"{key}.jpg").read_bytes()
        assert len(texts(sample)) == 5
