"""Curation through its public API: which samples are dropped, for which reason; new settings read no pixels."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from data.making import encode, make_jpeg, make_picture, make_sample, make_shards, write_samples

from saccade.config import load_config, write_config
from saccade.data.curate import CurationSettings, ScoreRange, curate
from saccade.data.index import open_index
from saccade.errors import ConfigError, DataError

daft_workers = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def _collect_pipes():
    """Daft leaves the pipes of its workers to the garbage collector: they are collected in the test that made them."""
    yield
    gc.collect()


ALL_KEPT = CurationSettings(exact_duplicates=False, near_duplicate_images=False)


def decisions(folder):
    """Reason of every sample by key, None where it is kept."""
    index = open_index(folder, check_files=False)
    found = {}
    for shard in range(len(index.shards)):
        keys = index.read(shard, ["key"])["key"].to_pylist()
        table = index.decisions(shard)
        assert table["keep"].to_pylist() == [reason is None for reason in table["reason"].to_pylist()]
        found |= dict(zip(keys, table["reason"].to_pylist(), strict=True))
    return found


def curated(folder, samples, settings=ALL_KEPT, **options):
    write_samples(folder / "00000.tar", samples)
    report = curate(folder, settings, num_workers=1, **options)
    reasons = decisions(folder)
    assert report.dropped == Counter(reason for reason in reasons.values() if reason), "the report counts the reasons"
    assert report.num_kept == sum(reason is None for reason in reasons.values())
    return reasons


def animated_gif():
    frames = [make_picture(80, 80, seed) for seed in range(3)]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:])


def test_images_are_checked_by_header_and_by_decoding(tmp_path):
    whole = make_jpeg(256, 256, 3)
    members = {
        "good": {"jpg": whole},
        "small": {"jpg": make_jpeg(40, 200, 1)},
        "large": {"jpg": make_jpeg(300, 300, 2)},
        "narrow": {"png": encode(make_picture(900, 70, 4), "PNG")},
        "truncated": {"jpg": whole[: len(whole) // 2]},
        "noise": {"jpg": b"\xff\xd8\xff" + bytes(500)},
        "animated": {"gif": animated_gif()},
        "text": {},
    }
    samples = [make_sample(key, members={**each, "txt": b"a cat on a wall"}) for key, each in members.items()]
    settings = CurationSettings(min_side=64, max_pixels=280 * 280, max_aspect_ratio=5, require_image=True)
    assert curated(tmp_path, samples, settings) == {
        "good": None,
        "small": "image too small",
        "large": "image too large",
        "narrow": "aspect ratio",
        "truncated": "corrupt image",
        "noise": "unreadable sample",
        "animated": "animated image",
        "text": "no image",
    }


def test_captions_are_checked_by_their_text(tmp_path):
    texts = {
        "good": "Two dogs play with a red ball on the beach.",
        "short": "dog",
        "one word": "photosynthesis",
        "chinese": "一只猫坐在墙上",
        "long": "word " * 30,
        "missing": "Image not available",
        "click": "Click here to enlarge",
        "file": "IMG_20190312_183.jpg",
        "camera": "DSC_0042",
        "url": "https://shop.example.com/item?id=3",
        "digits": "12 / 2019 - 33",
        "repeated": "buy now cheap buy now cheap buy now cheap",
        "hahaha": "hahahahahahahahahahahaha yes",
        "blocked": "A very Forbidden Thing on a table",
        "within": "An unforbidden thing on a table",
        "german": "Ein Hund spielt mit dem Ball und läuft auf der Wiese",
        "russian": "Собака играет мячом на пляже",
        "unclear": "Red dress size M",
        "pattern": "great offer, call 555-1234 today",
        "no text": "",
    }
    samples = [make_sample(key.replace(" ", "-"), seed=n, text=text) for n, (key, text) in enumerate(texts.items())]
    settings = CurationSettings(
        near_duplicate_images=False,
        max_characters=120,
        blocked_words=("forbidden thing",),
        languages=("en", "zh"),
        drop_patterns=(r"\d{3}-\d{4}",),
    )
    assert curated(tmp_path, samples, settings) == {
        "good": None,
        "short": "text too short",
        "one-word": "text too short",
        "chinese": None,
        "long": "text too long",
        "missing": "boilerplate text",
        "click": "boilerplate text",
        "file": "boilerplate text",
        "camera": "boilerplate text",
        "url": "boilerplate text",
        "digits": "boilerplate text",
        "repeated": "repetitive text",
        "hahaha": "repetitive text",
        "blocked": "blocked word",
        "within": None,
        "german": "other language",
        "russian": "other language",
        "unclear": None,
        "pattern": "pattern in text",
        "no-text": "unreadable sample",
    }


def test_one_good_caption_of_several_is_enough_and_answers_may_be_short(tmp_path):
    question = {"questions": [{"question": "How many?", "answer": "2"}] * 4}
    samples = [
        make_sample("mixed", seed=1, fields={"captions": ["dog", "A dog runs over the grass", "IMG_1.jpg"]}),
        make_sample("bad", seed=2, fields={"captions": ["IMG_1.jpg and", "x", "image not found"]}),
        make_sample("asked", seed=3, fields=question),
        make_sample(
            "shouted",
            seed=4,
            fields={"messages": [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "damn"}]},
        ),
    ]
    settings = CurationSettings(blocked_words=("damn",))
    assert curated(tmp_path, samples, settings) == {
        "mixed": None,
        "bad": None,
        "asked": None,
        "shouted": "blocked word",
    }
    settings = CurationSettings(drop_patterns=("jpg", "not found"))
    assert curate(tmp_path, settings, num_workers=1).dropped == {"pattern in text": 1}
    assert decisions(tmp_path)["bad"] == "pattern in text", "the reason is that of the first caption"


def test_scores_are_thresholds_on_numbers_of_the_json_and_absent_ones_are_reported(tmp_path, caplog):
    values = [
        {"similarity": 0.35, "punsafe": 0.1},
        {"similarity": 0.1, "punsafe": 0.0},
        {"similarity": 0.3, "punsafe": 0.9},
        {},
        {"similarity": "high"},
    ]
    samples = [make_sample(str(n), seed=n, fields=fields) for n, fields in enumerate(values)]
    settings = CurationSettings(
        scores={"similarity": ScoreRange(min=0.2), "punsafe": ScoreRange(max=0.5, when_absent="drop")}
    )
    reasons = curated(tmp_path, samples, settings)
    assert list(reasons.values()) == [None, "score similarity", "score punsafe", "score punsafe", "score punsafe"]
    report = curate(tmp_path, settings, num_workers=1)
    assert report.absent_scores == {"similarity": 2, "punsafe": 2}
    assert "2 samples have no score similarity and are kept" in caplog.text
    table = open_index(tmp_path).decisions(0)
    assert table["similarity"].to_pylist() == [0.35, 0.1, 0.3, None, None]


def test_a_changed_threshold_needs_no_pixel(tmp_path):
    make_shards(tmp_path, 3, 8)
    first = curate(tmp_path, CurationSettings(), num_workers=1)
    assert (first.num_measured, first.num_kept) == (3, 24)
    for tar in tmp_path.glob("*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))  # as long as before, nothing in it
    second = curate(tmp_path, CurationSettings(min_side=70), num_workers=1)
    assert (second.num_measured, second.dropped) == (0, {"image too small": 18})
    assert curate(tmp_path, CurationSettings(), num_workers=1) == replace(first, num_measured=0)


def test_decisions_apply_where_the_folder_is_read(tmp_path):
    make_shards(tmp_path, 2, 6)
    curate(tmp_path, CurationSettings(min_side=70), num_workers=1)
    index = open_index(tmp_path)
    assert index.kept_sizes.tolist() == [2, 2]
    assert index.kept(0).tolist() == [2, 5]
    assert index.summary()["settings"]["min_side"] == 70
    assert index.summary()["counts"] == {"samples": 12, "image too small": 8, "kept": 4}


@daft_workers
def test_every_sample_has_exactly_one_reason_and_workers_change_nothing(tmp_path):
    make_shards(tmp_path / "one", 4, 10)
    write_samples(
        tmp_path / "one" / "00004.tar",
        [make_sample(f"x{n}", seed=n, text=f"caption {n} of an image") for n in range(10)],
    )
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    seen = []
    one = curate(tmp_path / "one", CurationSettings(min_side=70), num_workers=1)
    two = curate(tmp_path / "two", CurationSettings(min_side=70), num_workers=2, on_progress=seen.append)
    assert one == two
    assert decisions(tmp_path / "one") == decisions(tmp_path / "two")
    assert one.num_kept + sum(one.dropped.values()) == one.num_samples == 50
    assert [progress.num_done for progress in seen] == [1, 2, 3, 4, 5]
    assert seen[-1].num_samples == 50


def test_kept_samples_can_be_copied_byte_by_byte_into_new_shards(tmp_path):
    make_shards(tmp_path / "all", 2, 6)
    write_samples(
        tmp_path / "all" / "00002.tar", [make_sample("000000002", seed=99, width=80, height=80)]
    )  # a key used before
    with pytest.raises(DataError, match="exists already"):
        curate(tmp_path / "all", CurationSettings(), write_to=tmp_path)
    report = curate(tmp_path / "all", CurationSettings(min_side=70), num_workers=1, write_to=tmp_path / "kept")
    source, copy = open_index(tmp_path / "all"), open_index(tmp_path / "kept")
    before = [source.read_sample(shard, row) for shard in range(3) for row in source.kept(shard).tolist()]
    after = [copy.read_sample(shard, row) for shard in range(len(copy.shards)) for row in range(copy.sizes[shard])]
    assert [(s.key, s.members) for s in after] == [(s.key, s.members) for s in before]
    assert len(after) == report.num_kept == 5


CRASHING = """
import os, sys
from saccade.data.curate import CurationSettings, curate

