"""The index lists what is in the tars, detects changes, survives crashes, and opens at once at any size."""

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from data.making import (
    MAKERS,
    begin_of,
    encode,
    fatal_measure,
    make_avif,
    make_jpeg,
    make_picture,
    make_sample,
    make_shards,
    make_tiff,
    measure_words,
    read_samples,
    with_orientation,
    write_samples,
    write_synthetic_index,
    write_tar,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from saccade.data.decisions import decided, finish_decisions, write_decisions
from saccade.data.header import upright_size
from saccade.data.index import open_index
from saccade.data.index_builder import SCHEMA, build_index
from saccade.data.lengths import Lengths
from saccade.data.sample import Sample
from saccade.errors import ConfigError, DataError, ImageError
from saccade.processor.image import FORMATS, MediaLimits, load_image

MARKS = {"messages": [{"role": "user", "content": "<image><image>"}, {"role": "assistant", "content": "x"}]}


def one_shard(folder, samples):
    write_samples(folder / "00000.tar", samples)
    return open_index(folder, num_workers=1)


def error_of(folder, members):
    return one_shard(folder, [Sample("k", "s", members)]).read(0)["error"][0].as_py()


# ------------------------------------------------------------------ what a row says


def test_a_row_has_offsets_sizes_and_metadata_of_its_members(tmp_path):
    sample = make_sample(
        "0001", width=120, height=80, text="zwei Wörter", fields={"license": "cc-by", "source": "laion"}
    )
    index = one_shard(tmp_path, [make_sample("0000"), sample])
    table = index.read(0)
    assert table.schema.equals(SCHEMA)
    row = table.to_pylist()[1]
    with tarfile.open(tmp_path / "00000.tar") as tar:
        places = {member.name: member for member in tar}
    assert row == {
        "key": "0001",
        "names": ["jpg", "json", "txt"],
        "offsets": [places[f"0001.{name}"].offset_data for name in ("jpg", "json", "txt")],
        "sizes": [len(data) for data in sample.members.values()],
        "checksum": xxhash.xxh3_128(b"".join(sample.members.values())).digest(),
        "widths": [120],
        "heights": [80],
        "text_bytes": len("zwei Wörter".encode()),
        "source": "laion",
        "licence": "cc-by",
        "error": None,
    }
    assert json.loads((tmp_path / "index" / "shards.json").read_text()) == {
        "version": 1,
        "shards": [{"name": "00000.tar", "bytes": 20480, "num_samples": 2, "num_errors": 0}],
    }


def test_the_source_falls_back_to_the_folders_name_and_images_keep_their_order(tmp_path):
    members = {f"{n}.jpg": make_jpeg(32 + n, 40, n) for n in (0, 1, 10, 2)} | {"txt": b"x", "json": b'{"licence": " "}'}
    index = one_shard(tmp_path / "my set", [Sample("k", "s", members)])
    row = index.read(0).to_pylist()[0]
    assert (row["source"], row["licence"]) == ("my set", None)
    assert row["names"] == ["0.jpg", "1.jpg", "10.jpg", "2.jpg", "txt", "json"]
    assert row["widths"] == [32, 33, 34, 42]


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"xyz": b"?"}, "no text"),
        ({"jpg": make_jpeg()}, "no text"),
        ({"jpg": b"\xff\xd8\xff\xe0 no header", "txt": b"x"}, "jpg: the header cannot be read"),
        ({"jpg": b"", "txt": b"x"}, "jpg: not an image in a supported format (JPEG, PNG, WEBP, GIF, BMP, TIFF"),
        ({"jpg": b"<html>404</html>", "txt": b"x"}, "jpg: not an image in a supported format"),
        ({"jpg": make_jpeg(), "json": b"{"}, "the json member cannot be read"),
        ({"jpg": make_jpeg(), "json": json.dumps(MARKS).encode()}, "2 <image> marks and 1 images"),
        ({"jpg": make_jpeg(), "txt": b"\xff"}, "the txt member is not UTF-8"),
    ],
)
def test_a_sample_that_cannot_be_used_says_why_and_is_never_kept(tmp_path, members, error):
    write_samples(tmp_path / "00000.tar", [make_sample("a"), Sample("b", "s", members), make_sample("c")])
    index = open_index(tmp_path, num_workers=1)
    row = index.read(0).to_pylist()[1]
    assert row["error"].startswith(error)
    assert index.kept(0).tolist() == [0, 2]
    assert index.kept_sizes.tolist() == [2]
    assert index.sizes.tolist() == [3]
    assert len(index) == 3


