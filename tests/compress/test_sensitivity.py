"""Sensitivity and the maps that follow from it; the command."""

import itertools
import json
import random

import pytest

from saccade.cli.compress import _verdict
from saccade.compress.mixed_scheme import choose_within_size
from saccade.compress.scheme import load_scheme
from saccade.compress.sensitivity import Candidate, Sensitivity
from saccade.compress.verify import Fidelity
from saccade.errors import ConfigError


def make_sensitivity(rng, num_groups):
    def options(group):
        size = rng.randint(1000, 9000)
        forms = (("keep", 1.0, 0.0), ("int8", 0.5, rng.random() * 1e-3), ("int4", 0.27, rng.random() * 1e-1))
        return [
            Candidate(group=group, form=f, group_size=None, num_bytes=int(size * s), kl=k, loss_change=k)
            for f, s, k in forms
        ]

    groups = [f"language.layers.{i}.mlp" for i in range(num_groups)]
    return Sensitivity(
        candidates={g: options(g) for g in groups}, projections={g: [g] for g in groups}, other_bytes=3000
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_map_of_a_size_is_the_best_of_all_maps(seed):
    rng = random.Random(seed)
    sensitivity = make_sensitivity(rng, 6)
    target = rng.uniform(0.5, 0.95)
    chosen = choose_within_size(sensitivity, target)
    budget = target * sensitivity.original_bytes - sensitivity.other_bytes
    assert sum(one.num_bytes for one in chosen.values()) <= budget
    maps = itertools.product(*sensitivity.candidates.values())
    step = budget / 20_000 * 6  # sizes are rounded up to steps of one group each
    best = min(sum(one.kl for one in m) for m in maps if sum(one.num_bytes for one in m) <= budget - step)
    assert sum(one.kl for one in chosen.values()) <= best + 1e-12


def test_a_size_that_no_map_reaches_is_refused_with_the_smallest():
    with pytest.raises(ConfigError, match=r"the smallest mixed scheme has 0\.\d+ of the bytes"):
        choose_within_size(make_sensitivity(random.Random(0), 4), 0.1)


@pytest.mark.slow
def test_the_command_picks_a_scheme_within_a_size_and_reports(checkpoint, shards, tmp_path, command):
    options = ("--calibration", str(shards / "small"), "--num-samples", "8", "--verify-samples", "8", "--device", "cpu")
    ended = command(
        "compress", str(checkpoint), "--target-size", "0.5", "-o", str(tmp_path / "out"), *options, "--json"
    )
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert found["ratio"] <= 0.5
    assert [row["name"] for row in found["models"]] == ["original", "mixed-0.5"]
    assert found["models"][1]["memory_bytes"] < found["models"][0]["memory_bytes"]
    written = tmp_path / "out" / "compression"
    expected = {"report.html", "report.json", "scheme.toml", "sensitivity.json", "sensitivity.svg"}
    assert {file.name for file in written.iterdir()} >= expected
    groups = json.loads((written / "sensitivity.json").read_text())["groups"]
    assert {name.partition(".")[0] for name in groups} == {"vision", "projector", "language"}
    again = load_scheme(written / "scheme.toml")
    assert again.rules
    assert "<script" not in (written / "report.html").read_text()


def test_a_model_that_loses_more_than_its_bound_is_refused_in_one_line(tmp_path):
    def verdict(loss, bound):
        return _verdict(tmp_path, Fidelity(kl=0.1, loss=loss, original_loss=1.0, agreement=0.9, num_tokens=10), bound)

    assert verdict(1.02, 0.01).endswith("Use a scheme with more bits, or leave out --scheme to have one picked")
    assert "perplexity rises by 2.02 % (2.718 to 2.773), over --max-loss 1 %" in verdict(1.02, 0.01)
    assert verdict(1.005, 0.01) is None
    assert verdict(0.9, 0.0) is None
    assert verdict(9.0, None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --scheme NAME"),
        (("--scheme", "int9"), "scheme 'int9' is not known"),
        (("--scheme", "w4a16-awq"), "--calibration SHARDS"),
        (("--target-size", "0.4"), "--calibration SHARDS"),
        (("--target-size", "35"), "--target-size 35: give a share"),
        (("--scheme", "int8", "--max-loss", "much"), "give a share"),
        (("--scheme", "int8", "--max-loss", "1%"), "--verify SHARDS"),
        (("--scheme", "int8", "--tasks", "vqa"), "go together"),
        (("--scheme", "int8", "--target-size", "0.4"), "leave out --scheme"),
        (("--target-size", "0.4", "--calibration", "no-shards"), "no-shards: No such file or directory"),
        (("--scheme", "int8", "--calibration", "no-shards"), "no-shards: No such file or directory"),
        (("--scheme", "int8", "--group-size", "64"), "--group-size is for int4 weights, and scheme int8 has none"),
        (("--target-size", "0.4", "--group-size", "64"), "--group-size is of a named scheme"),
    ],
)
def test_a_mistake_is_one_line(options, message, checkpoint, tmp_path, command):
    ended = command("compress", str(checkpoint), "-o", str(tmp_path / "out"), *options)
    assert ended.status == 2
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_full_output_folder_is_refused_before_schemes_are_tried(checkpoint, shards, tmp_path, command):
    (tmp_path / "kept.txt").write_text("mine")
    options = ("--target-size", "0.5", "--calibration", str(shards / "small"), "-o", str(tmp_path))
    ended = command("compress", str(checkpoint), *options)
    assert ended.status == 2
    assert "exists and is not empty" in ended.err
    assert "trial of" not in ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]
