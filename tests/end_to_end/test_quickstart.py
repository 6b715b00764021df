"""`saccade quickstart`: the whole flow in real processes, killed and continued, at the smallest size."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from venv import create as make_environment

import pytest

from saccade.cli.quickstart import HELD_OUT, TRAINING, Quickstart, finished_steps, record_steps, tasks_of
from saccade.cli.quickstart_server import next_steps
from saccade.data.index import open_index
from saccade.data.scenes import scene_sample
from saccade.errors import ConfigError, DataError

SMALL = ["--scenes", "40", "--steps", "12", "--device", "cpu"]
STEPS = ["data", "prepare", "init", "train", "evaluate"]


def saccade(*words):
    return [sys.executable, "-m", "saccade", *map(str, words)]


def kill_while_training(folder):
    """Start the quickstart, and end it with SIGKILL once training has begun."""
    with subprocess.Popen(
        saccade("quickstart", "--dir", folder, *SMALL), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as first:
        for line in first.stderr:
            if "step 01/12" in line:
                break
        first.send_signal(signal.SIGKILL)
        first.stderr.read()  # ends when the training process has ended too


@pytest.mark.slow
def test_killed_while_training_it_continues_and_serves_and_the_third_time_does_nothing(tmp_path):
    folder = tmp_path / "quickstart"
    kill_while_training(folder)
    made = json.loads((folder / "quickstart.json").read_text())
    assert list(made["steps"]) == STEPS[:3]
    drawn = (folder / "raw" / "train" / "000000.png").stat().st_mtime_ns

    ended = subprocess.run(
        saccade("quickstart", "--dir", folder, *SMALL, "--json"), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert list(report["steps"]) == STEPS
    assert ended.stderr.count("(done before)") == 3
    assert (folder / "raw" / "train" / "000000.png").stat().st_mtime_ns == drawn
    assert re.search(r'stage "learn": step [1-9]', ended.stderr), (
        "training continues from the state it saved at its end"
    )
    assert set(report["steps"]["evaluate"]["scores"]) == {"vqa", "captioning"}
    assert set(report["steps"]["evaluate"]["scores"]["vqa"]) == {"trained", "image-shuffled", "untrained"}
    assert Path(report["steps"]["train"]["checkpoint"]).name == "step-00000012"
    assert isinstance(report["served"]["answer"], str)
    assert Path(report["served"]["image"]).is_file()
    assert "   saccade chat " in ended.stderr

    before = (folder / "quickstart.json").read_bytes()
    again = subprocess.run(
        saccade("quickstart", "--dir", folder, *SMALL, "--no-serve"), capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("(done before)") == 5
    assert "vqa_accuracy" in again.stdout, "the table is shown again"
    assert (folder / "quickstart.json").read_bytes() == before


def test_real_images_with_captions_are_prepared_and_split(tmp_path):
    data = tmp_path / "photos"
    data.mkdir()
    for number in range(0, 160, 2):  # scenes with captions, as files
        sample = scene_sample(number)
        (data / f"{sample.key}.png").write_bytes(sample.members["png"])
        (data / f"{sample.key}.txt").write_bytes(sample.members["txt"])
    script = Quickstart(tmp_path / "out", data)
    assert str(data) in script.make_data(print)["lines"][0]
    report = script.prepare(print)
    sizes = [len(open_index(str(script.folder / name))) for name in (TRAINING, HELD_OUT)]
    assert sum(sizes) == report["kept"] <= report["samples"] == 80
    assert min(sizes) > 0
    assert tasks_of(script.folder / HELD_OUT) == ["captioning"]
    with pytest.raises(DataError, match="no such folder"):
        Quickstart(tmp_path / "out", tmp_path / "nowhere").make_data(print)


def test_the_recipe_is_the_tiny_one_and_with_a_text_model_that_of_smollm2(tmp_path):
    tiny = Quickstart(tmp_path).train_command()
    smol = Quickstart(tmp_path, text_model=tmp_path / "smol.gguf").train_command()
    assert Path(tiny[1]).name == "tiny.toml"
    assert Path(smol[1]).name == "smollm2-vlm.toml"
    from saccade.config import load_config
    from saccade.train import TrainConfig

    for words in (tiny, smol):
        config = load_config(TrainConfig, Path(words[1]), words[words.index("--set") + 1 :: 2])
        assert config.run == tmp_path / "run"
        assert {source.path for stage in config.stages for source in stage.data.sources} == {
            str(tmp_path / "shards" / "train")
        }


def test_a_folder_of_something_else_or_of_other_options_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("chapter 1")
    with pytest.raises(ConfigError, match=r"is not empty.*saccade quickstart --dir"):
        finished_steps(tmp_path, {})
    with pytest.raises(ConfigError, match="is not empty"):
        finished_steps(tmp_path / "thesis.txt", {})
    record_steps(tmp_path / "mine", {"steps": 5}, {"data": {"lines": ["x"]}})
    assert finished_steps(tmp_path / "mine", {"steps": 5}) == {"data": {"lines": ["x"]}}
    with pytest.raises(ConfigError, match=r"other options.*steps 5"):
        finished_steps(tmp_path / "mine", {"steps": 6})


def test_the_next_commands_can_be_pasted_into_a_shell(monkeypatch, tmp_path):
    environment = tmp_path / "an environment"
    make_environment(environment, with_pip=False)
    (environment / "bin" / "saccade").symlink_to("/bin/true")
    monkeypatch.setattr(sys, "prefix", str(environment))
    [_, activate, *_] = next_steps(Path("run"), Path("a.png"), "What?")
    found = subprocess.run(["sh", "-c", f"{activate}\ncommand -v saccade"], capture_output=True, text=True)
    assert found.stdout == f"{environment}/bin/saccade\n"
    monkeypatch.setenv("PATH", str(environment / "bin"), prepend=os.pathsep)
    question = 'Is "5$" or `x` on it?'
    title, *lines = next_steps(Path("my run/step-1"), Path("my run/a.png"), question)
    assert title == "next:"
    shell = [shlex.split(line, comments=True) for line in lines]
    assert shell[0] == ["saccade", "chat", "my run/step-1", "my run/a.png", question]
    assert shell[1] == ["saccade", "serve", "my run/step-1"]
    assert shell[2:] == [["saccade", "quickstart", "--dir", "mine", "--data", "FOLDER"], ["saccade", "recipes", "list"]]
    run = subprocess.run(["sh", "-c", f'saccade() {{ printf %s "$4"; }}; {lines[0]}'], capture_output=True, text=True)
    assert run.stdout == question


def test_an_unknown_device_is_refused_before_anything_is_made(command, tmp_path):
    ended = command("quickstart", "--dir", tmp_path / "x", "--scenes", "20", "--no-serve", "--device", "gpu")
    assert ended.status == 2
    assert ended.err == "saccade: unknown device 'gpu'. Use cpu, cuda, cuda:1 or auto\n"
    assert not (tmp_path / "x").exists()


def test_a_text_model_without_a_gpu_is_refused(command, tmp_path):
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        pytest.skip("a text model is refused only where there is no GPU")
    ended = command("quickstart", "--dir", tmp_path / "x", "--text-model", tmp_path / "y.gguf")
    assert ended.status == 2
    assert "needs a GPU" in ended.err