def stop(progress):
    if progress.num_done == 2:
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    curate(sys.argv[1], CurationSettings(min_side=70), num_workers=int(sys.argv[2]), on_progress=stop)
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_curation_resumes_and_decides_the_same(tmp_path, num_workers):
    make_shards(tmp_path / "killed", 4, 8)
    shutil.copytree(tmp_path / "killed", tmp_path / "whole")
    (tmp_path / "crash.py").write_text(CRASHING)
    run = subprocess.run([sys.executable, tmp_path / "crash.py", tmp_path / "killed", str(num_workers)], check=False)
    assert run.returncode == -signal.SIGKILL
    whole = curate(tmp_path / "whole", CurationSettings(min_side=70), num_workers=1)
    again = curate(tmp_path / "killed", CurationSettings(min_side=70), num_workers=1)
    assert again.num_measured <= 2 < whole.num_measured
    assert again == replace(whole, num_measured=again.num_measured)
    assert decisions(tmp_path / "killed") == decisions(tmp_path / "whole")


def test_a_curation_that_broke_off_while_deciding_is_noticed_and_repeated(tmp_path):
    make_shards(tmp_path, 2, 6)
    curate(tmp_path, CurationSettings(min_side=70), num_workers=1)
    (tmp_path / "index" / "decisions" / "summary.json").unlink()
    with pytest.raises(DataError, match="curation was not finished"):
        _ = open_index(tmp_path).kept_sizes
    curate(tmp_path, CurationSettings(min_side=70), num_workers=1)
    assert open_index(tmp_path).kept_sizes.tolist() == [2, 2]


