"""Everything that any stage needs is checked before the first step, and by `check_run` without training."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from train.running import RECIPE, losses, make_checkpoint, read_recipe, write_recipe, write_shards
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import write_config
from saccade.errors import CheckpointError, ConfigError, DataError
from saccade.model.families import load_model_config
from saccade.model.initialize import initialize_random, named_size
from saccade.train.check import check_run
from saccade.train.memory_check import stage_planner
from saccade.train.stages import train

TWO_STAGES = RECIPE + RECIPE[RECIPE.index("[[stages]]") :].replace("learn", "more")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    return make_checkpoint(folder / "checkpoint"), write_shards(folder / "shards", count=12)


@pytest.fixture
def recipe(tmp_path, parts):
    return write_recipe(
        tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=parts[0], shards=parts[1], text=TWO_STAGES
    )


@pytest.mark.parametrize(
    ("override", "kind", "words"),
    [
        ("stages.more.data.sources=[{path='nowhere'}]", DataError, r"stage more: \S*nowhere: No such file"),
        ("stages.more.data.max_seq_len=8", DataError, "stage more: none of 12 consecutive samples fits"),
        ("stages.more.optimizer.lrs={visoin=0}", ConfigError, "stage more: lrs: 'visoin' matches no parameter"),
        ("stages.more.lora={targets=['q_prj']}", ConfigError, "stage more: lora: target 'q_prj'"),
        ("validation={every=1, sources=[{path='held-out'}]}", DataError, r"validation: \S*held-out: No such file"),
    ],
)
def test_an_error_in_a_later_stage_is_raised_before_the_first_step(recipe, tmp_path, override, kind, words):
    config = read_recipe(recipe, "stages.learn.steps=5", override)
    for run in (lambda: check_run(config, device="cpu"), lambda: train(config, device="cpu")):
        with pytest.raises(kind, match=words):
            run()
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_mixture_with_some_weights_missing_is_refused(recipe, parts):
    with pytest.raises(ConfigError, match="some sources have a weight and some have none"):
        read_recipe(recipe, f"stages.more.data.sources=[{{path='{parts[1]}', weight=1}}, {{path='other'}}]")


def test_a_good_recipe_is_reported_and_the_run_folder_is_not_touched(recipe, tmp_path):
    checkpoint, learn, more = check_run(read_recipe(recipe), device="cpu")
    assert "all weights are finite" in checkpoint
    assert learn.startswith('stage "learn": 20 steps, 1 sources, ')
    assert "fits in" in more
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_with_nan_or_inf_is_refused_before_the_first_step(recipe, tmp_path, parts, value):
    broken = shutil.copytree(parts[0], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name][3, 4] = value
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    config = read_recipe(recipe, f"model.folder={broken}")
    for run in (lambda: check_run(config, device="cpu"), lambda: train(config, device="cpu")):
        with pytest.raises(CheckpointError, match=rf"broken: NaN or infinity in {name}"):
            run()
    assert torch.isfinite(tensors[name]).sum() == tensors[name].numel() - 1
    assert not (tmp_path / "run/state").exists() or not list((tmp_path / "run/state").iterdir())


def test_remote_shards_are_cached_as_the_recipes_storage_section_says(recipe, tmp_path, parts):
    memory = fsspec.filesystem("memory")
    for shard in parts[1].glob("*.tar"):
        memory.pipe(f"/train-check/{shard.name}", shard.read_bytes())
    storage = f"{{cache_folder='{tmp_path / 'cache'}', max_attempts=2}}"
    settings = [f"stages.{name}.data.storage={storage}" for name in ("learn", "more")]
    settings += [f"stages.{name}.data.sources=[{{path='memory://train-check'}}]" for name in ("learn", "more")]
    config = read_recipe(recipe, *settings, "stages.learn.steps=2", "stages.learn.schedule.warmup_steps=0")
    assert config.stages[0].data.storage.max_attempts == 2
    train(read_recipe(recipe, *settings, "stages.learn.steps=3", "stages.more.steps=3"), device="cpu")
    assert len(losses(tmp_path / "run")) == 6
    assert any((tmp_path / "cache").rglob("*")), "blocks and index are in the folder of the recipe"


def test_the_command_line_checks_a_recipe_and_prints_its_keys(recipe):
    checked = CliRunner().invoke(app, ["train", str(recipe), "--check", "--device", "cpu"])
    assert checked.exit_code == 0, checked.output
    assert 'stage "more": 20 steps' in checked.output
    keys = CliRunner().invoke(app, ["train", "--keys"])
    assert keys.exit_code == 0
    assert "| `max_seq_len` | integer | `16384` |" in keys.output


MEASURED_RUN = """
import re, sys, threading
from pathlib import Path
from saccade.config import load_config
from saccade.train import TrainConfig, train

