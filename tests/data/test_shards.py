"""Shards are found by any path, scanned as tarfile scans them, read exactly, written whole."""

import io
import os
import random
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
from data.making import make_jpeg, make_sample, make_shards, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.lru_cache import LRUCache, OpenFile
from saccade.data.sample import Sample
from saccade.data.shards import ShardFile, ShardWriter, list_shards, read_range, samples, window
from saccade.data.tar import Gap, Member, Window, members
from saccade.errors import ConfigError, DataError

repeatable = settings(deadline=None, derandomize=True, max_examples=60)


def file_of(path):
    return ShardFile(str(path), Path(path).name, Path(path).stat().st_size)


def scan_bytes(data, window_bytes=1 << 20):
    return list(members(Window(lambda offset, size: data[offset : offset + size], len(data), window_bytes)))


def by_tarfile(data):
    """Names, offsets and sizes of the regular files, as Python's own reader finds them."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(m.name, m.offset_data, m.size) for m in tar if m.isreg() and not m.issparse()]


# ------------------------------------------------------------------ finding


def test_folders_globs_braces_and_single_tars_are_listed_in_order(tmp_path):
    for name in ("train-00002.tar", "train-00000.tar", "train-00001.tar", "val-00000.tar", ".hidden.tar", "notes.txt"):
        write_tar(tmp_path / name, [("a.txt", b"x")])
    names = lambda path: [file.name for file in list_shards(path)]  # noqa: E731
    train = [f"train-{number:05d}.tar" for number in range(3)]
    assert names(tmp_path) == [*train, "val-00000.tar"]
    assert names(f"{tmp_path}/") == names(f"file://{tmp_path}") == names(tmp_path)
    assert names(tmp_path / "train-*.tar") == train
    assert names(f"{tmp_path}/train-{{00000..00002}}.tar") == train
    assert names(f"{tmp_path}/{{train,val}}-{{00000..00000}}.tar") == ["train-00000.tar", "val-00000.tar"]
    assert names(tmp_path / "val-00000.tar") == ["val-00000.tar"]
    (file,) = list_shards(tmp_path / "val-00000.tar")
    assert file == ShardFile(str(tmp_path / "val-00000.tar"), "val-00000.tar", 10240)


def test_relative_paths_are_valid_in_other_folders(tmp_path, monkeypatch):
    make_shards(tmp_path / "set", 1, 1)
    monkeypatch.chdir(tmp_path)
    (file,) = list_shards("set")
    monkeypatch.chdir("/")
    assert read_range(file, 257, 5) == b"ustar"


def test_invalid_paths_say_what_is_wrong(tmp_path):
    make_shards(tmp_path / "set", 2, 1)
    (tmp_path / "empty").mkdir()
    for path, message in {
        tmp_path / "nowhere": "No such file or directory",
        tmp_path / "empty": "no tar files",
        f"{tmp_path}/set/{{00000..00003}}.tar": "2 shards are missing: 00002.tar, 00003.tar",
        f"{tmp_path}/s*/00000.tar": "wildcards in a folder's name",
        f"{tmp_path}/set/{{00000..00003}}": "ends in .tar",
        "nosuch://bucket/folder": "unknown storage scheme",
    }.items():
        with pytest.raises(DataError, match=message):
            list_shards(path)


# ------------------------------------------------------------------ scanning

paths = st.text(st.characters(codec="utf-8", exclude_characters="\0\ud800"), min_size=1, max_size=90).map(
    lambda text: text.strip("/") or "x"
)
long_paths = st.lists(paths, min_size=1, max_size=4).map(lambda parts: "/".join(parts)[:240].strip("/") or "y")


@repeatable
@given(
    files=st.lists(st.tuples(long_paths, st.binary(max_size=1500), st.sampled_from("ffffdsh")), max_size=8),
    format=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    window_bytes=st.sampled_from([512, 2000, 1 << 20]),
)
def test_scanning_finds_what_tarfile_finds_in_every_format(files, format, window_bytes):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, pax_headers={"comment": "global"}) as tar:
        for name, data, kind in [*files, ("last.txt", b"tarfile refuses an archive without files", "f")]:
            info = tarfile.TarInfo(name)
            info.mtime = 1.5 if format == tarfile.PAX_FORMAT else 1
            info.type = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "s": tarfile.SYMTYPE, "h": tarfile.LNKTYPE}[kind]
            info.size = len(data) if kind == "f" else 0
            info.linkname = name if kind in "sh" else ""
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # ustar has no room for some names
                assert format == tarfile.USTAR_FORMAT
    data = buffer.getvalue()
    assert [tuple(member) for member in scan_bytes(data, window_bytes)] == by_tarfile(data)


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar program")
def test_scanning_finds_what_the_tar_program_packed(tmp_path, format):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number:05d}.txt").write_bytes(os.urandom(number * 700))
    (folder / ("deep" * 12)).mkdir()
    (folder / ("deep" * 12) / f"{'name' * 9}.jpg").write_bytes(make_jpeg())
    os.link(folder / "00003.txt", folder / "00007.txt")
    (folder / "00008.txt").symlink_to("00001.txt")
    with (folder / "00009.bin").open("wb") as sparse:
        for place in range(0, 60):  # more holes than one header describes
            sparse.seek(place * 65536)
            sparse.write(b"data")
    (folder / "00010.txt").write_text("after the sparse file")
    options = ["--sparse"] if "gnu" in format or format == "posix" else []
    subprocess.run(["tar", "--format", format, *options, "-cf", tmp_path / "x.tar", "."], cwd=folder, check=True)
    data = (tmp_path / "x.tar").read_bytes()
    found = scan_bytes(data)
    assert [tuple(member) for member in found] == by_tarfile(data)
    for member in found:
        assert data[member.offset : member.offset + member.size] == (folder / member.name).read_bytes()


def test_large_sizes_are_read_from_gnu_numbers_and_pax_records():
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("huge.jpg")
        info.size = 9 * 2**30
        header = info.tobuf(format)
        data = header + bytes(10**6)
        window = Window(lambda offset, size, data=data: data[offset : offset + size], len(header) + 10 * 2**30)
        assert tuple(next(members(window))) == ("huge.jpg", len(header), info.size)


def test_names_that_are_no_utf8_are_escaped():
    info = tarfile.TarInfo("name.jpg")
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[0] = 0xFF
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    assert scan_bytes(bytes(header) + bytes(1024))[0].name == "\\xffame.jpg"


@repeatable
@given(cut=st.integers(0, 9000), seed=st.integers(0, 3))
def test_a_tar_cut_anywhere_gives_its_complete_files_and_says_where_it_was_cut(cut, seed):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(6):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = random.Random(seed * 10 + number).randrange(2000)
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    whole = buffer.getvalue()
    *_, (_, offset, size) = by_tarfile(whole)
    cut = min(cut, offset + size)
    scanned = members(Window(lambda offset, size: whole[:cut][offset : offset + size], cut))
    for expected in by_tarfile(whole):
        if expected[1] + expected[2] <= cut:
            assert tuple(next(scanned)) == expected
    (gap,) = scanned
    assert (gap.reason, gap.end) == (f"truncated at byte {cut}", cut)


@repeatable
@given(noise=st.binary(min_size=512, max_size=3000))
def test_garbage_is_never_taken_for_a_header(noise):
    info = tarfile.TarInfo("a.txt")
    data = info.tobuf() + noise
    if noise[:512] != bytes(512):
        assert scan_bytes(data)[1:] == [Gap(512, len(data), "no tar header at byte 512")]


def tar_of(names, size=700):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(random.Random(name).randbytes(size)))
    return buffer.getvalue()


@pytest.mark.parametrize("window_bytes", [600, 1 << 20])
@pytest.mark.parametrize("damage", ["header", "zeros", "cut out", "inserted"])
def test_a_damaged_tar_resynchronises_at_the_next_header(damage, window_bytes):
    names = [f"{number}.{extension}" for number in range(6) for extension in ("jpg", "txt")]
    whole = tar_of(names)
    third, fourth = (next(m.offset for m in scan_bytes(whole) if m.name == name) - 512 for name in ("2.jpg", "3.jpg"))
    data = {
        "header": whole[:third] + b"\xff" * 100 + whole[third + 100 :],
        "zeros": whole[:third] + bytes(fourth - third) + whole[fourth:],
        "cut out": whole[: third + 600] + whole[fourth:],
        "inserted": whole[:third] + b"\xff" * 777 + whole[third:],
    }[damage]
    found = scan_bytes(data, window_bytes)
    gaps = [entry for entry in found if isinstance(entry, Gap)]
    assert len(gaps) == 1
    assert third <= gaps[0].begin < gaps[0].end <= third + 2048 + 2 * (fourth - third)
    assert [entry.name for entry in found if isinstance(entry, Member)][-4:] == names[-4:]
    tar = Window(lambda offset, size: data[offset : offset + size], len(data), window_bytes)
    items = list(samples(tar, lambda _, member: tar.get(member.offset, member.size)))
    complete = [item for item in items if not isinstance(item, Gap)]
    keys = [key for key, _ in complete]
    assert keys[:1] == ["0"], "the sample before the damage may lack members"
    assert keys[-2:] == ["4", "5"]
    assert all([extension for extension, *_ in parts] == ["jpg", "txt"] for _, parts in complete), "no half samples"
    assert all(
        content == random.Random(member.name).randbytes(700) for _, parts in complete for _, member, content in parts
    )


def test_members_of_a_file_on_disk(tmp_path):
    path = make_shards(tmp_path, 1, 3) / "00000.tar"
    names = [member.name for member in members(window(file_of(path)))]
    assert names == [f"00000000{n}.{extension}" for n in range(3) for extension in ("jpg", "json", "txt")]


# ------------------------------------------------------------------ reading


def test_ranges_are_exact_and_a_file_that_shrank_is_an_error(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(bytes(range(256)) * 8)
    file = file_of(path)
    assert read_range(file, 250, 10) == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])
    assert read_range(file, 2048, 0) == b""
    os.truncate(path, 1000)
    with pytest.raises(DataError, match=r"x\.tar: expected 100 bytes at 950, the file has 1000.*saccade data index"):
        read_range(file, 950, 100)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        read_range(ShardFile(str(path), "x.tar", 1), 0, 1)


def test_few_files_stay_open_and_threads_never_read_from_a_closed_one(tmp_path):
    paths = [tmp_path / f"{number}.tar" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    files, wrong = LRUCache(4), []

    def read(seed):
        chosen = random.Random(seed)
        for _ in range(500):
            number = chosen.randrange(len(paths))
            path = str(paths[number])
            if files.get(path, lambda path=path: OpenFile.open(path)).read(10, 20) != bytes([number]) * 20:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(str(tmp_path) in os.path.realpath(link) for link in Path("/proc/self/fd").glob("*")) <= 4


def test_a_forked_child_reads_on_its_own(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(b"0123456789")
    assert read_range(file_of(path), 0, 3) == b"012"
    child = os.fork()
    if child == 0:
        os._exit(0 if read_range(file_of(path), 4, 3) == b"456" else 1)
    assert os.waitpid(child, 0)[1] == 0


# ------------------------------------------------------------------ writing


def members_of(path):
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def test_written_shards_hold_the_samples_in_order_and_respect_both_bounds(tmp_path):
    samples = [make_sample(f"{number:04d}", seed=number) for number in range(7)]
    with ShardWriter(tmp_path / "a", max_samples=3) as writer:
        for sample in samples:
            writer.write(sample)
        assert writer.finished == ["00000.tar", "00001.tar"]
        assert writer.num_pending == 1
    assert [len(members_of(file.url)) // 3 for file in list_shards(tmp_path / "a")] == [3, 3, 1]
    written = [each for file in list_shards(tmp_path / "a") for each in members_of(file.url)]
    assert written == [(f"{s.key}.{name}", data) for s in samples for name, data in s.members.items()]
    with ShardWriter(tmp_path / "b", max_bytes=20_000) as writer:
        for sample in samples:
            writer.write(sample)
    assert all(file.num_bytes <= 20_000 for file in list_shards(tmp_path / "b"))
    assert len(list_shards(tmp_path / "b")) > 1


def test_the_same_samples_are_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        with ShardWriter(tmp_path / name) as writer:
            writer.write(make_sample("k"))
    assert (tmp_path / "a" / "00000.tar").read_bytes() == (tmp_path / "b" / "00000.tar").read_bytes()


def test_numbers_continue_and_an_unfinished_shard_never_appears(tmp_path):
    make_shards(tmp_path, 2, 1)
    writer = ShardWriter(tmp_path)
    with pytest.raises(DataError, match="has no members"), writer:
        _ = writer.write(make_sample("a")), writer.write(Sample("b", "s", {}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.tar", "00001.tar"]
    crashed = ShardWriter(tmp_path)
    crashed.write(make_sample("left by a crash"))
    crashed._file.close()  # as the system does for a process that was killed
    with ShardWriter(tmp_path) as writer:
        writer.write(make_sample("b"))
    assert [name for name, _ in members_of(tmp_path / "00002.tar")] == ["b.jpg", "b.json", "b.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.tar", "00001.tar", "00002.tar"]


def test_a_second_writer_on_the_same_folder_is_refused(tmp_path):
    with ShardWriter(tmp_path) as first:
        first.write(make_sample("a"))
        second = ShardWriter(tmp_path)
        with pytest.raises(DataError, match="another process is writing"):
            second.write(make_sample("b"))
    second.write(make_sample("c"))
    second.close()
    assert [len(members_of(tmp_path / name)) for name in ("00000.tar", "00001.tar")] == [3, 3]


def test_samples_that_would_not_read_back_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="both must be at least 1"):
        ShardWriter(tmp_path, max_samples=0)
    with ShardWriter(tmp_path) as writer:
        writer.write(make_sample("twice"))
        for sample, message in [
            (Sample("a.b", "s", {"txt": b""}), "a key has no dot"),
            (Sample("", "s", {"txt": b""}), "cannot be a member's name"),
            (Sample("/root", "s", {"txt": b""}), "cannot be a member's name"),
            (Sample("a", "s", {"JPG": b""}), "an extension is lower case"),
            (Sample("a", "s", {}), "has no members"),
            (make_sample("twice"), "in this shard already"),
        ]:
            with pytest.raises(DataError, match=message):
                writer.write(sample)
        writer.write(Sample("long/" + "ü" * 200, "s", {"txt": b"x"}))
    assert members_of(tmp_path / "00000.tar")[-1] == ("long/" + "ü" * 200 + ".txt", b"x")