def test_damaged_features_of_a_changed_shard_are_measured_again(tmp_path):
    make_shards(tmp_path, 2, 6)
    curate(tmp_path, CurationSettings(), num_workers=1)
    (tmp_path / "index" / "features" / "00000.parquet").write_bytes(b"PAR1 no")
    write_samples(tmp_path / "00001.tar", [make_sample("new", seed=500, text="something else is seen here")])
    report = curate(tmp_path, CurationSettings(), num_workers=1)
    assert (report.num_measured, report.num_samples) == (2, 7)


@daft_workers
def test_a_shard_cut_after_indexing_is_an_error_with_a_remedy_also_from_a_worker(tmp_path):
    make_shards(tmp_path, 2, 6)
    index = open_index(tmp_path)
    for tar in tmp_path.glob("*.tar"):
        os.truncate(tar, 2000)
    from saccade.data.curate.features import measure_features

    with pytest.raises(DataError, match="It was cut or replaced"):
        measure_features(index, num_workers=2)


def test_settings_are_read_from_a_file_and_invalid_ones_are_refused(tmp_path):
    settings = CurationSettings(languages=("en",), scores={"similarity": ScoreRange(min=0.3)}, blocked_words=("a b",))
    write_config(settings, tmp_path / "curate.toml")
    assert load_config(CurationSettings, tmp_path / "curate.toml") == settings
    assert (
        load_config(CurationSettings, tmp_path / "curate.toml", ["scores.similarity.max=0.9"]).scores["similarity"].max
        == 0.9
    )
    for wrong, words in [
        ({"min_side": 0}, "min_side is 0"),
        ({"max_pixels": 10**9}, "no image above"),
        ({"max_aspect_ratio": 0.5}, "a square has 1"),
        ({"max_word_repetition": 2.0}, "between 0 and 1"),
        ({"min_text_similarity": 0.2}, "0.7 to 1"),
        ({"languages": ("english",)}, "english"),
        ({"drop_patterns": ("(",)}, "regular expression"),
        ({"blocked_words": (" ",)}, "blocked_words"),
    ]:
        with pytest.raises(ConfigError, match=words):
            CurationSettings(**wrong)
    with pytest.raises(ConfigError, match="min, max or both"):
        ScoreRange()


def test_folders_of_text_alone_and_empty_shards_are_curated_too(tmp_path):
    texts = ["only a few words", "Only a few words", "something else is said here", "no"]
    write_samples(
        tmp_path / "00000.tar", [make_sample(f"t{n}", members={"txt": text.encode()}) for n, text in enumerate(texts)]
    )
    write_samples(tmp_path / "00001.tar", [])
    report = curate(tmp_path, CurationSettings(near_duplicate_texts=True), num_workers=1)
    assert report.dropped == {"text too short": 1, "exact duplicate": 1}
    report = curate(tmp_path, CurationSettings(require_image=True, max_images_per_text=1), num_workers=1)
    assert (report.num_kept, report.dropped) == (0, {"no image": 4})


def test_numbers_no_float_can_hold_are_no_scores(tmp_path):
    fields = [{"similarity": 10**400, "other": True}, {"similarity": float("nan")}, {"similarity": 1}]
    samples = [make_sample(f"n{n}", seed=n, fields=each) for n, each in enumerate(fields)]
    settings = CurationSettings(scores={"similarity": ScoreRange(min=0.5, when_absent="drop")})
    assert list(curated(tmp_path, samples, settings).values()) == ["score similarity", "score similarity", None]