def test_animated_pictures_are_errors_as_they_are_for_the_processor(tmp_path):
    frames = [make_picture(seed=number) for number in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
        with pytest.raises(ImageError, match="animated"):
            upright_size(data)
        with pytest.raises(ImageError, match="animated"):
            load_image(data, MediaLimits())


def test_keys_that_are_not_adjacent_and_members_that_repeat_are_errors(tmp_path):
    jpeg = make_jpeg()
    files = [("a.jpg", jpeg), ("a.txt", b"x"), ("b.jpg", jpeg), ("b.txt", b"x"), ("a.json", b'{"caption": "y"}')]
    write_tar(tmp_path / "00000.tar", [*files, ("c.txt", b"x"), ("c.TXT", b"y"), ("README", b""), ("._d.jpg", b"")])
    index = open_index(tmp_path, num_workers=1)
    assert index.read(0).select(["key", "error"]).to_pylist() == [
        {"key": "a", "error": None},
        {"key": "b", "error": None},
        {"key": "a", "error": "key appears twice, not adjacent"},
        {"key": "c", "error": "member txt appears twice"},
    ]


# ------------------------------------------------------------------ upright sizes


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_sizes_are_those_of_the_upright_picture(make, orientation):
    data = make(96, 64, 0, orientation=orientation)
    height, width, _ = load_image(data, MediaLimits()).shape
    assert upright_size(data) == (width, height)
    assert (width, height) == ((64, 96) if orientation in (5, 6, 7, 8) else (96, 64))


def test_a_sample_may_have_tiff_and_avif_images(tmp_path):
    members = {
        f"{number}.{name}": make(60, 40)
        for number, (name, make) in enumerate([("tif", make_tiff), ("tiff", make_tiff), ("avif", make_avif)])
    }
    if "AVIF" not in FORMATS:
        del members["2.avif"]
    index = one_shard(tmp_path, [Sample("a", "s", members | {"txt": b"a caption"})])
    row = index.read(0).to_pylist()[0]
    assert (row["error"], row["widths"], row["heights"]) == (None, [60] * len(members), [40] * len(members))


def unusual_pictures():
    picture = make_picture(70, 40)
    text = PngImagePlugin.PngInfo()
    text.add_text("Software", "a scanner")
    xmp = PngImagePlugin.PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<rdf tiff:Orientation="6"/>')
    profile = PngImagePlugin.PngInfo()
    profile.add_text("Raw profile type exif", "\nexif\n 1\n" + with_orientation(8).tobytes().hex())
    adobe = b'<x:xmpmeta><rdf tiff:Orientation="8"/></x:xmpmeta>'
    return {
        "grey": encode(picture.convert("L"), "JPEG"),
        "cmyk": encode(picture.convert("CMYK"), "JPEG"),
        "progressive": encode(picture, "JPEG", progressive=True),
        "turned by XMP": encode(picture, "JPEG", xmp=adobe),
        "EXIF before XMP": encode(picture, "JPEG", xmp=adobe, exif=with_orientation(1)),
        "EXIF without orientation": encode(picture, "JPEG", exif=Image.Exif().tobytes()),
        "colour profile": encode(picture, "JPEG", icc_profile=bytes(70_000)),
        "stereo": encode(picture, "MPO", save_all=True, append_images=[picture]),
        "palette": encode(picture.convert("P"), "PNG"),
        "png text": encode(picture, "PNG", pnginfo=text),
        "png turned by XMP": encode(picture, "PNG", pnginfo=xmp),
        "png turned by a text": encode(picture, "PNG", pnginfo=profile),
        "gif": encode(picture, "GIF"),
        "bmp": encode(picture, "BMP"),
        "pages of a tiff": encode(picture, "TIFF", save_all=True, append_images=[make_picture(20, 30)]),
        "tiff of 16 bits": encode(Image.fromarray(np.arange(2800, dtype=np.uint16).reshape(40, 70)), "TIFF"),
        "transparent webp": encode(picture.convert("RGBA"), "WEBP", lossless=True),
    }


@pytest.mark.parametrize("name", unusual_pictures())
def test_unusual_pictures_are_measured_as_the_processor_sees_them(name):
    data = unusual_pictures()[name]
    height, width, _ = load_image(data, MediaLimits()).shape
    assert upright_size(data) == (width, height)


@pytest.mark.filterwarnings("ignore")  # Pillow warns about damaged metadata
@settings(deadline=None, derandomize=True, max_examples=250)
@given(
    where=st.integers(2, 400),
    noise=st.binary(min_size=1, max_size=4),
    kind=st.sampled_from(MAKERS),
    orientation=st.sampled_from([None, 6]),
)
def test_a_damaged_header_is_an_image_error_or_agrees_with_the_processor(where, noise, kind, orientation):
    data = kind(48, 32, 0, orientation=orientation)
    data = data[:where] + noise + data[where + len(noise) :]
    try:
        size = upright_size(data)
    except ImageError:
        return
    try:
        height, width, _ = load_image(data, MediaLimits()).shape
    except ImageError:
        return  # pixels are not the index's business
    assert size == (width, height)


# ------------------------------------------------------------------ building


def test_workers_and_one_process_build_the_same_index(tmp_path):
    make_shards(tmp_path / "a", 4, 5)
    make_shards(tmp_path / "b", 4, 5)
    seen = []
    report = build_index(tmp_path / "a", num_workers=2, on_progress=seen.append)
    build_index(tmp_path / "b", num_workers=1)
    assert (report.num_shards, report.num_scanned, report.num_samples, report.num_errors) == (4, 4, 20, 0)
    assert report.num_bytes == sum(path.stat().st_size for path in (tmp_path / "a").glob("*.tar"))
    assert [progress.num_done for progress in seen] == [1, 2, 3, 4]
    assert (seen[-1].num_shards, seen[-1].num_samples, seen[-1].num_bytes) == (4, 20, report.num_bytes)
    a, b = open_index(tmp_path / "a", build=False), open_index(tmp_path / "b", build=False)
    assert a.fingerprint == b.fingerprint
    assert all(a.read(shard).equals(b.read(shard)) for shard in range(4))


def test_a_build_that_was_killed_resumes_and_scans_no_shard_twice(tmp_path):
    make_shards(tmp_path, 4, 3)
    script = """
import os, sys
from saccade.data.index_builder import build_index
def die(done):
    if done.num_done == 2:
        os.kill(os.getpid(), 9)
build_index(sys.argv[1], num_workers=1, on_progress=die)
"""
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "index" / "shards.json").exists()
    report = build_index(tmp_path, num_workers=1)
    assert (report.num_shards, report.num_scanned, report.num_samples) == (4, 2, 12)
    assert build_index(tmp_path, num_workers=1).num_scanned == 0
    assert not [path for path in (tmp_path / "index").iterdir() if path.name.startswith(".")]


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    make_shards(tmp_path, 12, 2)
    script = """
import sys
from data.making import slow_measure
from saccade.data.index import open_index
from saccade.data.lengths import Lengths
if __name__ == "__main__":
    lengths = Lengths(open_index(sys.argv[1], num_workers=1), "f")
    lengths.build(slow_measure, num_workers=2, on_progress=lambda done: print(flush=True))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", script, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    parent.stdout.readline()  # workers are at work
    parent.kill()
    parent.wait()
    rest = parent.stdout.read()  # ends when the last process that inherited it has ended
    parent.stdout.close()
    assert len(rest) < 10
    deadline = time.monotonic() + 120
    while group_lives(parent.pid):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)


def test_added_changed_and_removed_shards_are_detected_on_opening(tmp_path):
    make_shards(tmp_path, 2, 3)
    first = open_index(tmp_path, num_workers=1)
    assert build_index(tmp_path, num_workers=1).num_scanned == 0
    write_samples(tmp_path / "00001.tar", [make_sample(f"{n}") for n in range(9)])
    write_samples(tmp_path / "00002.tar", [make_sample("new")])
    with pytest.raises(DataError, match=r"2 of 3 shards .*00001\.tar, 00002\.tar.*saccade data index"):
        open_index(tmp_path, build=False)
    with pytest.raises(DataError, match="differs from its checksum"):
        first.read_sample(1, 0, verify=True)
    second = open_index(tmp_path, num_workers=1)
    assert second.sizes.tolist() == [3, 9, 1]
    assert second.fingerprint != first.fingerprint
    (tmp_path / "00000.tar").unlink()
    third = open_index(tmp_path, build=False)
    assert third.shards == ["00001.tar", "00002.tar"]
    (tmp_path / "index" / "00002.parquet").unlink()
    assert open_index(tmp_path, num_workers=1).read(1)["key"].to_pylist() == ["new"]


def test_some_shards_of_a_folder_share_its_index(tmp_path):
    make_shards(tmp_path, 4, 2)
    some = open_index(f"{tmp_path}/{{00001..00002}}.tar", num_workers=1)
    assert some.shards == ["00001.tar", "00002.tar"]
    assert build_index(tmp_path, num_workers=1).num_scanned == 2
    build_index(tmp_path / "00000.tar", num_workers=1)
    assert open_index(tmp_path, build=False).shards == [f"{n:05d}.tar" for n in range(4)]
    assert open_index(tmp_path / "*3.tar", build=False, check_files=False).shards == ["00003.tar"]


def test_a_truncated_shard_gives_its_complete_samples_and_says_where_it_was_cut(tmp_path, caplog):
    make_shards(tmp_path, 2, 6)
    whole = open_index(tmp_path, num_workers=1).read(0).to_pylist()
    cut = whole[3]["offsets"][1] + 5
    os.truncate(tmp_path / "00000.tar", cut)
    caplog.set_level("WARNING")
    report = build_index(tmp_path, num_workers=1)
    assert report.damaged == {"00000.tar": f"truncated at byte {cut}"}
    assert f"00000.tar: truncated at byte {cut}" in caplog.text
    index = open_index(tmp_path, build=False)
    assert index.sizes.tolist() == [3, 6]
    assert index.read(0).to_pylist() == whole[:3]
    entry = json.loads((tmp_path / "index" / "shards.json").read_text())["shards"][0]
    assert entry["damage"] == f"truncated at byte {cut}"
    assert [index.read_sample(0, row, verify=True).key for row in range(3)] == [row["key"] for row in whole[:3]]


def test_a_damaged_shard_resynchronises_and_the_index_says_what_was_lost(tmp_path, caplog):
    make_shards(tmp_path, 1, 8)
    path = tmp_path / "00000.tar"
    fourth = begin_of(open_index(tmp_path, num_workers=1), 0, 3) - 512
    data = bytearray(path.read_bytes())
    data[fourth : fourth + 512] = b"\xff" * 512
    path.write_bytes(bytes(data) + bytes(512))  # another size, so that it is indexed again
    report = build_index(tmp_path, num_workers=1)
    index = open_index(tmp_path, build=False)
    damage = index.damaged["00000.tar"]
    resumed = int(re.fullmatch(rf"no tar header at byte {fourth}, resumed at byte (\d+)", damage)[1])
    assert report.damaged == index.damaged
    assert report.lost_bytes == index.lost_bytes == resumed - fourth > 0
    assert f"{index.lost_bytes} bytes lost" in caplog.text
    keys = index.read(0, ["key"])["key"].to_pylist()
    assert keys == [f"00000{number:04d}" for number in (0, 1, 4, 5, 6, 7)], "those next to the damage may lack members"
    assert all(row["error"] is None for row in index.read(0).to_pylist())
    listed = json.loads((tmp_path / "index" / "shards.json").read_text())
    assert listed["shards"][0]["lost_bytes"] == index.lost_bytes


def test_errors_name_unsupported_formats_and_hold_no_memory_addresses(tmp_path):
    heic = b"\0\0\0\x1cftypheic" + bytes(60)
    members = [
        {"heic": heic},
        {"0.jpg": make_jpeg(), "1.jxl": b"?"},
        {"jpg": heic},
        {"png": b"x" * 99},
        {"gif": b"GIF89a" + b"\0" * 9},
    ]
    samples = [Sample(f"k{number}", "s", {**each, "txt": b"a caption"}) for number, each in enumerate(members)]
    write_samples(tmp_path / "00000.tar", samples)
    errors = [row["error"] for row in open_index(tmp_path, num_workers=1).read(0).to_pylist()]
    assert errors[0] == "heic: HEIC images are not supported. Convert to JPEG, PNG or WebP"
    assert errors[1] == "1.jxl: JXL images are not supported. Convert to JPEG, PNG or WebP"
    assert errors[2].startswith("jpg: HEIF images are not supported")
    assert errors[3].startswith("png: not an image in a supported format")
    assert not any("0x" in error for error in errors)


def test_garbage_behind_samples_is_damage_too(tmp_path):
    make_shards(tmp_path, 1, 3)
    path = tmp_path / "00000.tar"
    data = path.read_bytes()
    third = begin_of(open_index(tmp_path, num_workers=1), 0, 2) - 512
    path.write_bytes(data[:third] + random.Random(0).randbytes(5000))
    assert build_index(tmp_path, num_workers=1).damaged == {"00000.tar": f"no tar header at byte {third}"}
    assert open_index(tmp_path).sizes.tolist() == [1]  # the second may have gone on in the garbage


@pytest.fixture
def open_to_all():
    """A folder that other users may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        for inner in Path(folder).glob("*/set/**/"):
            inner.chmod(0o755)


