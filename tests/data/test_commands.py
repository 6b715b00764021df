"""`saccade data` from the outside: real folders in, lines or JSON out."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.loopback import Site
from data.making import make_jpeg, make_sample, make_shards, write_samples
from typer.testing import CliRunner

from saccade.cli import app
from saccade.data.sample import Sample
from saccade.data.toy import QUESTIONS, toy_sample, write_toy_shards
from saccade.errors import ConfigError, DataError


def saccade(*words):
    result = CliRunner().invoke(app, ["data", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.fixture
def loose(tmp_path):
    """A folder of pictures with captions, one picture twice."""
    folder = tmp_path / "loose"
    folder.mkdir()
    for number, seed in enumerate([0, 1, 2, 1]):
        (folder / f"{number}.jpg").write_bytes(make_jpeg(96, 80, seed))
        (folder / f"{number}.txt").write_text(f"A picture with the number {number} in its name.")
    return folder


def test_prepare_writes_and_curates_and_inspect_shows_why(loose, tmp_path):
    made = json.loads(saccade("prepare", loose, "-o", tmp_path / "shards", "--workers", 1, "--json"))
    assert (made["samples"], made["shards"]) == (4, 1)
    assert (made["merged"], made["curation"]["num_kept"], made["curation"]["num_shared_images"]) == (0, 4, 2)
    one_per_image = ["--set", 'keep_one_per="image"']
    assert "share their image file" in saccade("prepare", loose, "-o", tmp_path / "shards", "--workers", 1)
    saccade("curate", tmp_path / "shards", *one_per_image)
    page = tmp_path / "look.html"
    shown = saccade("inspect", tmp_path / "shards", "--page", page)
    assert "3 of 4 samples kept" in shown
    assert "exact duplicate" in page.read_text()
    again = saccade("prepare", loose, "-o", tmp_path / "shards", "--workers", 1)
    assert "4 samples in 1 shards" in again


def test_prepare_names_the_first_files_that_it_skips_and_where_the_others_are_listed(loose, tmp_path):
    for number in range(7):
        (loose / f"broken{number}.jpg").write_bytes(b"no image")
        (loose / f"broken{number}.txt").write_text("A text.")
    shown = saccade("prepare", loose, "-o", tmp_path / "shards", "--workers", 1)
    assert "not an image: 7\n    broken0: " in shown
    assert "broken3" not in shown
    assert f"{tmp_path / 'shards' / 'prepare.json'} names up to 100 of each reason" in shown
    assert "broken6" in (tmp_path / "shards" / "prepare.json").read_text()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_prepare_fails_where_curation_drops_every_sample(loose, tmp_path, flags):
    with pytest.raises(DataError, match=r"dropped all 4 samples, 4 for: .*saccade data curate"):
        saccade("prepare", loose, "-o", tmp_path / "shards", "--workers", 1, "--set", "min_side=5000", *flags)


def test_prepare_downloads_with_the_options_given(tmp_path):
    site = Site()
    try:
        table = {
            "url": [site.url("img1"), site.url("moved"), site.url("slow")],
            "text": ["one cat", "two dogs", "three"],
        }
        pq.write_table(pa.table(table), tmp_path / "links.parquet")
        options = ["--allow-host", f"127.0.0.1:{site.port}", "--user-agent", "me/1 (me@example.org)", "--timeout", 3]
        options += ["--retries", 0, "--max-redirects", 1, "--max-per-host", 2, "--port", 80, "--no-curate", "--json"]
        made = json.loads(saccade("prepare", tmp_path / "links.parquet", "-o", tmp_path / "shards", *options))
        assert (made["samples"], made["skipped"]) == (2, {"timeout": 1})
        assert {headers["User-Agent"] for headers in site.headers} == {"me/1 (me@example.org)"}
        assert site.seen == {"img1": 1, "moved": 1, "img": 1, "slow": 1}
        settings = json.loads((tmp_path / "shards" / "prepare.json").read_text())["settings"]["download"]
        assert (settings["timeout_s"], settings["max_redirects"], settings["ports"]) == (3.0, 1, [80])
    finally:
        site.close()


def test_curate_takes_settings_and_copies_what_is_kept(loose, tmp_path):
    saccade("prepare", loose, "-o", tmp_path / "shards", "--no-curate")
    report = json.loads(
        saccade(
            "curate",
            tmp_path / "shards",
            "--set",
            "min_side=90",
            "--workers",
            1,
            "--write",
            tmp_path / "kept",
            "--json",
        )
    )
    assert report["dropped"] == {"image too small": 4}
    report = json.loads(
        saccade(
            "curate",
            tmp_path / "shards",
            "--set",
            "exact_duplicates=false",
            "--set",
            "near_duplicate_images=false",
            "--json",
        )
    )
    assert report["num_kept"] == 4
    with pytest.raises(ConfigError, match="min_side"):
        saccade("curate", tmp_path / "shards", "--set", "min_sides=3")


def test_index_reports_unusable_samples(tmp_path):
    write_samples(tmp_path / "a.tar", [make_sample("a"), Sample("b", "s", {"jpg": b"no picture", "txt": b"text"})])
    assert "2 samples in 1 shards (1 read now), 1 cannot be used" in saccade("index", tmp_path)
    assert json.loads(saccade("index", tmp_path, "--json"))["num_scanned"] == 0


def test_contamination_names_the_pairs(tmp_path):
    for name, keys in (("train", "abc"), ("test", "xc")):
        (tmp_path / name).mkdir()
        write_samples(tmp_path / name / "0.tar", [make_sample(key, seed=ord(key)) for key in keys])
    found = json.loads(saccade("contamination", tmp_path / "train", tmp_path / "test", "--workers", 1, "--json"))
    assert [match["training"] for match in found["matches"]] == ["0.tar/c"]


def test_contamination_counts_training_and_evaluation_samples_once(tmp_path):
    """One training image is three evaluation samples."""
    for name, keys in (("train", "abc"), ("test", "xyzu")):
        (tmp_path / name).mkdir()
        seeds = {key: 1 if key in "cxyz" else ord(key) for key in keys}
        write_samples(tmp_path / name / "0.tar", [make_sample(key, seed=seeds[key]) for key in keys])
    said = saccade("contamination", tmp_path / "train", tmp_path / "test", "--workers", 1)
    assert "1 of 3 training samples show an image of 3 of 4 evaluation samples" in said


def test_toy_samples_depend_on_their_number_alone(tmp_path):
    assert toy_sample(7).members == toy_sample(7).members != toy_sample(8).members
    write_toy_shards(tmp_path, first=5, count=4)
    assert "4 samples in 1 shards" in saccade("index", tmp_path)
    asked = {json.loads(toy_sample(n).members["json"])["questions"][0]["question"] for n in range(20)}
    assert asked == set(QUESTIONS.values())


def test_measure_builds_the_lengths_that_a_training_job_reads(tmp_path, checkpoint):
    make_shards(tmp_path / "shards", 2, 3)
    report = json.loads(saccade("measure", tmp_path / "shards", "--model", checkpoint, "--workers", 1, "--json"))
    assert [(each["shards"], each["shards_measured"], each["samples_kept"]) for each in report] == [(2, 2, 6)]
    assert "6 of 6 samples in 2 shards (0 measured now)" in saccade(
        "measure", tmp_path / "shards", "--model", checkpoint
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
run = "{tmp_path / "run"}"
model.folder = "{checkpoint}"
[[stages]]
name = "learn"
steps = 1
[stages.data]
sources = [{{ path = "{tmp_path / "shards"}", rules.caption_prompt = "What?" }}]
[validation]
every = 1
sources = [{{ path = "{tmp_path / "shards"}" }}]
"""
    )
    report = json.loads(saccade("measure", recipe, "--workers", 1, "--json"))
    assert [each["shards_measured"] for each in report] == [2, 0], "another prompt is measured, the validation data was"
    with pytest.raises(ConfigError, match="give --model"):
        saccade("measure", tmp_path / "shards")
    with pytest.raises(ConfigError, match="recipe alone"):
        saccade("measure", recipe, tmp_path / "shards")
