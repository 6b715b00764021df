"""Every example runs on a tiny checkpoint with random weights.

It runs in this process: importing torch again would take longer than the example.
"""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from model.hugging_face import picture

from saccade.config import load_config
from saccade.data.toy import write_toy_shards
from saccade.fleet.config import FleetConfig
from saccade.model.initialize import initialize_random, named_size

EXAMPLES = Path(__file__).parents[1] / "examples"
CPU = ("model.dtype=fp32", "checkpoint.export_dtype=fp32", "stages.instruct.data.num_workers=0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "tiny"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "photo.png"
    picture(84, 84, 1).save(path)
    return path


@pytest.fixture
def example(monkeypatch, capsys, restore_the_logger):
    """Run an example as its command does; returns what it prints."""

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_a_checkpoint_is_asked_about_an_image(example, checkpoint, image):
    assert example("chat_with_image.py", checkpoint, image, "What is it?")


def test_structured_output_is_valid_with_random_weights(example, checkpoint, image):
    words = example("structured_output.py", checkpoint, image).split()
    assert words[1:3] == ["objects,", "colour"]
    assert 0 <= int(words[0]) <= 99


def test_lora_trains_on_a_folder_of_images_with_captions(example, checkpoint, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(6):
        picture(84, 56, number).save(photos / f"{number}.jpg")
        (photos / f"{number}.txt").write_text(f"picture number {number}")
    out = example("train_lora.py", checkpoint, photos, tmp_path / "work", *CPU)
    assert "6 samples" in out
    [exported] = (tmp_path / "work" / "run" / "checkpoints").iterdir()
    assert (exported / "adapter" / "adapter_model.safetensors").exists()
    assert (exported / "model.safetensors").exists()


def test_two_checkpoints_are_compared(example, checkpoint, tmp_path):
    write_toy_shards(tmp_path / "test", first=0, count=4)
    out = example("evaluate_and_compare.py", checkpoint, checkpoint, tmp_path / "test", tmp_path / "results")
    assert "difference +0.000 [+0.000, +0.000], not significant" in out


def test_the_notebook_runs_and_is_stored_without_outputs():
    cells = [cell for cell in json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    names: dict = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(names["completions"]) == 2


def test_the_example_of_a_fleet_is_valid():
    fleet = load_config(FleetConfig, EXAMPLES / "fleet.toml")
    [model] = fleet.models
    assert [version.traffic for version in model.versions] == [100.0]
    assert model.probes, "it shows how a version is probed"


@pytest.mark.slow
def test_a_fleet_runs_on_several_nodes_of_one_machine(checkpoint, tmp_path):
    port = free_port()
    text = (EXAMPLES / "fleet.toml").read_text().replace("port = 8000", f"port = {port}")
    text = text.replace('"checkpoint"', json.dumps(str(checkpoint))).replace("fleet-state", str(tmp_path / "state"))
    pool = "{ min_replicas = 2, max_replicas = 2, cpus_per_replica = 1.5 }"  # a node has room for one
    text = re.sub(r"engines = \{.*\}", f"engines = {pool}", text) + "\n[front]\ncpus_per_replica = 0.5\n"
    (tmp_path / "fleet.toml").write_text(text)
    command = [sys.executable, EXAMPLES / "several_nodes.py", tmp_path / "fleet.toml", "--nodes", "2", "--cpus", "2"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, (tmp_path / "log").open("w+") as log:
        environment = os.environ | {"RAY_TMPDIR": folder}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
        try:
            wait_for_line(process, tmp_path / "log", "Ctrl-C ends it")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/fleet", timeout=30) as answer:
                [version] = json.load(answer)["models"][0]["versions"]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    assert len(version["replicas"]) == 2
    assert (process.returncode, "the fleet is down" in (tmp_path / "log").read_text()) == (0, True)


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def wait_for_line(process, log, line):
    deadline = time.monotonic() + 240
    while line not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def test_every_example_is_listed_and_tested():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb", ".toml")}
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in listed for name in files)
    served = Path(__file__).parent / "serve" / "test_documents.py"
    tested = Path(__file__).read_text() + served.read_text()
    assert all(name in tested for name in files - {"lora.toml"})