def test_a_folder_that_cannot_be_written_gets_its_index_in_the_cache(open_to_all):
    tmp_path = open_to_all
    make_shards(tmp_path / "a" / "set", 2, 3)
    make_shards(tmp_path / "b" / "set", 2, 3)
    build_index(tmp_path / "b" / "set", num_workers=1)
    make_shards(tmp_path / "c", 1, 1)
    script = """
import os, sys
from saccade.data.index import open_index
from saccade.data.storage import StorageConfig
open_index(sys.argv[1] + "/c", num_workers=1).read_sample(0, 0)  # imports what it needs while it may
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
for name in "ab":
    index = open_index(sys.argv[1] + f"/{name}/set", num_workers=1, config=StorageConfig(cache_folder=sys.argv[2]))
    assert len(index.kept(1)) == 3 and index.source == "set", name
    print(index.folder)
"""
    cache = tmp_path / "cache"
    cache.mkdir()
    for folder in tmp_path.glob("*/set/**/"):
        folder.chmod(0o555)
    cache.chmod(0o777)
    run = subprocess.run([sys.executable, "-c", script, tmp_path, cache], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert all(folder.startswith(str(cache / "shards")) for folder in run.stdout.split())
    assert not (tmp_path / "a" / "set" / "index").exists()
    built = {path.parent.name: path for path in cache.glob("shards/*/shards.json")}
    assert len(built) == 1  # the second folder's own index was used


def test_damaged_or_newer_index_files_say_what_to_do(tmp_path):
    make_shards(tmp_path, 1, 2)
    open_index(tmp_path, num_workers=1)
    (tmp_path / "index" / "00000.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="Run saccade data index"):
        open_index(tmp_path).read(0)
    (tmp_path / "index" / "shards.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(DataError, match="version 2, only 1 is read"):
        open_index(tmp_path)
    (tmp_path / "index" / "shards.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        open_index(tmp_path)


def test_a_full_disk_while_indexing_is_one_clear_error(tmp_path):
    make_shards(tmp_path, 2, 30)
    script = """
import resource, sys
from saccade.data.index_builder import build_index
from saccade.errors import DataError
sys.dont_write_bytecode = True  # it would be cut off, and stay
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))  # a write beyond fails, as on a full disk
try:
    build_index(sys.argv[1], num_workers=1)
except DataError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "00000.parquet: cannot be written" in run.stdout, run.stderr
    assert list((tmp_path / "index").iterdir()) == []
    assert build_index(tmp_path, num_workers=1).num_samples == 60


def test_an_index_of_a_hundred_million_samples_opens_at_once(tmp_path):
    write_synthetic_index(tmp_path)
    begin = time.process_time()
    index = open_index(tmp_path, check_files=False)
    assert len(index) == int(index.kept_sizes.sum()) == 100_000_000
    assert len(index.fingerprint) == 16
    assert time.process_time() - begin < 10, "100 ns a sample: none was looked at"
    assert len(index.kept(7_123)) == 10_000
    assert len(pickle.dumps(index)) < 3_000_000


# ------------------------------------------------------------------ reading samples


def test_samples_come_back_byte_for_byte_in_any_order(tmp_path):
    samples = [make_sample(f"{n:03d}", seed=n, num_images=1 + n % 3, source=f"s{n % 2}") for n in range(12)]
    index = one_shard(tmp_path, samples)
    assert read_samples(index, 0, range(12), verify=True) == samples
    assert read_samples(index, 0, [7, 2, 11]) == [samples[7], samples[2], samples[11]]
    data = (tmp_path / "00000.tar").read_bytes()
    for row, sample in zip(index.read(0, ["names", "offsets", "sizes"]).to_pylist(), samples, strict=True):
        members = zip(row["names"], row["offsets"], row["sizes"], strict=True)
        assert {name: data[offset : offset + size] for name, offset, size in members} == sample.members


def test_a_pickled_index_reads_the_same(tmp_path):
    index = open_index(make_shards(tmp_path, 2, 3), num_workers=1)
    index.read_sample(0, 0)
    copy = pickle.loads(pickle.dumps(index))
    assert copy.fingerprint == index.fingerprint
    assert read_samples(copy, 1, range(3)) == read_samples(index, 1, range(3))
    assert copy.kept_sizes.tolist() == [3, 3]


def test_bytes_that_changed_are_found_by_their_checksum(tmp_path):
    index = one_shard(tmp_path, [make_sample("a"), make_sample("b")])
    path, place = tmp_path / "00000.tar", begin_of(index, 0, 1) + 100
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    assert index.read_sample(0, 1) != make_sample("b")
    assert index.read_sample(0, 0, verify=True) == make_sample("a")
    with pytest.raises(DataError, match=r"00000\.tar: sample b differs from its checksum"):
        index.read_sample(0, 1, verify=True)


def test_a_shard_cut_after_it_was_indexed_is_an_error_with_all_the_numbers(tmp_path):
    index = one_shard(tmp_path, [make_sample("a"), make_sample("b")])
    row = index.read(0, ["offsets", "sizes"]).slice(1, 1).to_pylist()[0]
    size = row["offsets"][-1] + row["sizes"][-1] - row["offsets"][0]
    os.truncate(tmp_path / "00000.tar", row["offsets"][0] + 10)
    assert index.read_sample(0, 0, verify=True)
    with pytest.raises(DataError, match=rf"sample b: .*00000\.tar: expected {size} bytes at \d+, the file has \d+"):
        index.read_sample(0, 1)


# ------------------------------------------------------------------ decisions


def decide(index, shard, keep):
    reasons = pa.array([None if k else "blurred" for k in keep], pa.string())
    return write_decisions(index, shard, pa.table({"keep": keep, "reason": reasons, "score": [0.5] * len(keep)}))


def test_decisions_are_valid_once_they_are_finished(tmp_path):
    folder = make_shards(tmp_path, 2, 3)
    write_samples(folder / "00001.tar", [make_sample("a"), Sample("b", "s", {"jpg": b"bad"}), make_sample("c")])
    index = open_index(folder, num_workers=1)
    assert index.decisions(0) is None
    assert index.kept_sizes.tolist() == [3, 2]
    assert decide(index, 0, [True, False, True]) == 2
    assert decided(index) == {"00000.tar": 2}
    with pytest.raises(DataError, match=r"curation was not finished.*saccade data curate"):
        _ = open_index(folder).kept_sizes
    with pytest.raises(DataError, match=r"1 shards have no decisions: 00001\.tar"):
        finish_decisions(index, settings={}, counts={})
    assert decide(index, 1, [False, True, True]) == 1  # the damaged one is not kept whatever is decided
    finish_decisions(index, settings={"min_score": 0.1}, counts={"blurred": 2})
    assert json.loads((folder / "index" / "decisions" / "summary.json").read_text()) == {
        "version": 1,
        "settings": {"min_score": 0.1},
        "kept": {"00000.tar": 2, "00001.tar": 1},
        "bytes": {file.name: file.num_bytes for file in index.files},
        "counts": {"blurred": 2},
    }
    for each in (index, open_index(folder), pickle.loads(pickle.dumps(index))):
        assert each.kept_sizes.tolist() == [2, 1]
        assert [each.kept(shard).tolist() for shard in (0, 1)] == [[0, 2], [2]]
        assert each.decisions(0)["reason"].to_pylist() == [None, "blurred", None]


def test_decisions_about_other_tars_are_refused(tmp_path):
    folder = make_shards(tmp_path, 2, 3)
    index = open_index(folder, num_workers=1)
    for shard in (0, 1):
        decide(index, shard, [True, True, False])
    finish_decisions(index, settings={}, counts={})
    write_samples(folder / "00001.tar", [make_sample(f"{n}") for n in range(9)])
    changed = open_index(folder, num_workers=1)
    with pytest.raises(DataError, match=r"1 shards were added or changed after curation \(00001\.tar\)"):
        _ = changed.kept_sizes
    assert changed.kept(0).tolist() == [0, 1]
    with pytest.raises(DataError, match=r"00001\.tar"):
        changed.kept(1)
    with pytest.raises(
        DataError, match=r"9 rows with keep \(bool\) and reason \(string\), not 2 rows with keep \(int64\)"
    ):
        write_decisions(changed, 1, pa.table({"keep": [1, 0]}))


# ------------------------------------------------------------------ lengths


def shards_with_lines(folder):
    for shard in range(2):
        samples = [make_sample(f"{n}", text="\n".join(["one two"] * (1 + n % 3)), seed=n) for n in range(5)]
        write_samples(folder / f"{shard:05d}.tar", [*samples, Sample("bad", "s", {"jpg": b"bad"})])
    return open_index(folder, num_workers=1)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_lengths_are_measured_for_every_row_and_refusals_are_kept_as_errors(tmp_path, num_workers):
    index = shards_with_lines(tmp_path)
    with pytest.raises(DataError, match="saccade data measure"):
        Lengths(index, "abc").of_shard(0)
    seen = []
    assert Lengths(index, "abc").build(measure_words, num_workers=num_workers, on_progress=seen.append) == 2
    assert [progress.num_done for progress in seen] == [1, 2]
    assert seen[-1].num_samples == 12
    tokens, patches = Lengths(index, "abc").of_shard(1)
    assert [tokens[row].tolist() for row in range(len(tokens))] == [[2], [2, 2], [2, 2, 2], [], [2, 2], []]
    jpegs = [len(index.read_sample(1, row).members["jpg"]) // 100 for row in range(5)]
    assert patches.tolist() == [*jpegs[:3], 0, jpegs[4], 0]
    assert tokens.counts(np.array([1, 3, 4])).tolist() == [2, 0, 2]
    assert tokens.select(np.array([0, 2, 3]), 7).tolist() == [2, 2, 0]
    errors = pq.read_table(tmp_path / "index" / "lengths-abc" / "00001.parquet")["error"].to_pylist()
    assert errors[3] == "too tall"
    assert errors[5].startswith("jpg: not an image in a supported format")
    assert pq.read_schema(tmp_path / "index" / "lengths-abc" / "00001.parquet").names == ["tokens", "patches", "error"]


def test_measuring_resumes_where_it_stopped_and_detects_changed_tars(tmp_path):
    index = shards_with_lines(tmp_path)

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lengths(index, "abc").build(measure_words, num_workers=1, on_progress=stop)
    assert len(Lengths(index, "abc").missing()) == 1
    assert Lengths(index, "abc").build(measure_words, num_workers=1) == 1
    assert Lengths(index, "abc").build(measure_words, num_workers=1) == 0
    write_samples(tmp_path / "00000.tar", [make_sample(f"{n}", width=200, height=200) for n in range(9)])
    changed = open_index(tmp_path, num_workers=1)
    assert Lengths(changed, "abc").missing() == [0]
    with pytest.raises(DataError, match=r"made for another 00000\.tar"):
        Lengths(changed, "abc").of_shard(0)
    assert Lengths(changed, "abc").build(measure_words, num_workers=1) == 1
    assert len(Lengths(changed, "abc").of_shard(0)[0]) == 9


def test_machines_that_measure_one_folder_at_once_share_the_work(tmp_path):
    make_shards(tmp_path, 4, 2)
    index, others = open_index(tmp_path, num_workers=1), []

    def another_machine(progress):
        if not others:
            others.append(Lengths(open_index(tmp_path), "abc").build(measure_words, num_workers=1))

    assert Lengths(index, "abc").build(measure_words, num_workers=1, on_progress=another_machine) == 1
    assert others == [3]
    assert Lengths(index, "abc").missing() == []


def test_a_bug_in_a_measure_is_not_reported_as_a_bad_sample(tmp_path):
    index = shards_with_lines(tmp_path)
    with pytest.raises(ZeroDivisionError):
        Lengths(index, "abc").build(lambda sample: ([1], 1 // 0), num_workers=1)
    with pytest.raises(ConfigError, match="cannot be a fingerprint"):
        Lengths(index, "../x").build(measure_words, num_workers=1)


def test_a_worker_that_dies_is_one_clear_error(tmp_path):
    index = shards_with_lines(tmp_path)
    with pytest.raises(DataError, match="worker process exited unexpectedly"):
        Lengths(index, "abc").build(fatal_measure, num_workers=2)


def test_parts_of_a_folder_are_curated_by_themselves(tmp_path):
    folder = make_shards(tmp_path, 3, 2)
    part, other = open_index(folder / "{00000..00001}.tar"), open_index(folder / "00002.tar")
    for shard in (0, 1):
        decide(part, shard, [True, False])
    finish_decisions(part, settings={}, counts={"blurred": 2})
    assert open_index(folder / "00002.tar").kept_sizes.tolist() == [2]  # nothing was decided on it
    with pytest.raises(DataError, match=r"00002\.tar.*saccade data curate"):
        _ = open_index(folder).kept_sizes
    decide(other, 0, [False, True])
    finish_decisions(other, settings={}, counts={"blurred": 1})
    assert open_index(folder).kept_sizes.tolist() == [1, 1, 1]