def children(process):
    found = " ".join(path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")).split()
    return [one for child in found for one in (child, *children(child))]

def num_bytes(path, *names):
    sizes = re.findall(rf"(?:{'|'.join(names)}):\\s+([0-9]+) kB", Path(path).read_text())
    return sum(int(size) for size in sizes) * 1024

def watch():
    while not is_done.wait(0.05):
        try:
            files = [f"/proc/{one}/smaps_rollup" for one in children("self")]
            peaks.append(sum(num_bytes(file, "Pss_Anon", "Pss_Shmem") for file in files))
        except (OSError, ValueError):
            pass  # a process has ended meanwhile

if __name__ == "__main__":
    is_done, peaks = threading.Event(), [0]
    watcher = threading.Thread(target=watch)
    watcher.start()
    train(load_config(TrainConfig, Path(sys.argv[1])), device="cpu")
    is_done.set()
    watcher.join()
    print(num_bytes("/proc/self/status", "VmHWM") - num_bytes("/proc/self/status", "RssFile") + max(peaks))
"""
"""Measures the peak of memory that the system cannot reclaim, of a run and its workers.

Pages of mapped library files are excluded: their number depends on how the files came into the page cache.
"""


WIDE = replace(
    named_size("tiny").language,
    hidden_size=1024,
    num_heads=32,
    num_kv_heads=16,
    intermediate_size=4096,
    vocab_size=4000,
)


TINY = named_size("tiny").language


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="libraries of CUDA take memory that a plan for a CPU does not count"
)
@pytest.mark.parametrize(
    ("language", "tokens", "dtype", "num_workers"),
    [
        pytest.param(WIDE, 240, "fp32", 0, marks=pytest.mark.slow),
        pytest.param(TINY, 240, "fp32", 0, marks=pytest.mark.slow),
        pytest.param(TINY, 8000, "fp32", 0, marks=pytest.mark.slow),
        pytest.param(TINY, 8000, "bf16", 0, marks=pytest.mark.slow),
        pytest.param(WIDE, 240, "bf16", 4, marks=pytest.mark.slow),
        (TINY, 240, "bf16", 2),
    ],
    ids=["mostly parameters", "mostly Python", "mostly activations", "bf16", "bf16 and workers", "workers"],
)
def test_the_memory_planned_on_a_cpu_is_what_a_run_that_saves_takes(tmp_path, language, tokens, dtype, num_workers):
    initialize_random(tmp_path / "model", replace(named_size("tiny"), language=language), dtype=torch.float32)
    path, shards = tmp_path / "recipe.toml", write_shards(tmp_path / "shards", count=max(12, tokens // 20))
    write_recipe(path, run=tmp_path / "run", checkpoint=tmp_path / "model", shards=shards)
    settings = ["steps=2", "schedule.warmup_steps=1", f"data.max_seq_len={tokens}", f"data.max_patches={tokens // 4}"]
    settings += [f"data.num_workers={num_workers}"]
    stage = [f"stages.learn.{setting}" for setting in settings]
    config = read_recipe(path, *stage, "checkpoint.every=1", f"model.dtype={dtype}")
    write_config(config, path)
    planner, size = stage_planner(config, config.stages[0], load_model_config(tmp_path / "model"), 1, "cpu")
    planned = planner.plan(size).total_gib
    assert f"{planned:.1f} GiB planned" in check_run(config, device="cpu")[-1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # takes memory
    script = tmp_path / "measured_run.py"
    script.write_text(MEASURED_RUN)
    run = subprocess.run([sys.executable, script, path], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert planned == pytest.approx(int(run.stdout.split()[-1]) / 2**30, rel=0.1)
